// Rows of an embedding table as f32: the values that the checkpoint's blocks stand for, bit for bit.
//
// A warp makes the same row's values of 8 tiles, 4 lanes a tile. Rows outside the table (another rank's) are zeros; a
// table of several parts is several launches, of which only the first writes those zeros (`is_first`).
//
// Launch constants: FORMATS (one format), or WEIGHT (F32, F16, BF16) for tables that are not quantized.
// Grid: blocks of 8 warps over the tiles, or of 256 columns; tokens.

#include "layer.cuh"
#include "plain.cuh"

// The row of the part that a token wants, or one past its end.
__device__ __forceinline__ uint32_t row_of(const Part& part, uint32_t first_row, uint32_t token_id) {
    const uint32_t row = token_id - first_row;
    return row >= part.first_row && row - part.first_row < part.rows ? row - part.first_row : part.rows;
}

#ifdef FORMATS
extern "C" __global__ void __launch_bounds__(256)
    embed(const __grid_constant__ Layer layer, const uint32_t* token_ids, uint32_t first_row, uint32_t is_first,
          uint32_t columns, float* output) {
    using F = FORMATS;
    allow_next();
    wait_for_previous();
    const Part& part = layer.parts[0];
    const unsigned lane = threadIdx.x % WARP;
    const uint32_t tile = (blockIdx.x * 8 + threadIdx.x / WARP) * 8 + lane / 4;
    const uint32_t row = row_of(part, first_row, token_ids[blockIdx.y]);
    if (tile >= layer.num_tiles || (row == part.rows && !is_first)) return;
    float* target = output + (size_t)blockIdx.y * columns;
    const unsigned owner = row % GROUP_ROWS * 4 + lane % 4;
    const uint8_t* group = group_tiles(part, row / GROUP_ROWS, layer.num_tiles, F::TILE_BYTES);
    for (unsigned index = 0; index < 2; ++index) {
        const uint32_t first = tile * TILE_COLUMNS + (4 * index + lane % 4) * WARP;
        if (first >= columns) continue;
        LaneBlock<F> block = {};
        if (row < part.rows) block = load_block<F, FromGlobal>(group + tile * F::TILE_BYTES, index, owner);
        const BlockScales scales = unpack_scales(block, index, owner);
        for (unsigned j = 0; j < 8; ++j) {
            const uint32_t word = unpack_word(block, j);
            for (unsigned byte = 0; byte < 4; ++byte) {
                const int quant = F::BITS == 8 ? (int8_t)(word >> 8 * byte) : (int)(word >> 8 * byte & 255) - F::OFFSET;
                const float scale = __fmul_rn(scales.d, (float)scales.scale[j / 4]);
                const float min = __fmul_rn(scales.m, (float)scales.min[j / 4]);
                target[first + j / 4 * 16 + j % 4 * 2 + byte / 2 * 8 + byte % 2] = __fadd_rn(__fmul_rn(scale, (float)quant), min);
            }
        }
    }
}
#else
extern "C" __global__ void __launch_bounds__(256)
    embed(const __grid_constant__ Layer layer, const uint32_t* token_ids, uint32_t first_row, uint32_t is_first,
          uint32_t columns, float* output) {
    allow_next();
    wait_for_previous();
    const Part& part = layer.parts[0];
    const uint32_t column = blockIdx.x * 256 + threadIdx.x;
    const uint32_t row = row_of(part, first_row, token_ids[blockIdx.y]);
    if (column >= columns || (row == part.rows && !is_first)) return;
    float value = 0.0f;
    if (row < part.rows) value = WEIGHT::load((const WEIGHT::Stored*)part.tiles + (size_t)row * columns + column);
    output[(size_t)blockIdx.y * columns + column] = value;
}
#endif
