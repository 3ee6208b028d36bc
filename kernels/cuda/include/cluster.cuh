// Blocks of a cluster, which read each other's shared memory. -DCLUSTER: blocks of it; 1: none, on any GPU.

#pragma once

#include "launch.cuh"

#if __CUDA_ARCH__ < 900
// No clusters: code for them compiles, and is not launched.
#undef CLUSTER
#define CLUSTER 1
#endif

#if CLUSTER > 1
// The two halves of a barrier of the cluster; what a block wrote before it arrives is seen by those that waited.
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_arrivals() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

__device__ __forceinline__ void wait_for_cluster() {
    arrive_at_cluster();
    wait_for_arrivals();
}

// A block's place in its cluster.
__device__ __forceinline__ unsigned place_in_cluster() { return blockIdx.x % CLUSTER; }

// A float at the same place in the shared memory of another block of the cluster.
__device__ __forceinline__ float load_from(const float* own, unsigned rank) {
    float value;
    asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there];}"
                 : "=f"(value) : "r"((uint32_t)__cvta_generic_to_shared(own)), "r"(rank));
    return value;
}

// Writes to the same place in the shared memory of another block, which must have begun: see `arrive_at_cluster`.
__device__ __forceinline__ void store_to(float* own, unsigned rank, float value) {
    asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2;}"
                 :: "r"((uint32_t)__cvta_generic_to_shared(own)), "r"(rank), "f"(value) : "memory");
}
#else
__device__ __forceinline__ void arrive_at_cluster() {}
__device__ __forceinline__ void wait_for_arrivals() {}
__device__ __forceinline__ void wait_for_cluster() { __syncthreads(); }
__device__ __forceinline__ unsigned place_in_cluster() { return 0; }
__device__ __forceinline__ float load_from(const float* own, unsigned) { return *own; }
__device__ __forceinline__ void store_to(float* own, unsigned, float value) { *own = value; }
#endif
