// Quantized weights times many tokens on Hopper's tensor cores, which read activations from shared memory themselves:
// weights become f16 in registers, sums are f32.
//
// A block makes `ROWS` rows for `TOKENS` tokens, each of its warps 16 rows. Tiles of weights and 256
// columns of activations go through a ring of `STAGES` stages in shared memory, which is filled with weights before the
// wait for the kernel that makes the activations. `CLUSTER` blocks share the tiles of the same rows and add their sums
// through each other's shared memory. For SwiGLU the first half of the warps make gates, the others ups.
//
// Launch constants: BLOCK_ROWS (128, 256), FORMATS (list of the layer's formats), TOKENS (16, 32, 64, 128), STAGES, CLUSTER, EPILOGUE.
// Grid: `CLUSTER` blocks a unit; pieces of `TOKENS` tokens. Dynamic shared memory: `STAGES` stages, at least the sums, and
// 1024 bytes for their border.

#define BFLOAT 0
#include "batch.cuh"
#include "tensor_core.cuh"
#include "wgmma.cuh"

constexpr unsigned WARP_GROUPS = GROUPS / NUM_WARPS;
// Activations are pieces of 64 columns, 128 bytes a token, in the order that the tensor cores read without conflicts.
constexpr unsigned PIECE_BYTES = TOKENS * 128, TOKENS_BYTES = 4 * PIECE_BYTES;
constexpr unsigned STAGE_BYTES = TOKENS_BYTES + (GROUPS * MAX_TILE_BYTES + 1023) / 1024 * 1024;
constexpr unsigned NUM_SUMS = TOKENS / 2;

extern __shared__ uint8_t unaligned[];

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// sums += a * b: a [64 rows, 16] in registers, b [TOKENS rows, 16] in shared memory.
__device__ __forceinline__ void multiply_tokens(float (&d)[NUM_SUMS], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (TOKENS == 128) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16" WGMMA_TYPES "{" WGMMA_NAMES_64
                     "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
                     : WGMMA_REGISTERS_64(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else if constexpr (TOKENS == 64) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES "{" WGMMA_NAMES_32
                     "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
                     : WGMMA_REGISTERS_32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else if constexpr (TOKENS == 32) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16" WGMMA_TYPES "{" WGMMA_NAMES_16
                     "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
                     : WGMMA_REGISTERS_16(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16" WGMMA_TYPES "{" WGMMA_NAMES_8
                     "}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
                     : WGMMA_REGISTERS_8(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
}

// Copies 256 columns of the tokens; what lies outside becomes zeros.
__device__ __forceinline__ void copy_activations(uint8_t* to, const Share& share, uint32_t tile) {
    constexpr unsigned CHUNKS = TOKENS * 32;
#pragma unroll
    for (unsigned first = 0; first < CHUNKS; first += THREADS) {
        const unsigned index = first + threadIdx.x, token = index / 32, piece = index % 32 / 8, chunk = index % 8;
        const uint32_t column = tile * TILE_COLUMNS + index % 32 * 8;
        const bool is_inside = token < share.num_tokens && column < share.columns;
        const uint16_t* from = share.input + (is_inside ? (size_t)token * share.columns + column : 0);
        copy16_or_zeros(to + piece * PIECE_BYTES + token * 128 + (chunk ^ token % 8) * 16, (const uint8_t*)from,
                        is_inside);
    }
}

// Words `t` and `4 + t` of block `4 index + block` of row `lane / 4` of a tile in shared memory.
template <class F>
__device__ __forceinline__ void load_words(const uint8_t* tile, unsigned index, unsigned block, unsigned lane,
                                           uint32_t (&words)[2]) {
    const unsigned owner = lane / 4 * 4 + block, t = lane % 4;
    const auto load = [](const uint8_t* from) { return *(const uint32_t*)from; };
    if constexpr (F::BITS == 8) {
        words[0] = load(tile + 2 * index * 16 * WARP + owner * 16 + t * 4);
        words[1] = load(tile + (2 * index + 1) * 16 * WARP + owner * 16 + t * 4);
        return;
    }
    const uint8_t* high = tile + F::LOW * 16 * WARP;
    if constexpr (F::BITS >= 4) {
        const uint32_t low = load(tile + index * 16 * WARP + owner * 16 + t * 4);
        words[0] = low & 0x0f0f0f0fu;
        words[1] = low >> 4 & 0x0f0f0f0fu;
    } else {
        const uint32_t low = load(tile + owner * 16 + index * 8 + t % 2 * 4) >> t / 2 * 2;
        words[0] = low & 0x03030303u;
        words[1] = low >> 4 & 0x03030303u;
    }
    if constexpr (F::HIGH == 2) {
        constexpr unsigned TO = F::BITS == 3 ? 2 : 4;
        const uint32_t bits = load(high + owner * 8 + index * 4) >> t;
        words[0] |= (bits & 0x01010101u) << TO;
        words[1] |= (bits >> 4 & 0x01010101u) << TO;
    } else if constexpr (F::HIGH == 4) {
        const uint32_t bits = load(high + owner * 16 + index * 8 + t % 2 * 4) >> t / 2 * 2;
        words[0] |= (bits & 0x03030303u) << 4;
        words[1] |= (bits >> 4 & 0x03030303u) << 4;
    }
}

// Scale and summand of a half of a block side by side, as lanes hand them on; a type without summands has the scale twice.
template <class F>
__device__ __forceinline__ void load_scales(const uint8_t* tile, unsigned index, unsigned lane, uint32_t (&packed)[2]) {
    const LaneBlock<F> block = load_block<F, FromShared>(tile, index, lane);
    const HalfScales scales = half_scales(block, index, lane);
#pragma unroll
    for (unsigned half = 0; half < 2; ++half) {
        packed[half] = F::HAS_MIN ? __byte_perm(scales.scale[half], scales.min[half], 0x5410) : scales.scale[half];
    }
}

template <class F>
struct Multiply {
    static __device__ __forceinline__ void run(const Share& share, uint8_t* stages, float (&sums)[NUM_SUMS]) {
        const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const uint8_t* groups[WARP_GROUPS];
#pragma unroll
        for (unsigned group = 0; group < WARP_GROUPS; ++group) {
            groups[group] = group_tiles(share.part, share.first_group + group, share.num_tiles, F::TILE_BYTES);
        }
        const unsigned weights_at = TOKENS_BYTES + warp * WARP_GROUPS * MAX_TILE_BYTES;
        const auto copy_weights = [&](uint32_t tile, unsigned stage) {
            if (tile >= share.end_tile) return;
#pragma unroll
            for (unsigned group = 0; group < WARP_GROUPS; ++group) {
                copy_tile<F>(stages + stage * STAGE_BYTES + weights_at + group * MAX_TILE_BYTES,
                             groups[group] + tile * F::TILE_BYTES, lane);
            }
        };
        const auto copy_tokens = [&](uint32_t tile, unsigned stage) {
            if (tile < share.end_tile) copy_activations(stages + stage * STAGE_BYTES, share, tile);
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
            publish_shared();
            __syncthreads();
            // Into the stage that everybody has just left.
            const unsigned free_stage = stage == 0 ? STAGES - 1 : stage - 1;
            copy_weights(tile + STAGES - 1, free_stage);
            copy_tokens(tile + STAGES - 1, free_stage);
            const uint8_t* here = stages + stage * STAGE_BYTES;
            multiply_tile(here + weights_at, shared_address(here), lane, sums);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
    }

    // What a lane needs of 32 columns: [group][half].
    struct Raw {
        uint32_t words[WARP_GROUPS][2];
        uint32_t scales[WARP_GROUPS][2];
    };

    static __device__ __forceinline__ Raw load_raw(const uint8_t* weights, const uint32_t (&packed)[2][WARP_GROUPS][2],
                                                   unsigned block, unsigned lane) {
        Raw raw;
#pragma unroll
        for (unsigned group = 0; group < WARP_GROUPS; ++group) {
            load_words<F>(weights + group * MAX_TILE_BYTES, block / 4, block % 4, lane, raw.words[group]);
#pragma unroll
            for (unsigned half = 0; half < (F::IS_HALVED ? 2 : 1); ++half) {
                raw.scales[group][half] =
                    __shfl_sync(FULL_MASK, packed[block / 4][group][half], lane / 4 * 4 + block % 4);
            }
        }
        return raw;
    }

    static __device__ __forceinline__ void multiply_tile(const uint8_t* weights, uint32_t tokens, unsigned lane,
                                                         float (&sums)[NUM_SUMS]) {
        uint32_t packed[2][WARP_GROUPS][2];
#pragma unroll
        for (unsigned index = 0; index < 2; ++index) {
#pragma unroll
            for (unsigned group = 0; group < WARP_GROUPS; ++group) {
                load_scales<F>(weights + group * MAX_TILE_BYTES, index, lane, packed[index][group]);
            }
        }
        const uint64_t matrix = describe<128>(tokens, 16, 1024);
        Raw next = load_raw(weights, packed, 0, lane);
#pragma unroll
        for (unsigned block = 0; block < 8; ++block) {
            const Raw raw = next;
            if (block < 7) next = load_raw(weights, packed, block + 1, lane);
            // [half][fragment]
            uint32_t a[2][4];
#pragma unroll
            for (unsigned group = 0; group < WARP_GROUPS; ++group) {
#pragma unroll
                for (unsigned half = 0; half < 2; ++half) {
                    const uint32_t both = raw.scales[group][F::IS_HALVED ? half : 0];
                    const uint32_t scale = F::HAS_MIN ? __byte_perm(both, both, 0x1010) : both;
                    const uint32_t min = F::HAS_MIN ? __byte_perm(both, both, 0x3232) : 0;
                    uint32_t pairs[2];
                    dequantize_word<F>(raw.words[group][half], scale, min, pairs);
                    a[half][group] = pairs[0];
                    a[half][group + 2] = pairs[1];
                }
            }
            begin_products();
#pragma unroll
            for (unsigned half = 0; half < 2; ++half) {
                // 64 columns a piece, of which these are 16.
                const unsigned offset = block / 2 * PIECE_BYTES + block % 2 * 64 + half * 32;
                multiply_tokens(sums, a[half], matrix + (offset >> 4));
            }
            commit_products();
            // The products before these are done with their fragments.
            await_products<1>();
        }
        await_products<0>();
    }
};

#endif

extern "C" __global__ void
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    __launch_bounds__(THREADS, TOKENS <= 64 ? 2 : 1)
        batch(const __grid_constant__ Layer layer, const uint16_t* input, uint32_t columns,
              const __grid_constant__ Activations output, uint32_t num_tokens) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    allow_next();
    uint8_t* stages = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Share share = share_of<NUM_WARPS>(layer, input, columns, num_tokens, warp);
    float sums[NUM_SUMS] = {};
    with_format<Multiply, FORMATS>(share.part.format, share, stages, sums);

    // Everybody has left the stages; the last copies into them were past the end and empty.
    __syncthreads();
    float* all_sums = (float*)stages;
#pragma unroll
    for (unsigned i = 0; i < NUM_SUMS; ++i) {
        const unsigned token = i / 4 * 8 + lane % 4 * 2 + i % 2, row = warp * 16 + i % 4 / 2 * 8 + lane / 4;
        all_sums[token * SUM_ROWS + row] = sums[i];
    }
    finish_sums<1>(share, all_sums, output);
#endif
}
