// Gumbel noise of a token, from its id and the seed alone: the same hash and the same arithmetic as the host's
// (`cpu/sample/noise.rs`), operation by operation, so every device draws the same tokens.

#pragma once

#include "launch.cuh"

__device__ __forceinline__ uint32_t mix(uint32_t bits) {
    bits = (bits ^ bits >> 16) * 0x85ebca6bu;
    bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
    return bits ^ bits >> 16;
}

__device__ __forceinline__ uint32_t hash(uint32_t seed_low, uint32_t seed_high, uint32_t token_id) {
    const uint32_t mixed = mix(token_id * 0x9e3779b9u ^ seed_low);
    return mix((mixed + 0x85ebca6bu) ^ seed_high);
}

// a * b + c, rounded twice as the host does.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return __fadd_rn(__fmul_rn(a, b), c); }

// Natural logarithm of a positive normal number. Source: Cephes `logf` (Moshier).
__device__ __forceinline__ float natural_log(float x) {
    const uint32_t shifted = __float_as_uint(x) - 0x3f3504f3u;
    const float exponent = (float)((int32_t)shifted >> 23);
    const float m = __fsub_rn(__uint_as_float((shifted & 0x007fffffu) + 0x3f3504f3u), 1.0f);
    float sum = 7.0376836e-2f;
    sum = multiply_add(sum, m, -1.151461e-1f);
    sum = multiply_add(sum, m, 1.1676999e-1f);
    sum = multiply_add(sum, m, -1.2420141e-1f);
    sum = multiply_add(sum, m, 1.4249323e-1f);
    sum = multiply_add(sum, m, -1.6668058e-1f);
    sum = multiply_add(sum, m, 2.0000715e-1f);
    sum = multiply_add(sum, m, -2.4999994e-1f);
    sum = multiply_add(sum, m, 3.333333e-1f);
    const float square = __fmul_rn(m, m);
    const float tail = __fsub_rn(__fmul_rn(__fmul_rn(m, square), sum), __fmul_rn(0.5f, square));
    return __fadd_rn(__fadd_rn(m, tail), __fmul_rn(exponent, 0.69314718055994530942f));
}

// -ln(-ln(1 - w)) of the uniform w = (bits + 1/2) / 2^32.
__device__ __forceinline__ float gumbel(uint32_t bits) {
    const float w = __fmul_rn(__fadd_rn((float)bits, 0.5f), 1.0f / 4294967296.0f);
    const float inner = multiply_add(w, 1.0f / 3.0f, 0.5f);
    const float small = __fmul_rn(w, multiply_add(w, inner, 1.0f));
    const float large = -natural_log(fmaxf(__fsub_rn(1.0f, w), 1.0f / 8589934592.0f));
    return -natural_log(w < 1.0f / 1024.0f ? small : large);
}
