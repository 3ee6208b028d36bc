// Quantized weights as rows of f16, for products with so many tokens that cuBLAS pays for writing them.
//
// A warp makes a tile: each lane two blocks of its row. Launch constant: FORMATS (one format).
// Grid: blocks of 8 tiles; groups of rows.

#include "tensor_core.cuh"

// tiles: [groups, num_tiles]; output: [groups * 8, columns] f16.
extern "C" __global__ void __launch_bounds__(256)
    dequantize(const uint8_t* tiles, uint32_t num_tiles, uint32_t columns, uint16_t* output) {
    using F = FORMATS;
    allow_next();
    const unsigned lane = threadIdx.x % WARP;
    const uint32_t tile = blockIdx.x * 8 + threadIdx.x / WARP;
    if (tile >= num_tiles) return wait_for_previous();
    const uint8_t* from = tiles + ((size_t)blockIdx.y * num_tiles + tile) * F::TILE_BYTES;
    LaneBlock<F> blocks[2];
#pragma unroll
    for (unsigned index = 0; index < 2; ++index) blocks[index] = load_block<F, FromGlobal>(from, index, lane);
    // Products of the weights that were here before.
    wait_for_previous();
    uint16_t* row = output + ((size_t)blockIdx.y * GROUP_ROWS + lane / 4) * columns;
#pragma unroll
    for (unsigned index = 0; index < 2; ++index) {
        const uint32_t column = tile * 256 + (4 * index + lane % 4) * WARP;
        if (column >= columns) continue;
        const HalfScales scales = half_scales(blocks[index], index, lane);
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
            uint32_t pairs[4][2];
#pragma unroll
            for (unsigned t = 0; t < 4; ++t) {
                dequantize_word<F>(unpack_word(blocks[index], 4 * half + t), scales.scale[half], scales.min[half], pairs[t]);
            }
            uint4* to = (uint4*)(row + column + 16 * half);
            to[0] = make_uint4(pairs[0][0], pairs[1][0], pairs[2][0], pairs[3][0]);
            to[1] = make_uint4(pairs[0][1], pairs[1][1], pairs[2][1], pairs[3][1]);
        }
    }
}
