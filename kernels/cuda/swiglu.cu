// SwiGLU of products that are in memory: of layers whose halves are not whole groups of rows.
//
// A warp makes 32 columns of a token. Grid: blocks of 8 warps over the columns, tokens.

#include "activations.cuh"

extern "C" __global__ void __launch_bounds__(256)
    swiglu(const float* products, const __grid_constant__ Activations output) {
    allow_next();
    wait_for_previous();
    const uint32_t block = blockIdx.x * 8 + threadIdx.x / WARP, column = block * WARP + threadIdx.x % WARP;
    if (block * WARP >= output.columns) return;
    const float* gates = products + (size_t)blockIdx.y * 2 * output.columns;
    float value = 0.0f;
    if (column < output.columns) {
        const float gate = gates[column];
        value = gate / (1.0f + __expf(-gate)) * gates[output.columns + column];
    }
    store_activations(output, blockIdx.y, block, value);
}
