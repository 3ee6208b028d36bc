// Tensor cores: f16 fragments, and how blocks of quantized weights become them.
//
// The 16 columns of a step need not be neighbours as long as both operands agree on them: step `i` of four blocks of 32
// takes elements 4i..4i + 3 of each, so that lane `4 row + t` holds fragments of the one block `t` of its row.

#pragma once

#include "weights.cuh"

// d += a * b for 16 rows and 8 columns of f32, 16 terms of f16.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Both halves of a pair the same.
__device__ __forceinline__ uint32_t half_pair(float value) {
    uint32_t pair;
    asm("{.reg .f16 h; cvt.rn.f16.f32 h, %1; mov.b32 %0, {h, h};}" : "=r"(pair) : "f"(value));
    return pair;
}

__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
    uint32_t sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

__device__ __forceinline__ uint32_t scale_pairs(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// Scale and summand of the halves of a lane's block, as pairs.
struct HalfScales {
    uint32_t scale[2];
    uint32_t min[2];
};

template <class F>
__device__ __forceinline__ HalfScales half_scales(const LaneBlock<F>& block, unsigned index, unsigned lane) {
    const BlockScales scales = unpack_scales(block, index, lane);
    HalfScales result = {};
#pragma unroll
    for (unsigned half = 0; half < 2; ++half) {
        if (half == 0 || F::IS_HALVED) {
            result.scale[half] = half_pair(scales.d * (float)scales.scale[half]);
            if constexpr (F::HAS_MIN) result.min[half] = half_pair(scales.m * (float)scales.min[half]);
        } else {
            result.scale[1] = result.scale[0];
            result.min[1] = result.min[0];
        }
    }
    return result;
}

// Elements 4j..4j + 3 of a lane's block as two pairs of f16.
template <class F>
__device__ __forceinline__ void dequantize_word(const LaneBlock<F>& block, const HalfScales& scales, unsigned j,
                                                uint32_t (&pairs)[2]) {
    // 0x6400 is 1024, where f16 counts in ones: the byte below is added exactly, and what was too much taken away.
    constexpr uint32_t EXCESS = 0x6400 + (F::BITS == 8 ? 128 : F::OFFSET);
    constexpr uint32_t MINUS_EXCESS = (0x8000 | EXCESS) * 0x10001u;
    const uint32_t word = F::BITS == 8 ? unpack_word(block, j) ^ 0x80808080u : unpack_word(block, j);
#pragma unroll
    for (unsigned pair = 0; pair < 2; ++pair) {
        const uint32_t quants = add_pairs(__byte_perm(word, 0x64646464u, pair == 0 ? 0x4140 : 0x4342), MINUS_EXCESS);
        pairs[pair] = scale_pairs(quants, scales.scale[j / 4], F::HAS_MIN ? scales.min[j / 4] : 0);
    }
}

// Swaps neighbouring fields of two bits.
__device__ __forceinline__ void swap_fields(uint32_t& word) { word = (word & 0x33333333u) << 2 | word >> 2 & 0x33333333u; }

// Makes word `j ^ 2` of a block word `j`.
template <class F>
__device__ __forceinline__ void swap_word_pairs(LaneBlock<F>& block) {
    const auto swap = [](uint32_t& a, uint32_t& b) {
        const uint32_t old = a;
        a = b;
        b = old;
    };
    if constexpr (F::BITS >= 4) {
#pragma unroll
        for (unsigned i = 0; i < F::LOW * 2; i += 4) {
            swap(block.low[i], block.low[i + 2]);
            swap(block.low[i + 1], block.low[i + 3]);
        }
    } else {
        swap_fields(block.low[0]);
        swap_fields(block.low[1]);
    }
    if constexpr (F::HIGH > 0) swap_fields(block.high[0]);
    if constexpr (F::HIGH == 4) swap_fields(block.high[1]);
}
