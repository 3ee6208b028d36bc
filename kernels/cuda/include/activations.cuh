// Activations as the matmuls read them: 8-bit tiles for quantized weights and few tokens, halves for tensor cores and
// 16-bit weights, floats for 32-bit weights. Producers (rms_norm, attention, SwiGLU) write them in their own kernel.
//
// Invariant: tiles depend on the 32 values of a block alone and equal the host's `quant::quantize_block` bit for bit.
// Columns past the last block of a row's last tile are zeros: buffers start zeroed and nobody writes there.

#pragma once

#include "launch.cuh"

// 256 consecutive columns of one token: eight blocks of 32.
struct __align__(16) ActivationTile {
    struct __align__(8) Block {
        float scale;  // value = scale * quant
        int16_t sums[2];  // of the quants of both halves
    };

    // The halves of the blocks apart: lanes that read a block each read contiguous 16-byte chunks. Word `t` of a half is
    // its elements 2t, 2t + 1, 2t + 8, 2t + 9.
    int8_t quants[2][8][16];
    Block blocks[8];
};
static_assert(sizeof(ActivationTile) == 320, "the host allocates 320 bytes a tile");

constexpr unsigned TILE_COLUMNS = 256;

// The forms in which a row of activations is wanted; a null pointer: not in this one. `columns` is a multiple of 32 if
// there are tiles.
struct Activations {
    ActivationTile* tiles;  // [num_tokens, ceil(columns / 256)]
    uint16_t* halves;  // [num_tokens, columns], f16 or bf16
    float* values;  // [num_tokens, columns]
    uint32_t columns;
    uint32_t is_bfloat;  // of `halves`
};

__device__ __forceinline__ uint16_t to_half(float value) {
    uint16_t half;
    // What f16 cannot hold becomes its largest number, not infinity.
    const float clamped = fminf(fmaxf(value, -65504.0f), 65504.0f);
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value != value ? value : clamped));
    return half;
}

__device__ __forceinline__ uint16_t to_bfloat(float value) {
    uint16_t half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

// Byte of element `element` in its half of a block; elements 2n and 2n + 1 lie side by side.
__device__ __forceinline__ unsigned place_in_half(unsigned element) {
    return element % 8 / 2 * 4 + element / 8 * 2 + element % 2;
}

// Quantizes 32 values, one a lane of a full warp along x, into block `block` of a token's tiles.
__device__ __forceinline__ void quantize_block(float value, unsigned block, ActivationTile* tiles) {
    const unsigned lane = threadIdx.x % WARP;
    // Floats that are not negative order as their bits do.
    const float largest = __uint_as_float(__reduce_max_sync(FULL_MASK, __float_as_uint(fabsf(value))));
    const float inverse = largest > 0.0f ? __fdiv_rn(127.0f, largest) : 0.0f;
    const int quant = __float2int_rn(__fmul_rn(value, inverse));
    // Both halves in one reduction: the second one's sum is in the upper 16 bits.
    const int both = __reduce_add_sync(FULL_MASK, lane < 16 ? quant : quant * 65536);
    ActivationTile& tile = tiles[block / 8];
    tile.quants[lane / 16][block % 8][place_in_half(lane % 16)] = (int8_t)quant;
    if (lane == 0) {
        ActivationTile::Block scale;
        scale.scale = __fmul_rn(largest, 1.0f / 127.0f);
        scale.sums[0] = (int16_t)both;
        scale.sums[1] = (int16_t)((both - scale.sums[0]) >> 16);
        tile.blocks[block % 8] = scale;
    }
}

// Stores 32 consecutive values of a token, one a lane of a full warp along x, in every form that is wanted. Where
// `columns` is not a multiple of 32 the last block is cut off; its missing values do not matter.
__device__ __forceinline__ void store_activations(const Activations& to, unsigned token, unsigned block, float value) {
    const unsigned column = block * WARP + threadIdx.x % WARP;
    if (to.tiles != nullptr) {
        const unsigned tiles_per_token = (to.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
        quantize_block(value, block, to.tiles + (size_t)token * tiles_per_token);
    }
    if (column < to.columns) {
        const size_t at = (size_t)token * to.columns + column;
        if (to.halves != nullptr) to.halves[at] = to.is_bfloat ? to_bfloat(value) : to_half(value);
        if (to.values != nullptr) to.values[at] = value;
    }
}
