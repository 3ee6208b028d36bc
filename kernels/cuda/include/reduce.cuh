// Sums and maxima over the threads of a warp or of a block, in an order that the number of threads alone decides.

#pragma once

#include "launch.cuh"

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (unsigned distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(FULL_MASK, value, distance);
    }
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (unsigned distance = WARP / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(FULL_MASK, value, distance));
    }
    return value;
}

// The sum over all threads of a block, in every thread. `shared` has 32 elements and may be used again after a barrier.
__device__ __forceinline__ float block_sum(float value, float* shared) {
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, num_warps = blockDim.x / WARP;
    value = warp_sum(value);
    if (lane == 0) {
        shared[warp] = value;
    }
    __syncthreads();
    return warp_sum(lane < num_warps ? shared[lane] : 0.0f);
}
