// What both prefill kernels share: the call, and how it is cut into tiles of query rows.
//
// The query rows of a key/value head are the heads of its group times the tokens, token by token, so heads that share keys
// share their reads, also where a chunk is short.
// -DTILE_ROWS: query rows of a tile; -DTILE_KEYS: keys of a tile.

#pragma once

#include "attention.cuh"

struct Call {
    Batch batch;
    Heads heads;
    const query_t* queries;
    uint64_t query_stride;
    const half_t* layer;
    float scale;  // of the scores, times log2(e)
    uint32_t num_tiles;  // of rows, of all sequences
    Activations output;
};

// A row tile of a sequence and key/value head.
struct Work {
    uint32_t sequence, key_value_head;
    uint32_t first_row, num_rows;  // of the sequence and head; rows beyond do not exist
    uint32_t first_token, first_position;
    uint32_t num_keys;  // that the tile sees
    uint32_t all_keys;  // that the sequence has
    HeadRange heads;

    __device__ __forceinline__ uint32_t token(uint32_t row) const {
        return (first_row + row) / heads.count;
    }

    // Of keys.
    __device__ __forceinline__ uint32_t num_tiles() const {
        return (num_keys + TILE_KEYS - 1) / TILE_KEYS;
    }
};

// Row tiles of all sequences and key/value heads.
__device__ __forceinline__ uint32_t num_works(const Call& call) {
    return call.num_tiles * call.heads.num_key_value_heads;
}

// The row tile at place `index` of all, heaviest first; false if there is nothing to do: heads at the edge of a rank may
// have fewer rows than others.
__device__ __forceinline__ bool find_work(const Call& call, uint32_t index, Work& work) {
    if (index >= num_works(call)) return false;
    work.key_value_head = index % call.heads.num_key_value_heads;
    const uint32_t tile = call.num_tiles - 1 - index / call.heads.num_key_value_heads;
    const TilePlace found = find_tile(call.batch, call.heads.group_size, TILE_ROWS, tile);
    work.sequence = found.sequence;
    work.heads = query_heads(call.heads, work.key_value_head);
    work.first_row = found.tile * TILE_ROWS;
    const uint32_t tokens = num_tokens(call.batch, found.sequence), rows = tokens * work.heads.count;
    if (!found.is_valid || rows <= work.first_row) return false;
    work.num_rows = min(rows - work.first_row, TILE_ROWS);
    work.first_token = call.batch.token_offsets[found.sequence];
    work.first_position = call.batch.first_positions[found.sequence];
    work.num_keys = work.first_position + work.token(work.num_rows - 1) + 1;
    work.all_keys = work.first_position + tokens;
    return true;
}

// Brings `ROWS` query rows from `first` on to shared memory, by `GROUP` consecutive threads.
template <unsigned ROWS, unsigned GROUP>
__device__ __forceinline__ void load_queries(const Call& call, const Work& work, half_t* queries, unsigned first) {
    for (unsigned index = threadIdx.x % GROUP; index < ROWS * HEAD_CHUNKS; index += GROUP) {
        const unsigned row = first + index / HEAD_CHUNKS, chunk = index % HEAD_CHUNKS;
        uint4 values = make_uint4(0, 0, 0, 0);
        if (row < work.num_rows) {
            const uint32_t head = work.heads.first + (work.first_row + row) % work.heads.count;
            const uint64_t token = work.first_token + work.token(row);
            values = load_query(call.queries + token * call.query_stride + head * HEAD_DIM + chunk * CHUNK);
        }
        *(uint4*)(queries + chunk_offset<TILE_ROWS>(row, chunk)) = values;
    }
}
