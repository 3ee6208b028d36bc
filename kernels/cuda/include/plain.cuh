// Elements that are not quantized: how they are stored, and eight of them at a time.

#pragma once

#include "launch.cuh"

struct F32 {
    using Stored = float;
    static __device__ __forceinline__ float load(const float* from) { return *from; }
    static __device__ __forceinline__ void load8(const float* from, float (&values)[8]) {
        const float4 first = ((const float4*)from)[0], second = ((const float4*)from)[1];
        values[0] = first.x, values[1] = first.y, values[2] = first.z, values[3] = first.w;
        values[4] = second.x, values[5] = second.y, values[6] = second.z, values[7] = second.w;
    }
};

template <class Half>
struct SixteenBits {
    using Stored = uint16_t;
    static __device__ __forceinline__ float load(const uint16_t* from) { return Half::to_float(*from); }
    static __device__ __forceinline__ void load8(const uint16_t* from, float (&values)[8]) {
        const uint4 words = *(const uint4*)from;
        const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
        for (unsigned pair = 0; pair < 4; ++pair) {
            values[2 * pair] = Half::to_float((uint16_t)pairs[pair]);
            values[2 * pair + 1] = Half::to_float((uint16_t)(pairs[pair] >> 16));
        }
    }
};

struct F16 : SixteenBits<F16> {
    static __device__ __forceinline__ float to_float(uint16_t bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};

struct BF16 : SixteenBits<BF16> {
    static __device__ __forceinline__ float to_float(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }
};
