// What both attention kernels read besides the cache: the sequences of the step, the heads held here, the queries.
// Invariant: everything here was uploaded before the step, so it may be read before `wait_for_previous`; so may the
// keys and values below a sequence's `first_position`.

#pragma once

#include "kv_cache.cuh"

#if QUERY_FLOAT
typedef float query_t;
#else
typedef half_t query_t;
#endif

constexpr float LOWEST = -1e30f;
constexpr uint32_t MIN_TABLE = 128;
// Scores are kept relative to a maximum that may be stale by a factor of 2^SLACK, which f16 holds with ease.
constexpr float SLACK = 8.0f;

// Sequences in the order of their rows. A sequence of no tokens is skipped, so a step of a bucket may have fewer.
struct Batch {
    const uint32_t* token_offsets;  // [num_sequences + 1]: first row of each
    const uint32_t* first_positions;  // [num_sequences]: tokens in the cache before this step
    const uint32_t* table_offsets;  // [num_sequences]: where the table of each begins
    const uint32_t* block_tables;  // one after the other, [at least MIN_TABLE]
    uint32_t num_sequences;
    // Sequences of fewer or more tokens are left to another launch.
    uint32_t min_tokens, max_tokens;
};

struct Heads {
    uint32_t num_heads, num_key_value_heads;
    uint32_t group_size, group_offset;  // as in `ops::Attention`
};

struct HeadRange {
    uint32_t first, count;
};

// Query heads held here that read this key/value head.
__device__ __forceinline__ HeadRange query_heads(const Heads& heads, uint32_t key_value_head) {
    const uint32_t start = key_value_head * heads.group_size, end = start + heads.group_size;
    const uint32_t first = min(start > heads.group_offset ? start - heads.group_offset : 0, heads.num_heads);
    return {first, min(end - heads.group_offset, heads.num_heads) - first};
}

// Tokens that a launch computes of a sequence: none if it belongs to another launch.
__device__ __forceinline__ uint32_t num_tokens(const Batch& batch, uint32_t sequence) {
    const uint32_t tokens = batch.token_offsets[sequence + 1] - batch.token_offsets[sequence];
    return tokens >= batch.min_tokens && tokens <= batch.max_tokens ? tokens : 0;
}

__device__ __forceinline__ const uint32_t* block_table(const Batch& batch, uint32_t sequence) {
    return batch.block_tables + batch.table_offsets[sequence];
}

// A place in the list of row tiles of all sequences.
struct TilePlace {
    uint32_t sequence, tile;
    bool is_valid;
};

// Sequence and number of the tile at `index` of the list, where a tile has `rows` rows (tokens times heads of a group).
// Every warp finds it for itself.
__device__ __forceinline__ TilePlace find_tile(const Batch& batch, uint32_t group_size, uint32_t rows, uint32_t index) {
    const unsigned lane = threadIdx.x % WARP;
    for (uint32_t base = 0; base < batch.num_sequences; base += WARP) {
        const uint32_t sequence = base + lane;
        uint32_t end = 0;
        if (sequence < batch.num_sequences) end = (num_tokens(batch, sequence) * group_size + rows - 1) / rows;
        const uint32_t own = end;
#pragma unroll
        for (unsigned distance = 1; distance < WARP; distance *= 2) {
            const uint32_t other = __shfl_up_sync(FULL_MASK, end, distance);
            end += lane >= distance ? other : 0;
        }
        const unsigned behind = __ballot_sync(FULL_MASK, end > index);
        if (behind != 0) {
            const unsigned first = __ffs(behind) - 1;
            return {base + first, index - __shfl_sync(FULL_MASK, end - own, first), true};
        }
        index -= __shfl_sync(FULL_MASK, end, WARP - 1);
    }
    return {0, 0, false};
}

// Loads eight query elements and rounds them.
__device__ __forceinline__ uint4 load_query(const half_t* from) {
    return *(const uint4*)from;
}

__device__ __forceinline__ uint4 load_query(const float* from) {
    const float4 low = *(const float4*)from, high = *(const float4*)(from + 4);
    return make_uint4(pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y), pack(high.z, high.w));
}

// Stores two neighbouring columns of a token's row.
__device__ __forceinline__ void store_pair(const Activations& to, uint32_t token, uint32_t column, float low,
                                           float high) {
    const uint64_t at = (uint64_t)token * to.columns + column;
    if (to.halves != nullptr) {
        *(uint32_t*)(to.halves + at) = to.is_bfloat ? to_bfloat(low) | (uint32_t)to_bfloat(high) << 16
                                                    : to_half(low) | (uint32_t)to_half(high) << 16;
    }
    if (to.values != nullptr) *(float2*)(to.values + at) = make_float2(low, high);
}
