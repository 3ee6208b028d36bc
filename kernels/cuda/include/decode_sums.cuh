// What one warp of attention_decode.cu does with its share of a segment: copies keys and values into its ring, and adds up
// weighted sums, 16 tokens at a time.
// -DHEAD_DIM -DBLOCK_SIZE -DSTAGES -DQUERY_ROWS -DFUSED as there.
// Invariant: a warp waits for its own copies alone, and looks at no other warp's ring.

#pragma once

#include "decode_work.cuh"

constexpr unsigned STAGE = 2 * STEP * HEAD_DIM;  // elements: keys, then values
constexpr unsigned COLUMNS = QUERY_ROWS / 8;  // tiles of query rows
constexpr unsigned DEPTH = HEAD_DIM / 16;

// Copies of a warp's share of a segment into its ring.
struct Feed {
    const half_t* tiles;  // keys of block 0 of this head
    const uint32_t* table;
    uint64_t block_stride;
    uint32_t ring;
    uint32_t first_key, num_steps, num_keys, first_position;
    uint32_t next_block;

    __device__ __forceinline__ Feed(const Call& call, const Segment& segment, uint32_t ring) : ring(ring) {
        const uint32_t heads = call.heads.num_key_value_heads;
        tiles = call.layer + tile_offset(0, segment.key_value_head, heads);
        table = segment.table;
        block_stride = tile_offset(1, 0, heads);
        num_keys = segment.num_keys;
        first_position = num_keys - segment.num_tokens;
        first_key = segment.first_unit * UNIT + place_in_cluster() * SHARE + threadIdx.x / WARP * STEP;
        num_steps = segment.end_unit - segment.first_unit;
        // The last unit may end before this warp's tokens.
        if (num_steps > 0 && first_key + (num_steps - 1) * UNIT >= num_keys) --num_steps;
        next_block = num_steps > 0 ? table[first_key / BLOCK_SIZE] : 0;
    }

    __device__ __forceinline__ uint32_t stage(uint32_t step) const {
        return ring + step % STAGES * (STAGE * 2);
    }

    __device__ __forceinline__ void issue(uint32_t step) {
        if (step < num_steps) {
            const uint32_t key = first_key + step * UNIT, lane = threadIdx.x % WARP;
            // What this step stored may still be on its way; what earlier steps stored is there.
            if (!FUSED && key + STEP > first_position) wait_for_previous();
            const half_t* block = tiles + next_block * block_stride + key % BLOCK_SIZE * PIECE;
            const uint32_t to = stage(step);
#pragma unroll
            for (unsigned chunk = lane; chunk < STAGE / CHUNK; chunk += WARP) {
                constexpr unsigned SIDE = STEP * HEAD_CHUNKS, IN_PIECE = STEP * PIECE_CHUNKS;
                const unsigned within = chunk % SIDE, row = within % IN_PIECE / PIECE_CHUNKS;
                const half_t* from = block + chunk / SIDE * TILE + within / IN_PIECE * (BLOCK_SIZE * PIECE) +
                                     within % IN_PIECE * CHUNK;
                // Whatever lies behind the last token may be no number, and 0 times that is none.
                copy_async(to + chunk * 16, from, key + row < num_keys);
            }
            if (step + 1 < num_steps) next_block = table[(key + UNIT) / BLOCK_SIZE];
        }
        commit_copies();
    }
};

// Weighted sums of one warp: dimensions 16 d + lane / 4 (+ 8) of query rows 8 c + lane % 4 * 2 (+ 1).
struct Sums {
    float output[COLUMNS][DEPTH][4];
    float maximum[COLUMNS][2], sum[COLUMNS][2];  // maxima in units of log2

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (unsigned column = 0; column < COLUMNS; ++column) {
            maximum[column][0] = maximum[column][1] = LOWEST;
            sum[column][0] = sum[column][1] = 0.0f;
#pragma unroll
            for (unsigned index = 0; index < DEPTH * 4; ++index) output[column][index / 4][index % 4] = 0.0f;
        }
    }

    // Takes up new maxima where scores outgrew the old ones.
    __device__ __forceinline__ void raise(unsigned column, const float (&score)[4]) {
        const bool grows = fmaxf(score[0], score[2]) > maximum[column][0] + SLACK ||
                           fmaxf(score[1], score[3]) > maximum[column][1] + SLACK;
        if (!__any_sync(FULL_MASK, grows)) return;
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
            float largest = fmaxf(score[half], score[2 + half]);
#pragma unroll
            for (unsigned distance = 4; distance < WARP; distance *= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, distance));
            }
            largest = fmaxf(largest, maximum[column][half]);
            const float factor = exp2_fast(maximum[column][half] - largest);
            maximum[column][half] = largest;
            sum[column][half] *= factor;
#pragma unroll
            for (unsigned depth = 0; depth < DEPTH; ++depth) {
                output[column][depth][half] *= factor;
                output[column][depth][2 + half] *= factor;
            }
        }
    }
};

// Adds 16 tokens, whose keys and values are at `stage`. Row limits say how many keys each query row of the lane sees.
__device__ __forceinline__ void attend(Sums& sums, const uint32_t (&queries)[COLUMNS][DEPTH][2], uint32_t stage,
                                       uint32_t key, const uint32_t (&limits)[COLUMNS][2], bool is_masked,
                                       float scale) {
    const unsigned lane = threadIdx.x % WARP;
    float scores[COLUMNS][4] = {};
    // Two chains of products hide half of their latency.
    float odd[COLUMNS][4] = {};
#pragma unroll
    for (unsigned depth = 0; depth < DEPTH; ++depth) {
        uint32_t keys[4];
        load_matrices(keys, stage + 2 * chunk_offset<STEP>(lane % 16, 2 * depth + lane / 16));
#pragma unroll
        for (unsigned column = 0; column < COLUMNS; ++column) {
            mma(depth % 2 ? odd[column] : scores[column], keys, queries[column][depth][0], queries[column][depth][1]);
        }
    }
    uint32_t weights[COLUMNS][2];
#pragma unroll
    for (unsigned column = 0; column < COLUMNS; ++column) {
#pragma unroll
        for (unsigned index = 0; index < 4; ++index) {
            scores[column][index] = (scores[column][index] + odd[column][index]) * scale;
            if (is_masked && key + lane / 4 + index / 2 * 8 >= limits[column][index % 2]) {
                scores[column][index] = NEGATIVE_INFINITY;
            }
        }
        sums.raise(column, scores[column]);
#pragma unroll
        for (unsigned index = 0; index < 4; ++index) {
            scores[column][index] = exp2_fast(scores[column][index] - sums.maximum[column][index % 2]);
            sums.sum[column][index % 2] += scores[column][index];
        }
        weights[column][0] = transpose(pack(scores[column][0], scores[column][1]));
        weights[column][1] = transpose(pack(scores[column][2], scores[column][3]));
    }
    const uint32_t values_at = stage + STAGE;
#pragma unroll
    for (unsigned depth = 0; depth < DEPTH; ++depth) {
        uint32_t values[4];
        const unsigned row = lane % 8 + lane / 16 * 8, chunk = 2 * depth + lane / 8 % 2;
        load_matrices_transposed(values, values_at + 2 * chunk_offset<STEP>(row, chunk));
#pragma unroll
        for (unsigned column = 0; column < COLUMNS; ++column) {
            mma(sums.output[column][depth], values, weights[column][0], weights[column][1]);
        }
    }
}
