// The paged cache of keys and values, as rope_and_store writes it and attention reads it.
//
// A layer is [num_blocks][num_key_value_heads][keys, values][BLOCK_SIZE tokens x HEAD_DIM]. The last part, a tile,
// is cut into pieces of PIECE columns, [HEAD_DIM / PIECE][BLOCK_SIZE][PIECE]: rows of 128 bytes where HEAD_DIM
// allows it. Inside each 128 bytes the 16-byte chunks are permuted by the row, just as tensor cores want them in
// shared memory: so tiles are copied as they lie, and reading eight rows of one column meets no bank conflict.
// -DHEAD_DIM: a multiple of 16; -DBLOCK_SIZE: a multiple of 16.

#pragma once

#include "half_mma.cuh"

constexpr unsigned PIECE = HEAD_DIM % 64 == 0 ? 64 : HEAD_DIM % 32 == 0 ? 32 : 16;
constexpr unsigned CHUNK = 8;  // elements of 16 bytes
constexpr unsigned PIECE_CHUNKS = PIECE / CHUNK;
constexpr unsigned HEAD_CHUNKS = HEAD_DIM / CHUNK;
constexpr unsigned TILE = BLOCK_SIZE * HEAD_DIM;
static_assert(HEAD_DIM % 16 == 0 && BLOCK_SIZE % 16 == 0, "tensor cores take 16 by 16");

// Element at which chunk `chunk` of row `row` begins in a tile of `ROWS` rows.
template <unsigned ROWS>
__device__ __forceinline__ unsigned chunk_offset(unsigned row, unsigned chunk) {
    const unsigned permuted = chunk % PIECE_CHUNKS ^ (row * PIECE / 64 & (PIECE_CHUNKS - 1));
    return (chunk / PIECE_CHUNKS * ROWS + row) * PIECE + permuted * CHUNK;
}

// Keys of a head in a block; values follow after TILE elements.
__device__ __forceinline__ uint64_t tile_offset(uint32_t block, uint32_t head, uint32_t num_key_value_heads) {
    return ((uint64_t)block * num_key_value_heads + head) * (2 * TILE);
}
