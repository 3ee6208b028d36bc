// Elements that are not quantized: how they are stored, and eight of them at a time.

#pragma once

#include "weights.cuh"

struct F32 {
    using Stored = float;
    // Eight elements as stored.
    struct Eight {
        float4 first, second;
    };
    static __device__ __forceinline__ float load(const float* from) { return *from; }
    static __device__ __forceinline__ Eight load8(const float* from) {
        return {((const float4*)from)[0], ((const float4*)from)[1]};
    }
    // Four of what is read once in a launch: neighbouring lanes read neighbouring bytes.
    static __device__ __forceinline__ float4 stream4(const float* from) {
        const uint4 words = FromGlobal::load16((const uint8_t*)from);
        return make_float4(__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                           __uint_as_float(words.w));
    }
    static __device__ __forceinline__ void convert(const Eight& eight, float (&values)[8]) {
        values[0] = eight.first.x, values[1] = eight.first.y, values[2] = eight.first.z, values[3] = eight.first.w;
        values[4] = eight.second.x, values[5] = eight.second.y, values[6] = eight.second.z, values[7] = eight.second.w;
    }
};

template <class Half>
struct SixteenBits {
    using Stored = uint16_t;
    using Eight = uint4;
    static __device__ __forceinline__ float load(const uint16_t* from) { return Half::to_float(*from); }
    static __device__ __forceinline__ Eight load8(const uint16_t* from) { return *(const uint4*)from; }
    // Of what is read once in a launch.
    static __device__ __forceinline__ Eight stream8(const uint16_t* from) {
        return FromGlobal::load16((const uint8_t*)from);
    }
    static __device__ __forceinline__ void convert(const Eight& eight, float (&values)[8]) {
        const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (unsigned pair = 0; pair < 4; ++pair) {
            values[2 * pair] = Half::low(pairs[pair]);
            values[2 * pair + 1] = Half::high(pairs[pair]);
        }
    }
};

struct F16 : SixteenBits<F16> {
    static __device__ __forceinline__ float to_float(uint16_t bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    static __device__ __forceinline__ float low(uint32_t pair) { return to_float((uint16_t)pair); }
    static __device__ __forceinline__ float high(uint32_t pair) { return to_float((uint16_t)(pair >> 16)); }
};

struct BF16 : SixteenBits<BF16> {
    static __device__ __forceinline__ float to_float(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }
    static __device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
    static __device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
};
