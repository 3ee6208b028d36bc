// Causal flash attention of many query tokens a sequence: prompts, and chunks of them behind a cached prefix.
// Source: FlashAttention-2 (Dao 2023). For GPUs whose tensor cores a warp feeds alone (mma.sync); Hopper has a
// kernel of its own, attention_prefill_hopper.cu.
//
// A block takes a tile of query rows (prefill_work.cuh), each warp some of them, and goes through the keys from the last
// to the first in tiles of TILE_KEYS, copied ahead of their use.
// Launch: row tiles of all sequences times num_key_value_heads blocks of THREADS threads, heaviest first; dynamic
// shared memory.
// -DHEAD_DIM -DBLOCK_SIZE -DBFLOAT as in kv_cache.cuh; -DQUERY_FLOAT=1: queries of f32; -DTILE_ROWS: a multiple of 64;
// -DTILE_KEYS: a multiple of 16.

#include "prefill_work.cuh"

constexpr unsigned WARPS = 4;
constexpr unsigned THREADS = WARPS * WARP;
constexpr unsigned WARP_ROWS = TILE_ROWS / WARPS;
constexpr unsigned WARP_TILES = WARP_ROWS / 16;
static_assert(TILE_ROWS % (16 * WARPS) == 0, "warps have whole tiles of 16 rows");
constexpr unsigned DEPTH = HEAD_DIM / 16;
constexpr unsigned SIDE = TILE_KEYS * HEAD_DIM;  // elements of a tile of keys, or of values
constexpr unsigned QUERIES = TILE_ROWS * HEAD_DIM;
constexpr unsigned ROW_GROUPS = TILE_KEYS / 16;

// Copies tiles of keys and values.
struct Feed {
    const half_t* tiles;  // keys of block 0 of this head
    const uint32_t* table;
    uint64_t block_stride;
    uint32_t num_keys;
    uint32_t blocks[ROW_GROUPS];  // of the tile to be copied next

    __device__ __forceinline__ Feed(const Call& call, const Work& work) {
        tiles = call.layer + tile_offset(0, work.key_value_head, call.heads.num_key_value_heads);
        table = block_table(call.batch, work.sequence);
        block_stride = tile_offset(1, 0, call.heads.num_key_value_heads);
        num_keys = work.num_keys;
    }

    __device__ __forceinline__ void look_up(uint32_t tile) {
#pragma unroll
        for (unsigned group = 0; group < ROW_GROUPS; ++group) {
            const uint32_t key = tile * TILE_KEYS + group * 16;
            blocks[group] = key < num_keys ? table[key / BLOCK_SIZE] : 0;
        }
    }

    __device__ __forceinline__ void issue(uint32_t tile, uint32_t to) const {
        constexpr unsigned GROUP_CHUNKS = 16 * HEAD_CHUNKS, IN_PIECE = 16 * PIECE_CHUNKS;
#pragma unroll
        for (unsigned group = 0; group < ROW_GROUPS; ++group) {
            const uint32_t key = tile * TILE_KEYS + group * 16;
            const half_t* block = tiles + blocks[group] * block_stride + key % BLOCK_SIZE * PIECE;
#pragma unroll
            for (unsigned chunk = threadIdx.x; chunk < 2 * GROUP_CHUNKS; chunk += THREADS) {
                const unsigned side = chunk / GROUP_CHUNKS, piece = chunk % GROUP_CHUNKS / IN_PIECE;
                const unsigned within = chunk % IN_PIECE;
                const half_t* from = block + side * TILE + piece * (BLOCK_SIZE * PIECE) + within * CHUNK;
                const unsigned at = side * SIDE + (piece * TILE_KEYS + group * 16) * PIECE + within * CHUNK;
                // Whatever lies behind the last token may be no number, and 0 times that is none.
                copy_async(to + at * 2, from, key + within / PIECE_CHUNKS < num_keys);
            }
        }
    }
};

// Sums of a warp: rows 16 t + lane / 4 (+ 8), columns 8 n + lane % 4 * 2 (+ 1).
struct Sums {
    float output[WARP_TILES][2 * DEPTH][4];
    float maximum[WARP_TILES][2], sum[WARP_TILES][2];
};

typedef float Scores[WARP_TILES][TILE_KEYS / 8][4];

__device__ __forceinline__ void multiply_keys(Scores& scores, uint32_t queries, uint32_t keys) {
    const unsigned lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * WARP_ROWS;
#pragma unroll
    for (unsigned index = 0; index < WARP_TILES * TILE_KEYS / 2; ++index) {
        scores[index / (TILE_KEYS / 2)][index / 4 % (TILE_KEYS / 8)][index % 4] = 0.0f;
    }
#pragma unroll
    for (unsigned depth = 0; depth < DEPTH; ++depth) {
        uint32_t rows[WARP_TILES][4];
#pragma unroll
        for (unsigned tile = 0; tile < WARP_TILES; ++tile) {
            const unsigned row = warp_row + 16 * tile + lane % 16;
            load_matrices(rows[tile], queries + 2 * chunk_offset<TILE_ROWS>(row, 2 * depth + lane / 16));
        }
#pragma unroll
        for (unsigned pair = 0; pair < ROW_GROUPS; ++pair) {
            uint32_t columns[4];
            const unsigned key = 16 * pair + lane % 8 + lane / 16 * 8;
            load_matrices(columns, keys + 2 * chunk_offset<TILE_KEYS>(key, 2 * depth + lane / 8 % 2));
#pragma unroll
            for (unsigned tile = 0; tile < WARP_TILES; ++tile) {
                mma(scores[tile][2 * pair], rows[tile], columns[0], columns[1]);
                mma(scores[tile][2 * pair + 1], rows[tile], columns[2], columns[3]);
            }
        }
    }
}

__device__ __forceinline__ void mask(Scores& scores, uint32_t first_key, const uint32_t (&limits)[WARP_TILES][2]) {
#pragma unroll
    for (unsigned tile = 0; tile < WARP_TILES; ++tile) {
#pragma unroll
        for (unsigned index = 0; index < TILE_KEYS / 2; ++index) {
            const uint32_t key = first_key + index / 4 * 8 + threadIdx.x % 4 * 2 + index % 2;
            if (key >= limits[tile][index / 2 % 2]) scores[tile][index / 4][index % 4] = NEGATIVE_INFINITY;
        }
    }
}

// Turns the scores of a 16-row tile into weights, relative to the maximum of each row so far.
__device__ __forceinline__ void weigh(Scores& scores, Sums& sums, unsigned tile, float scale) {
    float largest[2] = {LOWEST, LOWEST};
#pragma unroll
    for (unsigned index = 0; index < TILE_KEYS / 2; ++index) {
        largest[index / 2 % 2] = fmaxf(largest[index / 2 % 2], scores[tile][index / 4][index % 4]);
    }
    const float slack = SLACK / scale;
    const bool grows = largest[0] > sums.maximum[tile][0] + slack || largest[1] > sums.maximum[tile][1] + slack;
    if (__any_sync(FULL_MASK, grows)) {
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
            float all = fmaxf(largest[half], sums.maximum[tile][half]);
            all = fmaxf(all, __shfl_xor_sync(FULL_MASK, all, 1));
            all = fmaxf(all, __shfl_xor_sync(FULL_MASK, all, 2));
            const float factor = exp2_fast((sums.maximum[tile][half] - all) * scale);
            sums.maximum[tile][half] = all;
            sums.sum[tile][half] *= factor;
#pragma unroll
            for (unsigned column = 0; column < 2 * DEPTH; ++column) {
                sums.output[tile][column][2 * half] *= factor;
                sums.output[tile][column][2 * half + 1] *= factor;
            }
        }
    }
    const float offset[2] = {sums.maximum[tile][0] * scale, sums.maximum[tile][1] * scale};
#pragma unroll
    for (unsigned index = 0; index < TILE_KEYS / 2; ++index) {
        float& score = scores[tile][index / 4][index % 4];
        score = exp2_fast(fmaf(score, scale, -offset[index / 2 % 2]));
        sums.sum[tile][index / 2 % 2] += score;
    }
}

__device__ __forceinline__ void multiply_values(const Scores& scores, Sums& sums, uint32_t values) {
    const unsigned lane = threadIdx.x % WARP;
#pragma unroll
    for (unsigned group = 0; group < ROW_GROUPS; ++group) {
        uint32_t weights[WARP_TILES][4];
#pragma unroll
        for (unsigned tile = 0; tile < WARP_TILES; ++tile) {
#pragma unroll
            for (unsigned part = 0; part < 4; ++part) {
                const float* pair = scores[tile][2 * group + part / 2] + part % 2 * 2;
                weights[tile][part] = pack(pair[0], pair[1]);
            }
        }
#pragma unroll
        for (unsigned depth = 0; depth < DEPTH; ++depth) {
            uint32_t columns[4];
            const unsigned key = 16 * group + lane % 16;
            load_matrices_transposed(columns, values + 2 * chunk_offset<TILE_KEYS>(key, 2 * depth + lane / 16));
#pragma unroll
            for (unsigned tile = 0; tile < WARP_TILES; ++tile) {
                mma(sums.output[tile][2 * depth], weights[tile], columns[0], columns[1]);
                mma(sums.output[tile][2 * depth + 1], weights[tile], columns[2], columns[3]);
            }
        }
    }
}

__device__ __forceinline__ void store_rows(const Call& call, const Work& work, Sums& sums) {
    const unsigned lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * WARP_ROWS;
#pragma unroll
    for (unsigned index = 0; index < 2 * WARP_TILES; ++index) {
        const unsigned tile = index / 2, half = index % 2, row = warp_row + 16 * tile + lane / 4 + 8 * half;
        float sum = sums.sum[tile][half];
        sum += __shfl_xor_sync(FULL_MASK, sum, 1);
        sum += __shfl_xor_sync(FULL_MASK, sum, 2);
        const float inverse = 1.0f / sum;
        if (row >= work.num_rows) continue;
        const uint32_t head = work.heads.first + (work.first_row + row) % work.heads.count;
#pragma unroll
        for (unsigned column = 0; column < 2 * DEPTH; ++column) {
            const float* pair = sums.output[tile][column] + 2 * half;
            store_pair(call.output, work.first_token + work.token(row), head * HEAD_DIM + 8 * column + lane % 4 * 2,
                       pair[0] * inverse, pair[1] * inverse);
        }
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void attention_prefill(const __grid_constant__ Call call) {
    extern __shared__ __align__(1024) half_t shared[];  // queries, then two stages of keys and values
    allow_next();
    Work work;
    const bool has_work = find_work(call, blockIdx.x, work);
    wait_for_previous();
    if (!has_work) return;
    const uint32_t queries = shared_address(shared), stages = queries + 2 * QUERIES;
    Feed feed(call, work);
    uint32_t tile = work.num_tiles() - 1;
    feed.look_up(tile);
    feed.issue(tile, stages);
    commit_copies();
    if (tile > 0) feed.look_up(tile - 1);
    load_queries<TILE_ROWS, THREADS>(call, work, shared, 0);

    uint32_t limits[WARP_TILES][2];
    Sums sums = {};
    const unsigned warp_row = threadIdx.x / WARP * WARP_ROWS;
#pragma unroll
    for (unsigned index = 0; index < 2 * WARP_TILES; ++index) {
        const unsigned row = warp_row + 16 * (index / 2) + threadIdx.x % WARP / 4 + index % 2 * 8;
        limits[index / 2][index % 2] = min(work.first_position + work.token(row) + 1, work.num_keys);
        sums.maximum[index / 2][index % 2] = LOWEST;
    }
    // Keys that all rows of the warp see need no mask.
    const uint32_t seen = min(work.first_position + work.token(warp_row) + 1, work.num_keys);
    for (uint32_t parity = 0;; parity ^= 1) {
        await_copies<0>();
        __syncthreads();
        if (tile > 0) {
            feed.issue(tile - 1, stages + (parity ^ 1) * (4 * SIDE));
            commit_copies();
            if (tile > 1) feed.look_up(tile - 2);
        }
        const uint32_t keys = stages + parity * (4 * SIDE);
        Scores scores;
        multiply_keys(scores, queries, keys);
        if ((tile + 1) * TILE_KEYS > seen) mask(scores, tile * TILE_KEYS, limits);
#pragma unroll
        for (unsigned rows = 0; rows < WARP_TILES; ++rows) weigh(scores, sums, rows, call.scale);
        multiply_values(scores, sums, keys + 2 * SIDE);
        if (tile-- == 0) break;
    }
    store_rows(call, work, sums);
}
