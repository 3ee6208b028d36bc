// Copies the rows whose logits are wanted: output[i] = input[rows[i]].
// Launch: [columns of blocks, number of rows] blocks of any number of threads.

#include "launch.cuh"

// input: [num_tokens, width]; rows: [number of rows], checked by the host; output: [number of rows, width]
extern "C" __global__ void gather_rows(const float* __restrict__ input, const uint32_t* __restrict__ rows,
                                       uint32_t width, float* __restrict__ output) {
    allow_next();
    wait_for_previous();
    const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column < width) {
        output[(uint64_t)blockIdx.y * width + column] = input[(uint64_t)rows[blockIdx.y] * width + column];
    }
}
