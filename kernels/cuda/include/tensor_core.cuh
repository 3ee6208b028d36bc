// Tensor cores: f16 fragments, and how blocks of quantized weights become them.
//
// The 16 columns of a step need not be neighbours as long as both operands agree on them: step `i` of a half of four blocks
// of 32 may take word `i` of each, so that lane `4 row + t` holds fragments of the one block `t` of its row.

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

// Scale and summand of the halves of a lane's block, as pairs. Below the smallest normal f16 they lose no bits: `d` and `m`
// are f16 in the file (but for Q8_K), so their products with integers are multiples of the smallest f16 of all.
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

// The bytes of a word of quants that become its first and its second pair.
constexpr uint32_t FIRST_PAIR = 0x4140, SECOND_PAIR = 0x4342;

// A word of a block as two pairs of f16.
template <class F>
__device__ __forceinline__ void dequantize_word(uint32_t word, uint32_t scale, uint32_t min, uint32_t (&pairs)[2],
                                                uint32_t first = FIRST_PAIR, uint32_t second = SECOND_PAIR) {
    // 0x6400 is 1024, where f16 counts in ones: the byte below is added exactly, and what was too much taken away.
    constexpr uint32_t EXCESS = 0x6400 + (F::BITS == 8 ? 128 : F::OFFSET);
    constexpr uint32_t MINUS_EXCESS = (0x8000 | EXCESS) * 0x10001u;
    if constexpr (F::BITS == 8) word ^= 0x80808080u;
#pragma unroll
    for (unsigned pair = 0; pair < 2; ++pair) {
        const uint32_t quants = add_pairs(__byte_perm(word, 0x64646464u, pair == 0 ? first : second), MINUS_EXCESS);
        pairs[pair] = scale_pairs(quants, scale, F::HAS_MIN ? min : 0);
    }
}
