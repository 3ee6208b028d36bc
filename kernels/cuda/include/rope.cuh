// Rotary embedding, element by element.

#pragma once

#include "half_mma.cuh"

// What a launch knows of the rotation.
struct Rope {
    const float* frequencies;  // [rotary_dim / 2] radians per position
    float magnitude;
    uint32_t rotary_dim;
    uint32_t is_interleaved;  // pairs 2i, 2i + 1; else i, i + rotary_dim / 2
};

// Cosine and sine at `position`, times the magnitude. The angle is reduced in f64: in f32 a position of 100,000
// would be off by 0.004 radians.
__device__ __forceinline__ float2 rotation(const Rope& rope, uint32_t position, uint32_t pair) {
    const double turns = (double)position * (double)rope.frequencies[pair] * 0.15915494309189535;
    const float angle = (float)(turns - rint(turns)) * 6.2831853071795865f;
    float sine, cosine;
    asm("sin.approx.f32 %0, %1;" : "=f"(sine) : "f"(angle));
    asm("cos.approx.f32 %0, %1;" : "=f"(cosine) : "f"(angle));
    return make_float2(cosine * rope.magnitude, sine * rope.magnitude);
}

// What makes up an element of a rotated head: own * cosine + other * sine, `other` being element `index`.
struct Partner {
    uint32_t index;
    float cosine, sine;
};

// Of an element; `rotations` holds those of all pairs. Elements behind the rotated ones stay as they are.
__device__ __forceinline__ Partner partner(const Rope& rope, const float2* rotations, uint32_t element) {
    if (element >= rope.rotary_dim) return {element, 1.0f, 0.0f};
    const uint32_t half = rope.rotary_dim / 2;
    const bool is_second = rope.is_interleaved ? element % 2 : element >= half;
    const uint32_t pair = rope.is_interleaved ? element / 2 : is_second ? element - half : element;
    const uint32_t distance = rope.is_interleaved ? 1 : half;
    const float2 turn = rotations[pair];
    return {is_second ? element - distance : element + distance, turn.x, is_second ? turn.y : -turn.y};
}
