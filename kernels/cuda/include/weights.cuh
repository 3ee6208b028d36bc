// Quantized weights as the matmuls read them, for every block type.
//
// A matrix is groups of 8 rows; a group is tiles of 256 columns, in order; a tile is what one warp loads at once. Lane
// `4 row + t` of the warp holds blocks `t` and `t + 4` of 32 columns of its row: whole blocks, so that integer dot
// products need one scale for 32 terms and a fragment of a tensor core's A operand is one lane's block. A tile is, with
// `[row][t]` the order of the lanes:
//   low     4, 5, 6 bits: 2 x [row][t][16 bytes], blocks t, then blocks t + 4; 8 bits: 4 x, each block in two halves;
//           2, 3 bits: 1 x, 8 bytes of either block
//   high    3, 5 bits: [row][t][2 x 4 bytes]; 6 bits: [row][t][2 x 8 bytes]
//   scales  Half, HalfMin: [row][t][2 x f16 d (, f16 m)]; Single: [row][f32 d]; SixBit: [row][f16 d, f16 m, 96 bits];
//           FourBit: [row][t][4 x (scale | min << 4)], [row][f16 d, f16 m]; Signed: [row][t][4 x int8], [row][f16 d]
// padded to 32 bytes. Word `j` of a block is elements 2t, 2t + 1, 2t + 8, 2t + 9 of its half `j / 4`, `t = j % 4`: what
// lane `t` holds of 16 columns of a tensor core's A operand. They are a byte each: with 4 and more bits nibble `j / 4` of low
// word `j % 4`, with less bits `2 (j / 2)..` of low word `j % 2`; its high bits are bit `j` of each byte of the one
// high word, or bits `2 (j / 2)..` of high word `j % 2`. 8 bits are signed. The 96 bits are 24 for each `t`: scale and min
// of block t, then of block t + 4.
//
// Invariant: a value is `d * scale * (quant - OFFSET) + m * min`; rows and columns past the end have d = m = 0.
// The host's half of this is `kernels/src/cuda/matmul/layout.rs`.

#pragma once

#include "launch.cuh"

constexpr unsigned GROUP_ROWS = 8;

enum class Scales { Half, HalfMin, Single, SixBit, FourBit, Signed };

template <unsigned BITS_, int OFFSET_, Scales SCALES_>
struct Format {
    static constexpr unsigned BITS = BITS_;
    static constexpr int OFFSET = OFFSET_;
    static constexpr Scales SCALES = SCALES_;
    static constexpr bool HAS_MIN = SCALES == Scales::HalfMin || SCALES == Scales::SixBit || SCALES == Scales::FourBit;
    // Whether the two halves of a block have a scale each.
    static constexpr bool IS_HALVED = SCALES == Scales::FourBit || SCALES == Scales::Signed;
    // Loads of 16 bytes a lane.
    static constexpr unsigned LOW = BITS == 8 ? 4 : BITS >= 4 ? 2 : 1;
    // Words a lane.
    static constexpr unsigned HIGH = BITS == 6 ? 4 : BITS == 3 || BITS == 5 ? 2 : 0;
    static constexpr unsigned SCALES_AT = (LOW * 16 + HIGH * 4) * WARP;
    static constexpr unsigned FACTORS_AT = SCALES_AT + 4 * WARP;
    static constexpr unsigned END = SCALES == Scales::HalfMin  ? SCALES_AT + 8 * WARP
                                    : SCALES == Scales::Single ? SCALES_AT + 4 * GROUP_ROWS
                                    : SCALES == Scales::FourBit ? FACTORS_AT + 4 * GROUP_ROWS
                                    : SCALES == Scales::Signed  ? FACTORS_AT + 2 * GROUP_ROWS
                                                                : FACTORS_AT;
    static constexpr unsigned TILE_BYTES = (END + 31) / 32 * 32;
};

using Q4_0 = Format<4, 8, Scales::Half>;
using Q4_1 = Format<4, 0, Scales::HalfMin>;
using Q5_0 = Format<5, 16, Scales::Half>;
using Q5_1 = Format<5, 0, Scales::HalfMin>;
using Q8_0 = Format<8, 0, Scales::Half>;
using Q2_K = Format<2, 0, Scales::FourBit>;
using Q3_K = Format<3, 4, Scales::Signed>;
using Q4_K = Format<4, 0, Scales::SixBit>;
using Q5_K = Format<5, 0, Scales::SixBit>;
using Q6_K = Format<6, 32, Scales::Signed>;
using Q8_K = Format<8, 0, Scales::Single>;

// Reads of weights from device memory: each byte once in a launch, so they are kept out of the first-level cache.
struct FromGlobal {
    static __device__ __forceinline__ uint4 load16(const uint8_t* from) {
        uint4 value;
        asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(from));
        return value;
    }
    static __device__ __forceinline__ uint2 load8(const uint8_t* from) {
        uint2 value;
        asm("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
            : "=r"(value.x), "=r"(value.y) : "l"(from));
        return value;
    }
    static __device__ __forceinline__ uint32_t load4(const uint8_t* from) {
        uint32_t value;
        asm("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(value) : "l"(from));
        return value;
    }
    static __device__ __forceinline__ uint32_t load2(const uint8_t* from) {
        uint16_t value;
        asm("ld.global.nc.L1::no_allocate.L2::128B.u16 %0, [%1];" : "=h"(value) : "l"(from));
        return value;
    }
};

// Reads of a tile that was copied to shared memory.
struct FromShared {
    static __device__ __forceinline__ uint4 load16(const uint8_t* from) { return *(const uint4*)from; }
    static __device__ __forceinline__ uint2 load8(const uint8_t* from) { return *(const uint2*)from; }
    static __device__ __forceinline__ uint32_t load4(const uint8_t* from) { return *(const uint32_t*)from; }
    static __device__ __forceinline__ uint32_t load2(const uint8_t* from) { return *(const uint16_t*)from; }
};

// One lane's block of a tile, as stored.
template <class F>
struct LaneBlock {
    uint32_t low[F::BITS == 8 ? 8 : F::BITS >= 4 ? 4 : 2];
    uint32_t high[F::BITS == 6 ? 2 : 1];
    uint4 scales;
    uint32_t factors;
};

// Block `4 index + lane % 4` of row `lane / 4`.
template <class F, class From>
__device__ __forceinline__ LaneBlock<F> load_block(const uint8_t* tile, unsigned index, unsigned lane) {
    LaneBlock<F> block;
    if constexpr (F::BITS >= 4) {
        constexpr unsigned CHUNKS = F::LOW / 2;
#pragma unroll
        for (unsigned chunk = 0; chunk < CHUNKS; ++chunk) {
            const uint4 words = From::load16(tile + (index * CHUNKS + chunk) * 16 * WARP + lane * 16);
            block.low[4 * chunk] = words.x;
            block.low[4 * chunk + 1] = words.y;
            block.low[4 * chunk + 2] = words.z;
            block.low[4 * chunk + 3] = words.w;
        }
    } else {
        const uint2 words = From::load8(tile + lane * 16 + index * 8);
        block.low[0] = words.x;
        block.low[1] = words.y;
    }
    const uint8_t* high = tile + F::LOW * 16 * WARP;
    if constexpr (F::HIGH == 2) {
        block.high[0] = From::load4(high + lane * 8 + index * 4);
    } else if constexpr (F::HIGH == 4) {
        const uint2 words = From::load8(high + lane * 16 + index * 8);
        block.high[0] = words.x;
        block.high[1] = words.y;
    }
    const uint8_t* scales = tile + F::SCALES_AT;
    const unsigned row = lane / 4;
    if constexpr (F::SCALES == Scales::SixBit) {
        block.scales = From::load16(scales + row * 16);
    } else if constexpr (F::SCALES == Scales::HalfMin) {
        block.scales.x = From::load4(scales + lane * 8 + index * 4);
    } else if constexpr (F::SCALES == Scales::Single) {
        block.scales.x = From::load4(scales + row * 4);
    } else {
        block.scales.x = From::load2(scales + lane * 4 + index * 2);
    }
    if constexpr (F::SCALES == Scales::FourBit) block.factors = From::load4(tile + F::FACTORS_AT + row * 4);
    if constexpr (F::SCALES == Scales::Signed) block.factors = From::load2(tile + F::FACTORS_AT + row * 2);
    return block;
}

__device__ __forceinline__ float half_to_float(uint32_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((uint16_t)bits));
    return value;
}

// Factors of a block, and the integer scales and minima of its halves: 1, or both the same, where a type has less.
struct BlockScales {
    float d;
    float m;
    int scale[2];
    int min[2];
};

template <class F>
__device__ __forceinline__ BlockScales unpack_scales(const LaneBlock<F>& block, unsigned index, unsigned lane) {
    BlockScales result = {0.0f, 0.0f, {1, 1}, {1, 1}};
    if constexpr (F::SCALES == Scales::Half) {
        result.d = half_to_float(block.scales.x);
    } else if constexpr (F::SCALES == Scales::HalfMin) {
        result.d = half_to_float(block.scales.x);
        result.m = half_to_float(block.scales.x >> 16);
    } else if constexpr (F::SCALES == Scales::Single) {
        result.d = __uint_as_float(block.scales.x);
    } else if constexpr (F::SCALES == Scales::SixBit) {
        // Bytes 3t..3t + 2 of the 12 that follow the factors.
        const unsigned t = lane % 4;
        const uint32_t first = t < 2 ? block.scales.y : block.scales.z;
        const uint32_t second = t < 2 ? block.scales.z : block.scales.w;
        const uint32_t selector = t == 0 ? 0x3210 : t == 1 ? 0x6543 : t == 2 ? 0x5432 : 0x7765;
        const uint32_t bits = __byte_perm(first, second, selector) >> 12 * index;
        result.d = half_to_float(block.scales.x);
        result.m = half_to_float(block.scales.x >> 16);
        result.scale[0] = result.scale[1] = bits & 63;
        result.min[0] = result.min[1] = bits >> 6 & 63;
    } else {
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
            if constexpr (F::SCALES == Scales::FourBit) {
                result.scale[half] = block.scales.x >> 8 * half & 15;
                result.min[half] = block.scales.x >> 8 * half + 4 & 15;
            } else {
                result.scale[half] = (int8_t)(block.scales.x >> 8 * half);
            }
        }
        result.d = half_to_float(block.factors);
        if constexpr (F::HAS_MIN) result.m = half_to_float(block.factors >> 16);
    }
    return result;
}

// Moves the bits from `from` of each byte to bit `to`.
__device__ __forceinline__ uint32_t shifted(uint32_t word, unsigned from, unsigned to) {
    return from >= to ? word >> from - to : word << to - from;
}

// Word `j` of a lane's block: four quants, a byte each.
template <class F>
__device__ __forceinline__ uint32_t unpack_word(const LaneBlock<F>& block, unsigned j) {
    if constexpr (F::BITS == 8) return block.low[j];
    uint32_t word;
    if constexpr (F::BITS >= 4) {
        word = block.low[j % 4] >> j / 4 * 4 & 0x0f0f0f0fu;
    } else {
        word = block.low[j % 2] >> j / 2 * 2 & 0x03030303u;
    }
    if constexpr (F::BITS == 3) word |= shifted(block.high[0], j, 2) & 0x04040404u;
    if constexpr (F::BITS == 5) word |= shifted(block.high[0], j, 4) & 0x10101010u;
    if constexpr (F::BITS == 6) word |= shifted(block.high[j % 2], j / 2 * 2, 4) & 0x30303030u;
    return word;
}

template <class... Formats>
__device__ constexpr unsigned max_tile_bytes() {
    unsigned largest = 0;
    ((largest = Formats::TILE_BYTES > largest ? Formats::TILE_BYTES : largest), ...);
    return largest;
}

__device__ __forceinline__ void copy16(uint8_t* to, const uint8_t* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                 :: "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

// Copies nothing and writes zeros if `is_wanted` is false.
__device__ __forceinline__ void copy16_or_zeros(uint8_t* to, const uint8_t* from, bool is_wanted) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "r"(is_wanted ? 16 : 0) : "memory");
}

__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` of this thread's groups of copies are under way.
template <unsigned PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// Starts a lane's share of a warp's copy of a tile to shared memory; the pointers are to the lane's first 16 bytes.
template <class F>
__device__ __forceinline__ void copy_share(uint8_t* to, const uint8_t* from, unsigned lane) {
    constexpr unsigned CHUNKS = F::TILE_BYTES / 16;
#pragma unroll
    for (unsigned first = 0; first < CHUNKS; first += WARP) {
        if (first + WARP <= CHUNKS || first + lane < CHUNKS) copy16(to + first * 16, from + first * 16);
    }
}

// Starts a warp's copy of a tile to shared memory.
template <class F>
__device__ __forceinline__ void copy_tile(uint8_t* to, const uint8_t* from, unsigned lane) {
    copy_share<F>(to + lane * 16, from + lane * 16, lane);
}
