// 16-bit floats on tensor cores: conversions, matrix fragments, m16n8k16 products that add in f32, and the asynchronous
// copies that feed them.
// -DBFLOAT=1: bf16, else f16.

#pragma once

#include "activations.cuh"

typedef uint16_t half_t;

#define NEGATIVE_INFINITY __uint_as_float(0xff800000u)

__device__ __forceinline__ half_t to_element(float value) {
    return BFLOAT ? to_bfloat(value) : to_half(value);
}

__device__ __forceinline__ float to_float(half_t value) {
    float result;
    if (BFLOAT) return __uint_as_float((uint32_t)value << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
    return result;
}

__device__ __forceinline__ float to_float(float value) {
    return value;
}

// Two values side by side, `low` at the lower address. No clamping: for what is known to be in range.
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t both;
    if (BFLOAT) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    }
    return both;
}

__device__ __forceinline__ float exp2_fast(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

// c += a * b: a 16 x 16 (rows), b 16 x 8 (columns), c 16 x 8.
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (BFLOAT) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Four 8 x 8 matrices; lane 8 i + r names row r of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
    uint32_t result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
}

// Copies 16 bytes to shared memory without waiting; writes zeros where `is_valid` is false.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool is_valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `PENDING` of the newest groups are under way.
template <int PENDING>
__device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
