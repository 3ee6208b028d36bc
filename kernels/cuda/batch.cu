// Quantized weights times many tokens, on tensor cores: weights become f16 in registers, sums are f32.
//
// A block of 8 warps makes 128 rows for `TOKENS` tokens. Its warps are 4 sets of 32 rows; two warps of a set share its
// columns (up to 64 tokens: each takes one half of every tile) or its tokens. Tiles of weights and 256 columns of
// activations go through a ring of `STAGES` stages in shared memory, which is filled with weights before the wait for the
// kernel that makes the activations. `CLUSTER` blocks share the tiles of the same rows and add their sums through each
// other's shared memory. For SwiGLU the first two sets are gates, the others ups, and a block makes 64 outputs.
//
// Launch constants: BLOCK_ROWS (128), FORMATS (list of the layer's formats), TOKENS (8, 16, 32, 64, 128), STAGES, CLUSTER, EPILOGUE.
// Grid: `CLUSTER` blocks a unit; pieces of `TOKENS` tokens. Dynamic shared memory: `STAGES` stages, at least the sums.

#include "batch.cuh"
#include "tensor_core.cuh"

constexpr unsigned NUM_SETS = 4, SET_GROUPS = GROUPS / NUM_SETS;
// Warps of a set that share the columns, and that share the tokens.
constexpr unsigned DEPTH = TOKENS <= 64 ? 2 : 1, TOKEN_PARTS = 2 / DEPTH;
constexpr unsigned WARP_TOKENS = TOKENS / TOKEN_PARTS, TOKEN_TILES = WARP_TOKENS / 8;
constexpr unsigned TOKEN_BYTES = TILE_COLUMNS * 2, STAGE_BYTES = GROUPS * MAX_TILE_BYTES + TOKENS * TOKEN_BYTES;

extern __shared__ __align__(128) uint8_t shared[];

// Where in a token's 512 bytes of a stage the 16-byte chunk `q` (of 4) of block `block` (of 8) lies. Chunks stay beside
// their neighbours, so that copies move whole sectors; the lanes that read at the same time, chunk `q` of the even and
// chunk `q ^ 1` of the odd ones of 4 blocks of two tokens, touch different banks.
__device__ __forceinline__ unsigned chunk_at(unsigned token, unsigned block, unsigned q) {
    const unsigned line = block / 2;
    return (block * 4 + q ^ (line & 1) << 1 ^ (token & 1) << 2) * 16;
}

// Copies 256 columns of the tokens; what lies outside becomes zeros.
__device__ __forceinline__ void copy_activations(uint8_t* to, const Share& share, uint32_t tile) {
    constexpr unsigned CHUNKS = TOKENS * TOKEN_BYTES / 16;
#pragma unroll
    for (unsigned first = 0; first < CHUNKS; first += THREADS) {
        const unsigned chunk = first + threadIdx.x, token = chunk / 32, block = chunk % 32 / 4, q = chunk % 4;
        const uint32_t column = tile * TILE_COLUMNS + chunk % 32 * 8;
        const bool is_inside = token < share.num_tokens && column < share.columns;
        const uint16_t* from = share.input + (is_inside ? (size_t)token * share.columns + column : 0);
        copy16_or_zeros(to + token * TOKEN_BYTES + chunk_at(token, block, q), (const uint8_t*)from, is_inside);
    }
}

template <class F>
struct Multiply {
    static __device__ __forceinline__ void run(const Share& share, float (&sums)[2][TOKEN_TILES][4]) {
        const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const unsigned set = warp % NUM_SETS, part = warp / NUM_SETS;
        // Both warps of a set copy half of its groups.
        const unsigned first_copied = part * (SET_GROUPS / 2);
        const uint8_t* copied[SET_GROUPS / 2];
#pragma unroll
        for (unsigned group = 0; group < SET_GROUPS / 2; ++group) {
            copied[group] =
                group_tiles(share.part, share.first_group + first_copied + group, share.num_tiles, F::TILE_BYTES);
        }
        const auto copy_weights = [&](uint32_t tile, unsigned stage) {
            if (tile >= share.end_tile) return;
            uint8_t* to = shared + stage * STAGE_BYTES + (set * SET_GROUPS + first_copied) * MAX_TILE_BYTES;
#pragma unroll
            for (unsigned group = 0; group < SET_GROUPS / 2; ++group) {
                copy_tile<F>(to + group * MAX_TILE_BYTES, copied[group] + tile * F::TILE_BYTES, lane);
            }
        };
        const auto copy_tokens = [&](uint32_t tile, unsigned stage) {
            if (tile < share.end_tile) {
                copy_activations(shared + stage * STAGE_BYTES + GROUPS * MAX_TILE_BYTES, share, tile);
            }
            close_copies();
        };
#pragma unroll
        for (unsigned stage = 0; stage + 1 < STAGES; ++stage) copy_weights(share.first_tile + stage, stage);
        wait_for_previous();
#pragma unroll
        for (unsigned stage = 0; stage + 1 < STAGES; ++stage) copy_tokens(share.first_tile + stage, stage);
        unsigned stage = 0;
#pragma unroll 1
        for (uint32_t tile = share.first_tile; tile < share.end_tile; ++tile) {
            wait_copies<STAGES - 2>();
            __syncthreads();
            // Into the stage that everybody has just left.
            const unsigned free_stage = stage == 0 ? STAGES - 1 : stage - 1;
            copy_weights(tile + STAGES - 1, free_stage);
            copy_tokens(tile + STAGES - 1, free_stage);
            const uint8_t* weights = shared + stage * STAGE_BYTES + set * SET_GROUPS * MAX_TILE_BYTES;
            const uint8_t* tokens = shared + stage * STAGE_BYTES + GROUPS * MAX_TILE_BYTES;
            if constexpr (DEPTH == 2) {
                multiply_half(weights, tokens, part, 0, lane, sums);
            } else {
                multiply_half(weights, tokens, 0, part * WARP_TOKENS, lane, sums);
                multiply_half(weights, tokens, 1, part * WARP_TOKENS, lane, sums);
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
    }

    // Half `index` of a tile's columns.
    static __device__ __forceinline__ void multiply_half(const uint8_t* weights, const uint8_t* tokens, unsigned index,
                                                         unsigned first_token, unsigned lane,
                                                         float (&sums)[2][TOKEN_TILES][4]) {
        LaneBlock<F> blocks[SET_GROUPS];
        HalfScales scales[SET_GROUPS];
#pragma unroll
        for (unsigned group = 0; group < SET_GROUPS; ++group) {
            blocks[group] = load_block<F, FromShared>(weights + group * MAX_TILE_BYTES, index, lane);
            scales[group] = half_scales(blocks[group], index, lane);
        }
        const unsigned row = lane / 4, t = lane % 4;
        // Odd lanes read the two chunks of a half, and with them the pairs, in the other order: see `chunk_at`.
        const uint32_t first_pair = t % 2 == 0 ? FIRST_PAIR : SECOND_PAIR, second_pair = FIRST_PAIR ^ SECOND_PAIR ^ first_pair;
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
            // [step][16 rows][fragment]
            uint32_t a[4][2][4];
#pragma unroll
            for (unsigned step = 0; step < 4; ++step) {
#pragma unroll
                for (unsigned group = 0; group < SET_GROUPS; ++group) {
                    uint32_t pairs[2];
                    dequantize_word<F>(unpack_word(blocks[group], 4 * half + step), scales[group].scale[half],
                                       scales[group].min[half], pairs, first_pair, second_pair);
                    a[step][group / 2][group % 2] = pairs[0];
                    a[step][group / 2][group % 2 + 2] = pairs[1];
                }
            }
#pragma unroll
            for (unsigned tile = 0; tile < TOKEN_TILES; ++tile) {
                const unsigned token = first_token + tile * 8 + row, block = 4 * index + t, odd = t % 2;
                const uint8_t* from = tokens + token * TOKEN_BYTES;
                const uint4 first = *(const uint4*)(from + chunk_at(token, block, 2 * half + odd));
                const uint4 second = *(const uint4*)(from + chunk_at(token, block, 2 * half + 1 - odd));
                const uint32_t b[4][2] = {
                    {first.x, second.x}, {first.y, second.y}, {first.z, second.z}, {first.w, second.w}};
#pragma unroll
                for (unsigned step = 0; step < 4; ++step) {
                    multiply_add(sums[0][tile], a[step][0], b[step]);
                    multiply_add(sums[1][tile], a[step][1], b[step]);
                }
            }
        }
    }
};

extern "C" __global__ void
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    __launch_bounds__(THREADS)
        batch(const __grid_constant__ Layer layer, const uint16_t* input, uint32_t columns,
              const __grid_constant__ Activations output, uint32_t num_tokens) {
    allow_next();
    const unsigned warp = threadIdx.x / WARP, set = warp % NUM_SETS, lane = threadIdx.x % WARP;
    const Share share = share_of<NUM_SETS>(layer, input, columns, num_tokens, set);
    float sums[2][TOKEN_TILES][4] = {};
    with_format<Multiply, FORMATS>(share.part.format, share, sums);

    // Everybody has left the stages; the last copies into them were past the end and empty.
    __syncthreads();
    float* all_sums = (float*)shared;
    const unsigned first_sum = DEPTH == 2 ? warp / NUM_SETS * TOKENS : warp / NUM_SETS * WARP_TOKENS;
#pragma unroll
    for (unsigned rows = 0; rows < 2; ++rows) {
#pragma unroll
        for (unsigned tile = 0; tile < TOKEN_TILES; ++tile) {
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) {
                const unsigned token = first_sum + tile * 8 + lane % 4 * 2 + i % 2;
                const unsigned row = set * SET_GROUPS * GROUP_ROWS + rows * 16 + i / 2 * 8 + lane / 4;
                all_sums[token * SUM_ROWS + row] = sums[rows][tile][i];
            }
        }
    }
    finish_sums<DEPTH>(share, all_sums, output);
}
