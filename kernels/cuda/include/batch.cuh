// What both kernels of batches share: the work of a block, and what becomes of the sums that it leaves in shared memory.
// -DTOKENS, -DCLUSTER, -DEPILOGUE and the grid are theirs; -DBLOCK_ROWS: 16 for each of its warps.

#pragma once

#include "cluster.cuh"
#include "layer.cuh"

constexpr unsigned ROWS = BLOCK_ROWS, GROUPS = ROWS / GROUP_ROWS;
constexpr unsigned NUM_WARPS = ROWS / 16, THREADS = NUM_WARPS * WARP;
constexpr unsigned MAX_TILE_BYTES = max_tile_bytes<FORMATS>();
// Rows of the sums, padded so that the lanes of a warp write to different banks.
constexpr unsigned SUM_ROWS = ROWS + 4;
constexpr Epilogue KIND = Epilogue::EPILOGUE;

// What a block works on, and the first group of rows of one of its sets.
struct Share {
    const Part& part;
    uint32_t first_group;
    uint32_t first_tile, end_tile;  // of the block's columns
    uint32_t num_tiles;
    const uint16_t* input;
    uint32_t num_tokens, columns;
    uint32_t first_row, first_token;
};

// The share of set `set` of `NUM_SETS`; for SwiGLU the first half of the sets are gates, the others ups of the same rows.
template <unsigned NUM_SETS>
__device__ __forceinline__ Share share_of(const Layer& layer, const uint16_t* input, uint32_t columns,
                                          uint32_t num_tokens, unsigned set) {
    constexpr bool IS_SWIGLU = KIND == Epilogue::SwiGlu;
    constexpr unsigned UNIT_ROWS = IS_SWIGLU ? ROWS / 2 : ROWS, SET_GROUPS = GROUPS / NUM_SETS;
    const uint32_t rank = blockIdx.x % CLUSTER, block_unit = blockIdx.x / CLUSTER, first_token = blockIdx.y * TOKENS;
    const bool is_up = IS_SWIGLU && set >= NUM_SETS / 2;
    const Part& part = layer.parts[IS_SWIGLU ? (is_up ? 1 : 0) : part_of(layer, block_unit)];
    const uint32_t first_row = (IS_SWIGLU ? block_unit : block_unit - part.first_unit) * UNIT_ROWS;
    return {part,
            first_row / GROUP_ROWS + (is_up ? set - NUM_SETS / 2 : set) * SET_GROUPS,
            layer.num_tiles * rank / CLUSTER,
            layer.num_tiles * (rank + 1) / CLUSTER,
            layer.num_tiles,
            input + (size_t)first_token * columns,
            min(num_tokens - first_token, TOKENS),
            columns,
            first_row,
            first_token};
}

// Adds the sums `[DEPTH][TOKENS][SUM_ROWS]` of the blocks of the cluster and hands them on. Call it where the block's own
// are written.
template <unsigned DEPTH>
__device__ __forceinline__ void finish_sums(const Share& share, const float* sums, const Activations& output) {
    wait_for_cluster();
    const auto product = [&](unsigned row, unsigned token) {
        float sum = 0.0f;
#pragma unroll
        for (unsigned other = 0; other < CLUSTER; ++other) {
#pragma unroll
            for (unsigned part = 0; part < DEPTH; ++part) {
                sum += load_from(sums + (part * TOKENS + token) * SUM_ROWS + row, other);
            }
        }
        return sum;
    };
    // The blocks of a cluster finish a token each in turn.
    finish<KIND, ROWS, THREADS, CLUSTER>(share.part, share.first_row, share.first_token, share.num_tokens, output,
                                         product, blockIdx.x % CLUSTER);
    // No block may leave while others read its sums.
    if (CLUSTER > 1) wait_for_cluster();
}
