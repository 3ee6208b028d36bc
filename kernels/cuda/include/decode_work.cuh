// How attention_decode.cu cuts its work: by tokens of all sequences and heads, for balance, not by sequence.
//
// The units (UNIT tokens of a key/value head, once for each tile of query rows) of all sequences make one list,
// sequence by sequence. Each block takes an equal range of it; what a block has of one sequence, head and tile is a
// segment. Where blocks are plenty there are gaps in the list, so that no block has parts of two.
// With clusters each takes a sequence, head and tile, as one block of all their warps would.
// -DWARPS: warps of a block. -DCLUSTER: blocks of a cluster, 1: none.
// Invariant: what the list holds depends on the batch in device memory alone, so every block sees the same one.

#pragma once

#include "attention.cuh"
#include "cluster.cuh"
#include "rope.cuh"

constexpr unsigned THREADS = WARPS * WARP;
constexpr unsigned STEP = 16;  // tokens of a warp at a time
constexpr unsigned SHARE = WARPS * STEP;  // of a block
constexpr unsigned UNIT = CLUSTER * SHARE;
constexpr unsigned MAX_SEQUENCES = 1024;

// Everything that does not change within a launch.
struct Call {
    Batch batch;
    Heads heads;
    const query_t* queries;
    uint64_t query_stride;
    half_t* layer;
    float scale;  // of the scores, times log2(e)
    float* partials;  // [2 * blocks][PARTIAL]
    uint32_t* counters;  // [blocks], zero before and after
    uint32_t min_units;  // smallest range of a block where sequences are as long
    Activations output;
    Rope rope;
};

// A range of units of one sequence, key/value head and tile of query rows.
struct Segment {
    uint32_t key_value_head, row_tile;
    uint32_t first_unit, end_unit, num_units;
    uint32_t first_token, num_tokens, num_keys;
    const uint32_t* table;  // of blocks
    HeadRange heads;
    uint32_t pair_start, next;  // in the list: where it and the next segment begin
};

__device__ __forceinline__ uint32_t row_tiles(const Call& call, uint32_t tokens) {
    return (tokens * call.heads.group_size + QUERY_ROWS - 1) / QUERY_ROWS;
}

__device__ __forceinline__ uint32_t units(uint32_t num_keys) {
    return (num_keys + UNIT - 1) / UNIT;
}

// Places in the list of a sequence, head and tile: a multiple of `multiple`.
__device__ __forceinline__ uint32_t places(uint32_t num_keys, uint32_t multiple) {
    return CLUSTER > 1 ? 1 : (units(num_keys) + multiple - 1) / multiple * multiple;
}

// Fills `prefix`; the length of the list.
__device__ __forceinline__ uint32_t count_places(const Call& call, uint32_t* prefix, uint32_t multiple) {
    __shared__ uint32_t warp_totals[WARPS];
    const Batch& batch = call.batch;
    const uint32_t each = (batch.num_sequences + THREADS - 1) / THREADS, first = threadIdx.x * each;
    uint32_t own = 0;
    for (uint32_t sequence = first; sequence < min(first + each, batch.num_sequences); ++sequence) {
        const uint32_t tokens = num_tokens(batch, sequence);
        own += tokens == 0 ? 0 : row_tiles(call, tokens) * places(batch.first_positions[sequence] + tokens, multiple);
        prefix[sequence + 1] = own;
    }
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint32_t before = own;
#pragma unroll
    for (unsigned distance = 1; distance < WARP; distance *= 2) {
        const uint32_t other = __shfl_up_sync(FULL_MASK, before, distance);
        before += lane >= distance ? other : 0;
    }
    if (lane == WARP - 1) warp_totals[warp] = before;
    before -= own;
    __syncthreads();
    uint32_t total = 0;
    for (unsigned other = 0; other < WARPS; ++other) {
        before += other < warp ? warp_totals[other] : 0;
        total += warp_totals[other];
    }
    for (uint32_t sequence = first; sequence < min(first + each, batch.num_sequences); ++sequence) {
        prefix[sequence + 1] += before;
    }
    if (threadIdx.x == 0) prefix[0] = 0;
    __syncthreads();
    return total * call.heads.num_key_value_heads;
}

// The list and the range of it that each block takes.
struct WorkList {
    const uint32_t* prefix;
    uint32_t multiple, range, len;
};

__device__ __forceinline__ WorkList make_list(const Call& call, uint32_t* prefix) {
    WorkList list = {prefix, 1, 1, count_places(call, prefix, 1)};
    const uint32_t most_pairs = call.batch.num_sequences * call.heads.num_key_value_heads;
    if (CLUSTER > 1) return list;
    // Small ranges are not worth adding up, but whole sequences and heads had better be apart.
    const uint32_t least = max(1, min(call.min_units, list.len / most_pairs));
    list.range = max(least, (list.len + gridDim.x - 1) / gridDim.x);
    if (most_pairs > gridDim.x) return list;
    // A second segment costs a block as much as some units more of the first one.
    for (uint32_t range = list.range; range <= list.range + 1 + list.range / 8; range += 1 + list.range / 8) {
        const uint32_t len = count_places(call, prefix, range);
        if (len <= range * gridDim.x) return {prefix, range, range, len};
    }
    count_places(call, prefix, 1);
    return list;
}

// The segment at place `at` of the list, not beyond `end`.
__device__ __forceinline__ Segment find_segment(const Call& call, const WorkList& list, uint32_t at, uint32_t end) {
    const uint32_t* prefix = list.prefix;
    const uint32_t num_heads = call.heads.num_key_value_heads, place = at / num_heads;
    uint32_t low = 0, high = call.batch.num_sequences;
    while (low + 1 < high) {
        const uint32_t middle = (low + high) / 2;
        if (prefix[middle] <= place) low = middle;
        else high = middle;
    }
    Segment segment;
    segment.first_token = call.batch.token_offsets[low];
    segment.num_tokens = num_tokens(call.batch, low);
    segment.num_keys = call.batch.first_positions[low] + segment.num_tokens;
    segment.table = block_table(call.batch, low);
    segment.num_units = units(segment.num_keys);
    const uint32_t start = prefix[low] * num_heads, each = places(segment.num_keys, list.multiple);
    const uint32_t pair = (at - start) / each;
    segment.pair_start = start + pair * each;
    segment.next = min(end, segment.pair_start + each);
    segment.key_value_head = pair % num_heads;
    segment.row_tile = pair / num_heads;
    segment.heads = query_heads(call.heads, segment.key_value_head);
    segment.first_unit = at - segment.pair_start;
    segment.end_unit = min(segment.num_units, CLUSTER > 1 ? segment.num_units : end - segment.pair_start);
    return segment;
}

// Rows of a segment: row r is token r / heads, query head r % heads of the group.
__device__ __forceinline__ uint32_t num_rows(const Segment& segment) {
    const uint32_t all = segment.num_tokens * segment.heads.count, first = segment.row_tile * QUERY_ROWS;
    return all > first ? min(all - first, QUERY_ROWS) : 0;
}
