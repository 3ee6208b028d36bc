// Numbers that order as (value, then smaller index first) do, so that a maximum over keys finds the best candidate.

#pragma once

#include "launch.cuh"

// A value that is no NaN and not -0.
__device__ __forceinline__ float clean(float logit) {
    return logit != logit ? -__int_as_float(0x7f800000) : logit + 0.0f;
}

__device__ __forceinline__ uint32_t ordered_bits(float value) {
    const uint32_t bits = __float_as_uint(value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t ordered) {
    return __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

__device__ __forceinline__ uint64_t candidate_key(float value, uint32_t index) {
    return (uint64_t)ordered_bits(value) << 32 | (uint32_t)~index;
}

__device__ __forceinline__ uint32_t index_of(uint64_t key) { return ~(uint32_t)key; }

__device__ __forceinline__ uint64_t max_key(uint64_t one, uint64_t other) { return one > other ? one : other; }

__device__ __forceinline__ uint64_t warp_max_key(uint64_t key) {
#pragma unroll
    for (unsigned distance = WARP / 2; distance > 0; distance /= 2) {
        key = max_key(key, __shfl_xor_sync(FULL_MASK, key, distance));
    }
    return key;
}
