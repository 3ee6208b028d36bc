// RMS norm: output[t] = input[t] / sqrt(mean(input[t]^2) + epsilon) * weight, one block a token.
// Source: Zhang and Sennrich 2019.
// Launch: [num_tokens] blocks of a multiple of 32 threads, at most 1024.

#include "reduce.cuh"

// input, output: [num_tokens, width]; weight: [width]
extern "C" __global__ void rms_norm(const float* __restrict__ input, const float* __restrict__ weight, float epsilon,
                                    uint32_t width, float* __restrict__ output) {
    __shared__ float sums[WARP];
    allow_next();
    wait_for_previous();
    const float* row = input + (uint64_t)blockIdx.x * width;
    float* target = output + (uint64_t)blockIdx.x * width;
    float sum = 0.0f;
    for (uint32_t column = threadIdx.x; column < width; column += blockDim.x) {
        sum += row[column] * row[column];
    }
    const float factor = 1.0f / sqrtf(block_sum(sum, sums) / (float)width + epsilon);
    for (uint32_t column = threadIdx.x; column < width; column += blockDim.x) {
        target[column] = row[column] * factor * weight[column];
    }
}
