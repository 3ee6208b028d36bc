// Makes the forms that a matmul reads of f32 rows whose producer did not.
// Launch: [blocks of 32 columns / warps of a block, num_tokens] blocks of whole warps.

#include "activations.cuh"

// input: [num_tokens, output.columns]
extern "C" __global__ void convert(const float* __restrict__ input, const __grid_constant__ Activations output) {
    allow_next();
    wait_for_previous();
    const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x;
    // The same for all lanes of a warp.
    if (column / WARP * WARP < output.columns) {
        const uint64_t row = (uint64_t)blockIdx.y * output.columns;
        const float value = column < output.columns ? input[row + column] : 0.0f;
        store_activations(output, blockIdx.y, column / WARP, value);
    }
}
