// RMS norm: output[t] = input[t] / sqrt(mean(input[t]^2) + epsilon) * weight, one block a token, in the forms that the
// next matmul reads. Source: Zhang and Sennrich 2019.
// Launch: [num_tokens] blocks of a multiple of 32 threads, at least width / PER_THREAD of them.

#include "activations.cuh"
#include "reduce.cuh"

constexpr unsigned PER_THREAD = 16;

// input: [num_tokens, width]; weight: [width]
extern "C" __global__ void __launch_bounds__(1024)
    rms_norm(const float* __restrict__ input, const float* __restrict__ weight, float epsilon, uint32_t width,
             Activations output) {
    __shared__ float sums[WARP];
    allow_next();
    float weights[PER_THREAD], values[PER_THREAD];
#pragma unroll
    for (unsigned step = 0; step < PER_THREAD; ++step) {
        const uint32_t column = step * blockDim.x + threadIdx.x;
        weights[step] = column < width ? weight[column] : 0.0f;
    }
    wait_for_previous();
    const float* row = input + (uint64_t)blockIdx.x * width;
    float sum = 0.0f;
#pragma unroll
    for (unsigned step = 0; step < PER_THREAD; ++step) {
        const uint32_t column = step * blockDim.x + threadIdx.x;
        values[step] = column < width ? row[column] : 0.0f;
        sum += values[step] * values[step];
    }
    const float factor = 1.0f / sqrtf(block_sum(sum, sums) / (float)width + epsilon);
#pragma unroll
    for (unsigned step = 0; step < PER_THREAD; ++step) {
        const uint32_t column = step * blockDim.x + threadIdx.x;
        // The same for all lanes of a warp.
        if (column / WARP * WARP < width) {
            store_activations(output, blockIdx.x, column / WARP, values[step] * factor * weights[step]);
        }
    }
}
