// Blocks of a cluster, which read each other's shared memory. -DCLUSTER: blocks of it; 1: none, on any GPU.

#pragma once

#include "launch.cuh"

#if CLUSTER > 1
__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// A float at the same place in the shared memory of another block of the cluster.
__device__ __forceinline__ float load_from(const float* own, unsigned rank) {
    float value;
    asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there];}"
                 : "=f"(value) : "r"((uint32_t)__cvta_generic_to_shared(own)), "r"(rank));
    return value;
}
#else
__device__ __forceinline__ void wait_for_cluster() { __syncthreads(); }
__device__ __forceinline__ float load_from(const float* own, unsigned) { return *own; }
#endif
