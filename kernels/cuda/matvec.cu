// Quantized weights times one to eight tokens, by integer dot products with 8-bit activations.
//
// A block makes `SETS * GROUPS * 8` rows: each of its warps `GROUPS` groups of 8 rows over every `SPLITS`-th tile of the
// columns, summed over the warps in shared memory. Each warp has a ring of tiles in shared memory, which is filled before
// the wait for the kernel that makes the activations. `SHARED`: each block copies the activations to shared memory after
// that wait. For SwiGLU the first half of the sets are gates, the second half ups, and a block makes 32 outputs.
//
// Launch constants: FORMATS (list of the layer's formats), GROUPS, SETS, SPLITS, STAGES, SHARED (0, 1), TOKENS, EPILOGUE.
// Grid: one block a unit. Dynamic shared memory: SETS * SPLITS * STAGES * GROUPS tiles of the largest format; if `SHARED`,
// before them the tiles of activations of all tokens.

#include "layer.cuh"

constexpr unsigned NUM_WARPS = SETS * SPLITS, THREADS = NUM_WARPS * WARP;
constexpr unsigned SET_ROWS = GROUPS * GROUP_ROWS, ROWS = SETS * SET_ROWS;
constexpr unsigned MAX_TILE_BYTES = max_tile_bytes<FORMATS>();
constexpr Epilogue KIND = Epilogue::EPILOGUE;
static_assert(KIND == Epilogue::SwiGlu || ROWS * TOKENS <= THREADS, "a thread finishes one output");

// One block of 32 activations.
struct Block {
    int quants[8];
    float scale;
    uint32_t sums;  // two 16-bit numbers
};

__device__ __forceinline__ Block load_activations(const ActivationTile& tile, unsigned index) {
    Block block;
    for (unsigned half = 0; half < 2; ++half) {
        const int4 words = *(const int4*)tile.quants[half][index];
        block.quants[4 * half] = words.x;
        block.quants[4 * half + 1] = words.y;
        block.quants[4 * half + 2] = words.z;
        block.quants[4 * half + 3] = words.w;
    }
    const uint2 scale = *(const uint2*)&tile.blocks[index];
    block.scale = __uint_as_float(scale.x);
    block.sums = scale.y;
    return block;
}

// a[0] * b[0] + a[1] * b[1] + c: a two 16-bit numbers, b bytes.
__device__ __forceinline__ int add_pair(uint32_t a, uint32_t b, int c) {
    int sum;
    asm("dp2a.lo.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// What the offset of the quants of a half takes away from their product with activations.
template <class F>
__device__ __forceinline__ int offset_of(const Block& block, unsigned half) {
    return F::OFFSET == 0 ? 0 : add_pair(block.sums, (uint8_t)-F::OFFSET << 8 * half, 0);
}

// c + the dot product of four weights of at most 8 bits, not negative, and four activations.
__device__ __forceinline__ int add_products(uint32_t weights, int activations, int c) {
    int sum;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(weights), "r"(activations), "r"(c));
    return sum;
}

// Word `j` of a block of at least 4 bits; of 4 bits, the second half's quants where they lie, 16 times too large.
template <class F>
__device__ __forceinline__ uint32_t word_to_multiply(const LaneBlock<F>& block, unsigned j) {
    if constexpr (F::BITS == 4) return block.low[j % 4] & (j < 4 ? 0x0f0f0f0fu : 0xf0f0f0f0u);
    return unpack_word(block, j);
}

// The product of such words and a block of activations.
template <class F>
__device__ __forceinline__ float multiply(const uint32_t (&words)[8], const BlockScales& scales, const Block& block) {
    float value;
    if constexpr (F::IS_HALVED) {
        int dots[2] = {offset_of<F>(block, 0), offset_of<F>(block, 1)};
#pragma unroll
        for (unsigned j = 0; j < 8; ++j) dots[j / 4] = __dp4a((int)words[j], block.quants[j], dots[j / 4]);
        value = scales.d * (float)(scales.scale[0] * dots[0] + scales.scale[1] * dots[1]);
    } else {
        // The quants of 4 bits of the second half are 16 times too large.
        constexpr int FACTOR = F::BITS == 4 ? 16 : 1;
        int dot = F::OFFSET == 0 ? 0 : add_pair(block.sums, (uint8_t)-F::OFFSET * 0x0101u, 0);
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) dot = __dp4a((int)words[j], block.quants[j], dot);
        dot *= FACTOR;
#pragma unroll
        for (unsigned j = 4; j < 8; ++j) {
            dot = F::BITS == 4 ? add_products(words[j], block.quants[j], dot)
                               : __dp4a((int)words[j], block.quants[j], dot);
        }
        value = scales.d * (float)(scales.scale[0] * dot);
        if constexpr (F::HAS_MIN) {
            const int sum = add_pair(block.sums, FACTOR * 0x0101u, 0);
            value = fmaf(scales.m, (float)(scales.min[0] * sum), value);
        }
        if constexpr (FACTOR != 1) return value * (block.scale * (1.0f / FACTOR));
    }
    return value * block.scale;
}

// An integer of less than 23 bits that was added to these bits is a float after that number is taken away.
constexpr int MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;

// As `multiply`, of 2 and 3 bits, where unpacking is most of the work: quants are multiplied where they lie in their
// words, those of the upper bits four times too large.
template <class F>
__device__ __forceinline__ float multiply_few_bits(const LaneBlock<F>& block, const Block& activations) {
    int dots[2];
#pragma unroll
    for (unsigned half = 0; half < 2; ++half) {
        uint32_t words[4];
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) {
            words[j] = block.low[j % 2] >> 4 * half & (j < 2 ? 0x03030303u : 0x0c0c0c0cu);
            if constexpr (F::BITS == 3) {
                words[j] |= shifted(block.high[0], 4 * half + j % 2, 2) & (j < 2 ? 0x04040404u : 0x10101010u);
            }
        }
        const int* quants = activations.quants + 4 * half;
        // Less than 2^15 also when they are four times too large.
        const int dot =
            __dp4a((int)words[1], quants[1], __dp4a((int)words[0], quants[0], offset_of<F>(activations, half)));
        dots[half] = __dp4a((int)words[3], quants[3], __dp4a((int)words[2], quants[2], 4 * dot));
    }
    const uint32_t pair = __byte_perm(dots[0], dots[1], 0x5410);
    const int dot = add_pair(pair, F::HAS_MIN ? block.scales.x & 0x0f0f : block.scales.x, MAGIC_BITS);
    float value = 0.25f * half_to_float(block.factors) * (__int_as_float(dot) - MAGIC);
    if constexpr (F::HAS_MIN) {
        const int sum = add_pair(activations.sums, block.scales.x >> 4 & 0x0f0f, MAGIC_BITS);
        value = fmaf(half_to_float(block.factors >> 16), __int_as_float(sum) - MAGIC, value);
    }
    return value * activations.scale;
}

// Activations if `SHARED`, then rings of tiles, one of `STAGES * GROUPS` for each warp.
extern __shared__ __align__(16) uint8_t dynamic[];

// Copies the activations to shared memory. Every thread of the block calls it.
__device__ __forceinline__ void bring_activations(const ActivationTile* input, uint32_t num_bytes) {
    // Several chunks of a thread are under way together.
    constexpr unsigned TOGETHER = 4;
    const uint32_t count = num_bytes / sizeof(uint4);
    for (uint32_t first = threadIdx.x; first < count; first += TOGETHER * THREADS) {
        uint4 chunks[TOGETHER];
#pragma unroll
        for (unsigned i = 0; i < TOGETHER; ++i) {
            if (first + i * THREADS < count) chunks[i] = ((const uint4*)input)[first + i * THREADS];
        }
#pragma unroll
        for (unsigned i = 0; i < TOGETHER; ++i) {
            if (first + i * THREADS < count) ((uint4*)dynamic)[first + i * THREADS] = chunks[i];
        }
    }
    __syncthreads();
}

// One warp's share: its groups over its tiles. Waits for the kernel before in any case, then calls `start`.
template <class F>
struct Multiply {
    template <class Start>
    static __device__ __forceinline__ void run(const Part& part, uint32_t first_group, uint32_t num_tiles,
                                               const ActivationTile* input, uint32_t num_tokens, const Start& start,
                                               float (&sums)[GROUPS][TOKENS]) {
        const unsigned lane = threadIdx.x % WARP, split = threadIdx.x / WARP % SPLITS;
        const uint32_t activation_bytes = SHARED ? num_tokens * num_tiles * sizeof(ActivationTile) : 0;
        uint8_t* ring = dynamic + activation_bytes + threadIdx.x / WARP * STAGES * GROUPS * MAX_TILE_BYTES;
        // They move on with every tile: computed anew each time, addresses would cost as much as the products.
        const uint8_t* next[GROUPS];
#pragma unroll
        for (unsigned group = 0; group < GROUPS; ++group) {
            next[group] = group_tiles(part, first_group + group, num_tiles, F::TILE_BYTES);
            next[group] += split * F::TILE_BYTES + lane * 16;
        }
        const auto fetch = [&](uint32_t tile, unsigned stage) {
            if (tile < num_tiles) {
                uint8_t* to = ring + stage * GROUPS * F::TILE_BYTES + lane * 16;
#pragma unroll
                for (unsigned group = 0; group < GROUPS; ++group) {
                    copy_share<F>(to + group * F::TILE_BYTES, next[group], lane);
                    next[group] += SPLITS * F::TILE_BYTES;
                }
            }
            close_copies();
        };
#pragma unroll
        for (unsigned stage = 0; stage < STAGES; ++stage) fetch(split + stage * SPLITS, stage);
        wait_for_previous();
        start();
        if constexpr (SHARED) {
            bring_activations(input, activation_bytes);
            input = (const ActivationTile*)dynamic;
        }
        unsigned stage = 0;
        input += split;
#pragma unroll 1
        for (uint32_t tile = split; tile < num_tiles; tile += SPLITS, input += SPLITS) {
            Block first[2];
#pragma unroll
            for (unsigned block = 0; block < 2; ++block) first[block] = load_activations(*input, 4 * block + lane % 4);
            wait_copies<STAGES - 1>();
            __syncwarp();
            LaneBlock<F> loaded[2][GROUPS];
#pragma unroll
            for (unsigned group = 0; group < GROUPS; ++group) {
                const uint8_t* from = ring + (stage * GROUPS + group) * F::TILE_BYTES;
                loaded[0][group] = load_block<F, FromShared>(from, 0, lane);
                loaded[1][group] = load_block<F, FromShared>(from, 1, lane);
            }
            __syncwarp();
            fetch(tile + STAGES * SPLITS, stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            multiply_tile(loaded, first, input, num_tiles, num_tokens, lane, sums);
        }
    }

    static __device__ __forceinline__ void multiply_tile(const LaneBlock<F> (&loaded)[2][GROUPS], const Block (&first)[2],
                                                         const ActivationTile* input, uint32_t num_tiles,
                                                         uint32_t num_tokens, unsigned lane,
                                                         float (&sums)[GROUPS][TOKENS]) {
#pragma unroll
        for (unsigned block = 0; block < 2; ++block) {
            uint32_t words[GROUPS][8];
            BlockScales scales[GROUPS];
#pragma unroll
            for (unsigned group = 0; group < GROUPS && F::BITS >= 4; ++group) {
                scales[group] = unpack_scales(loaded[block][group], block, lane);
#pragma unroll
                for (unsigned j = 0; j < 8; ++j) words[group][j] = word_to_multiply(loaded[block][group], j);
            }
#pragma unroll
            for (unsigned token = 0; token < TOKENS; ++token) {
                if (token > 0 && token >= num_tokens) break;
                const Block activations =
                    token == 0 ? first[block] : load_activations(input[token * num_tiles], 4 * block + lane % 4);
#pragma unroll
                for (unsigned group = 0; group < GROUPS; ++group) {
                    if constexpr (F::BITS < 4) {
                        sums[group][token] += multiply_few_bits(loaded[block][group], activations);
                    } else {
                        sums[group][token] += multiply<F>(words[group], scales[group], activations);
                    }
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    matvec(const __grid_constant__ Layer layer, const ActivationTile* input, const __grid_constant__ Activations output,
           uint32_t num_tokens) {
    __shared__ float partial[SPLITS][TOKENS][ROWS];
    allow_next();
    const unsigned set = threadIdx.x / WARP / SPLITS, lane = threadIdx.x % WARP;
    // SwiGLU: part 0 for the first half of the sets, part 1 for the second, at the same rows.
    const bool is_up = KIND == Epilogue::SwiGlu && set >= SETS / 2;
    const uint32_t index = KIND == Epilogue::SwiGlu ? (is_up ? 1 : 0) : part_of(layer, blockIdx.x);
    const Part& part = layer.parts[index];
    const uint32_t unit = KIND == Epilogue::SwiGlu ? blockIdx.x : blockIdx.x - part.first_unit;
    constexpr unsigned UNIT_ROWS = KIND == Epilogue::SwiGlu ? ROWS / 2 : ROWS;
    const uint32_t first_group = unit * (UNIT_ROWS / GROUP_ROWS) + (is_up ? set - SETS / 2 : set) * GROUPS;

    float sums[GROUPS][TOKENS] = {};
    Single<KIND, ROWS, THREADS> own(part, unit * UNIT_ROWS, num_tokens, output);
    with_format<Multiply, FORMATS>(part.format, part, first_group, layer.num_tiles, input, num_tokens,
                                   [&] { own.load(); }, sums);

#pragma unroll
    for (unsigned group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (unsigned token = 0; token < TOKENS; ++token) {
            float sum = sums[group][token];
            sum += __shfl_xor_sync(FULL_MASK, sum, 1);
            sum += __shfl_xor_sync(FULL_MASK, sum, 2);
            if (lane % 4 == 0) {
                partial[threadIdx.x / WARP % SPLITS][token][set * SET_ROWS + group * GROUP_ROWS + lane / 4] = sum;
            }
        }
    }
    __syncthreads();
    const auto product = [&](unsigned row, unsigned token) {
        float sum = 0.0f;
        for (unsigned split = 0; split < SPLITS; ++split) sum += partial[split][token][row];
        return sum;
    };
    own.finish(product);
}
