// Causal flash attention of many query tokens a sequence, for Hopper: what attention_prefill.cu does elsewhere.
// Source: FlashAttention-3 (Shah et al. 2024).
//
// A block of three warp groups stays on its multiprocessor and goes through row tiles, heaviest first. One warp
// copies tiles of keys and values, which lie in the cache as wgmma wants them, two stages deep. The other two groups
// have 64 query rows each; they take turns, so that one group's exponentials run beside the other's products, and
// inside a group the scores of a tile are under way while the tile before is weighed.
// Launch: at most as many blocks of 384 threads as multiprocessors; dynamic shared memory.
// -DHEAD_DIM -DBLOCK_SIZE -DBFLOAT as in kv_cache.cuh; -DQUERY_FLOAT=1: queries of f32; -DTILE_ROWS=128;
// -DTILE_KEYS: 64 or 128.

#include "prefill_work.cuh"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "wgmma.cuh"

constexpr unsigned GROUP = 128;  // threads of a warp group
constexpr unsigned CONSUMERS = 2;
constexpr unsigned GROUP_ROWS = 64;
static_assert(TILE_ROWS == CONSUMERS * GROUP_ROWS, "every group has 64 rows");
constexpr unsigned STAGES = 2;
constexpr unsigned PIECES = HEAD_DIM / PIECE;
constexpr unsigned PIECE_BYTES = PIECE * 2;  // of a row
constexpr unsigned SIDE_BYTES = TILE_KEYS * HEAD_DIM * 2;  // a tile of keys, or of values
constexpr unsigned QUERY_BYTES = TILE_ROWS * HEAD_DIM * 2;
// Rows of the cache that lie together.
constexpr unsigned UNIT_ROWS = TILE_KEYS % BLOCK_SIZE == 0 ? BLOCK_SIZE : 16;
// Named barriers of threads.
constexpr unsigned TURN = 1, OWN = 3;

// Place of the block's work of a round. Rounds go to and fro, so that no block has the heavier tile of each.
__device__ __forceinline__ uint32_t place_of(uint32_t round) {
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
}

__device__ __forceinline__ uint32_t num_rounds(const Call& call) {
    return (num_works(call) + gridDim.x - 1) / gridDim.x;
}

// Addresses in shared memory.
struct Shared {
    uint32_t queries, keys, values, barriers;

    __device__ __forceinline__ uint32_t full(unsigned side, uint32_t stage) const {
        return barriers + (side * STAGES + stage) * 8;
    }

    __device__ __forceinline__ uint32_t empty(unsigned side, uint32_t stage) const {
        return barriers + ((2 + side) * STAGES + stage) * 8;
    }
};

// Zeros the values of a tile from row `rows` on: no token is there, its weight is zero, and zero times what another
// sequence left there may be no number.
__device__ __forceinline__ void clear_rows(half_t* values, uint32_t rows) {
    constexpr uint32_t ROW_CHUNKS = PIECE / CHUNK;
    const uint32_t chunks = (TILE_KEYS - rows) * ROW_CHUNKS;
    for (uint32_t index = threadIdx.x % WARP; index < PIECES * chunks; index += WARP) {
        const uint32_t piece = index / chunks, chunk = rows * ROW_CHUNKS + index % chunks;
        *(uint4*)(values + piece * TILE_KEYS * PIECE + chunk * CHUNK) = make_uint4(0, 0, 0, 0);
    }
    publish_shared();
    __syncwarp();
}

// The copying warp.
__device__ __forceinline__ void produce(const Call& call, const Shared& shared, half_t* memory) {
    const unsigned lane = threadIdx.x % WARP;
    const uint64_t block_stride = tile_offset(1, 0, call.heads.num_key_value_heads);
    uint32_t step = 0;
    for (uint32_t round = 0; round < num_rounds(call); ++round) {
        Work work;
        if (!find_work(call, place_of(round), work)) continue;
        const uint32_t* table = block_table(call.batch, work.sequence);
        const half_t* tiles = call.layer + tile_offset(0, work.key_value_head, call.heads.num_key_value_heads);
        for (uint32_t tile = work.num_tiles(); tile-- > 0; ++step) {
            const uint32_t stage = step % STAGES, parity = step / STAGES % 2 ^ 1;
            const uint32_t first_key = tile * TILE_KEYS;
            const uint32_t keys = min(TILE_KEYS, work.all_keys - first_key);
            const uint32_t units = (keys + UNIT_ROWS - 1) / UNIT_ROWS;
            for (unsigned side = 0; side < 2; ++side) {
                const uint32_t to = (side == 0 ? shared.keys : shared.values) + stage * SIDE_BYTES;
                await_barrier(shared.empty(side, stage), parity);
                if (side == 1 && keys < TILE_KEYS) {
                    clear_rows(memory + (QUERY_BYTES + (STAGES + stage) * SIDE_BYTES) / 2, keys);
                }
                if (lane == 0) arrive_expecting(shared.full(side, stage), keys * HEAD_DIM * 2);
                __syncwarp();
                for (uint32_t copy = lane; copy < units * PIECES; copy += WARP) {
                    const uint32_t unit = copy / PIECES, piece = copy % PIECES, key = first_key + unit * UNIT_ROWS;
                    const half_t* from = tiles + table[key / BLOCK_SIZE] * block_stride + side * TILE +
                                         (piece * BLOCK_SIZE + key % BLOCK_SIZE) * PIECE;
                    const uint32_t rows = min(UNIT_ROWS, keys - unit * UNIT_ROWS);
                    copy_bulk(to + (piece * TILE_KEYS + unit * UNIT_ROWS) * PIECE_BYTES, from, rows * PIECE_BYTES,
                              shared.full(side, stage));
                }
            }
        }
    }
}

// Sums of a thread: rows lane / 4 (+ 8) of its warp's 16, columns 8 n + lane % 4 * 2 (+ 1).
struct Rows {
    float maximum[2], sum[2], factor[2];
    bool has_grown;
};

typedef float Scores[TILE_KEYS / 2];
typedef float Output[HEAD_DIM / 2];

__device__ __forceinline__ void multiply_keys(Scores& scores, uint64_t queries, uint64_t keys) {
    begin_products();
#pragma unroll
    for (unsigned depth = 0; depth < HEAD_DIM / 16; ++depth) {
        const unsigned piece = depth * 16 / PIECE, within = depth * 16 % PIECE * 2;
        multiply_shared(scores, queries + (piece * TILE_ROWS * PIECE_BYTES + within) / 16,
                        keys + (piece * TILE_KEYS * PIECE_BYTES + within) / 16, depth > 0);
    }
    commit_products();
}

// Adds products for COLUMNS columns from FIRST on.
template <unsigned FIRST, unsigned COLUMNS>
__device__ __forceinline__ void multiply_part(Output& output, const uint32_t (&weights)[4], uint64_t values) {
    constexpr unsigned OFFSET = FIRST / PIECE * TILE_KEYS * PIECE_BYTES;
    multiply_registers<COLUMNS, FIRST / 2>(output, weights, values + OFFSET / 16);
}

__device__ __forceinline__ void multiply_values(Output& output, const uint32_t (&weights)[TILE_KEYS / 16][4],
                                                uint64_t values) {
    begin_products();
#pragma unroll
    for (unsigned group = 0; group < TILE_KEYS / 16; ++group) {
        const uint64_t rows = values + group * 16 * PIECE_BYTES / 16;
        if constexpr (HEAD_DIM >= 128) {
            multiply_part<0, 128>(output, weights[group], rows);
            if constexpr (HEAD_DIM == 256) multiply_part<128, 128>(output, weights[group], rows);
        } else {
            multiply_part<0, 64>(output, weights[group], rows);
            if constexpr (HEAD_DIM == 80) multiply_part<64, 16>(output, weights[group], rows);
            if constexpr (HEAD_DIM == 96) multiply_part<64, 32>(output, weights[group], rows);
        }
    }
    commit_products();
}
static_assert(HEAD_DIM == 64 || HEAD_DIM == 80 || HEAD_DIM == 96 || HEAD_DIM == 128 || HEAD_DIM == 256, "products");

__device__ __forceinline__ void mask(Scores& scores, uint32_t first_key, const uint32_t (&limits)[2]) {
#pragma unroll
    for (unsigned index = 0; index < TILE_KEYS / 2; ++index) {
        const uint32_t key = first_key + index / 4 * 8 + threadIdx.x % 4 * 2 + index % 2;
        if (key >= limits[index / 2 % 2]) scores[index] = NEGATIVE_INFINITY;
    }
}

// Turns scores into weights relative to the maximum of each row so far, and says by how much older sums shrink.
__device__ __forceinline__ void weigh(Scores& scores, Rows& rows, float scale) {
    float largest[2] = {LOWEST, LOWEST};
#pragma unroll
    for (unsigned index = 0; index < TILE_KEYS / 2; ++index) {
        largest[index / 2 % 2] = fmaxf(largest[index / 2 % 2], scores[index]);
    }
    const float slack = SLACK / scale;
    const bool grows = largest[0] > rows.maximum[0] + slack || largest[1] > rows.maximum[1] + slack;
    rows.has_grown = __any_sync(FULL_MASK, grows);
    if (rows.has_grown) {
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
            float all = fmaxf(largest[half], rows.maximum[half]);
            all = fmaxf(all, __shfl_xor_sync(FULL_MASK, all, 1));
            all = fmaxf(all, __shfl_xor_sync(FULL_MASK, all, 2));
            rows.factor[half] = exp2_fast((rows.maximum[half] - all) * scale);
            rows.maximum[half] = all;
            rows.sum[half] *= rows.factor[half];
        }
    }
    const float offset[2] = {rows.maximum[0] * scale, rows.maximum[1] * scale};
#pragma unroll
    for (unsigned index = 0; index < TILE_KEYS / 2; ++index) {
        scores[index] = exp2_fast(fmaf(scores[index], scale, -offset[index / 2 % 2]));
        rows.sum[index / 2 % 2] += scores[index];
    }
}

__device__ __forceinline__ void round_weights(const Scores& scores, uint32_t (&weights)[TILE_KEYS / 16][4]) {
#pragma unroll
    for (unsigned index = 0; index < TILE_KEYS / 4; ++index) {
        weights[index / 4][index % 4] = pack(scores[2 * index], scores[2 * index + 1]);
    }
}

__device__ __forceinline__ void shrink(Output& output, const Rows& rows) {
    if (!rows.has_grown) return;
#pragma unroll
    for (unsigned index = 0; index < HEAD_DIM / 2; ++index) output[index] *= rows.factor[index / 2 % 2];
}

__device__ __forceinline__ void store_rows(const Call& call, const Work& work, Output& output, const Rows& rows,
                                           unsigned first_row) {
    const unsigned lane = threadIdx.x % WARP;
#pragma unroll
    for (unsigned half = 0; half < 2; ++half) {
        const unsigned row = first_row + lane / 4 + 8 * half;
        float sum = rows.sum[half];
        sum += __shfl_xor_sync(FULL_MASK, sum, 1);
        sum += __shfl_xor_sync(FULL_MASK, sum, 2);
        const float inverse = 1.0f / sum;
        if (row >= work.num_rows) continue;
        const uint32_t head = work.heads.first + (work.first_row + row) % work.heads.count;
        const uint32_t token = work.first_token + work.token(row);
#pragma unroll
        for (unsigned column = 0; column < HEAD_DIM / 8; ++column) {
            store_pair(call.output, token, head * HEAD_DIM + 8 * column + lane % 4 * 2,
                       output[4 * column + 2 * half] * inverse, output[4 * column + 2 * half + 1] * inverse);
        }
    }
}

// A computing warp group goes through one row tile. `step` counts tiles of keys over all work.
__device__ __forceinline__ void consume(const Call& call, const Work& work, const Shared& shared, half_t* memory,
                                        unsigned consumer, uint32_t& step) {
    const unsigned lane = threadIdx.x % WARP, first_row = consumer * GROUP_ROWS + threadIdx.x % GROUP / WARP * 16;
    // No warp of the group still multiplies the rows of the work before.
    sync_threads(OWN + consumer, GROUP);
    load_queries<GROUP_ROWS, GROUP>(call, work, memory, consumer * GROUP_ROWS);
    publish_shared();
    sync_threads(OWN + consumer, GROUP);
    const uint64_t queries =
        describe<PIECE_BYTES>(shared.queries + consumer * GROUP_ROWS * PIECE_BYTES, 16, 8 * PIECE_BYTES);
    const auto keys_at = [&](uint32_t stage) {
        return describe<PIECE_BYTES>(shared.keys + stage * SIDE_BYTES, 16, 8 * PIECE_BYTES);
    };
    const auto values_at = [&](uint32_t stage) {
        return describe<PIECE_BYTES>(shared.values + stage * SIDE_BYTES, TILE_KEYS * PIECE_BYTES, 8 * PIECE_BYTES);
    };
    const auto release = [&](unsigned side, uint32_t stage) {
        __syncwarp();
        if (lane == 0) arrive(shared.empty(side, stage));
    };
    uint32_t limits[2];
#pragma unroll
    for (unsigned half = 0; half < 2; ++half) {
        limits[half] = min(work.first_position + work.token(first_row + lane / 4 + 8 * half) + 1, work.num_keys);
    }
    // Keys that all rows of the warp see need no mask.
    const uint32_t seen = min(work.first_position + work.token(first_row) + 1, work.num_keys);

    Scores scores;
    Output output;
    uint32_t weights[TILE_KEYS / 16][4];
    Rows rows = {{LOWEST, LOWEST}, {0.0f, 0.0f}, {1.0f, 1.0f}, false};
#pragma unroll
    for (unsigned index = 0; index < HEAD_DIM / 2; ++index) output[index] = 0.0f;
    uint32_t tile = work.num_tiles() - 1;
    await_barrier(shared.full(0, step % STAGES), step / STAGES % 2);
    sync_threads(TURN + consumer, CONSUMERS * GROUP);
    multiply_keys(scores, queries, keys_at(step % STAGES));
    arrive_threads(TURN + (consumer ^ 1), CONSUMERS * GROUP);
    await_products<0>();
    pin(scores);
    release(0, step % STAGES);
    if ((tile + 1) * TILE_KEYS > seen) mask(scores, tile * TILE_KEYS, limits);
    weigh(scores, rows, call.scale);
    round_weights(scores, weights);
    for (; tile-- > 0; ++step) {
        const uint32_t now = step % STAGES, next = (step + 1) % STAGES;
        await_barrier(shared.full(0, next), (step + 1) / STAGES % 2);
        sync_threads(TURN + consumer, CONSUMERS * GROUP);
        multiply_keys(scores, queries, keys_at(next));
        shrink(output, rows);
        await_barrier(shared.full(1, now), step / STAGES % 2);
        pin(output);
        multiply_values(output, weights, values_at(now));
        arrive_threads(TURN + (consumer ^ 1), CONSUMERS * GROUP);
        await_products<1>();
        pin(scores);
        release(0, next);
        if ((tile + 1) * TILE_KEYS > seen) mask(scores, tile * TILE_KEYS, limits);
        weigh(scores, rows, call.scale);
        await_products<0>();
        pin(output);
        release(1, now);
        round_weights(scores, weights);
    }
    shrink(output, rows);
    await_barrier(shared.full(1, step % STAGES), step / STAGES % 2);
    pin(output);
    multiply_values(output, weights, values_at(step % STAGES));
    await_products<0>();
    pin(output);
    release(1, step % STAGES);
    ++step;
    store_rows(call, work, output, rows, first_row);
}
#endif

extern "C" __global__ __launch_bounds__(384, 1) void attention_prefill(
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const __grid_constant__ Call call) {
    extern __shared__ __align__(1024) half_t memory[];  // queries, STAGES tiles of keys, STAGES tiles of values
    __shared__ __align__(8) uint64_t barriers[4 * STAGES];
    const uint32_t base = shared_address(memory);
    const Shared shared = {base, base + QUERY_BYTES, base + QUERY_BYTES + STAGES * SIDE_BYTES,
                           shared_address(barriers)};
    allow_next();
    if (threadIdx.x == 0) {
        for (unsigned index = 0; index < 2 * STAGES; ++index) {
            init_barrier(shared.barriers + index * 8, 1);
            init_barrier(shared.barriers + (2 * STAGES + index) * 8, CONSUMERS * GROUP / WARP);
        }
        publish_barriers();
    }
    __syncthreads();
    wait_for_previous();
    if (threadIdx.x < GROUP) {
        give_registers<24>();
        if (threadIdx.x < WARP) produce(call, shared, memory);
    } else {
        take_registers<240>();
        const unsigned consumer = threadIdx.x / GROUP - 1;
        // The first turn is the first group's.
        if (consumer == 1) arrive_threads(TURN, CONSUMERS * GROUP);
        uint32_t step = 0;
        for (uint32_t round = 0; round < num_rounds(call); ++round) {
            Work work;
            if (find_work(call, place_of(round), work)) consume(call, work, shared, memory, consumer, step);
        }
    }
#else
    uint64_t) {
#endif
}
