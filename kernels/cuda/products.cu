// What becomes of products that are in memory: of cuBLAS, and of layers whose halves are not whole groups of rows.
//
// A warp makes 32 columns of a token. Launch constants: PRODUCT (F32, F16), SWIGLU (0, 1).
// Grid: blocks of 8 warps over the columns, tokens.

#include "activations.cuh"
#include "plain.cuh"

// products: [num_tokens, columns], for SwiGLU [num_tokens, 2 * columns], gates first. They become the columns of the
// output from block `first_block` of 32 on.
extern "C" __global__ void __launch_bounds__(256)
    store_products(const PRODUCT::Stored* products, uint32_t columns, uint32_t first_block,
                   const __grid_constant__ Activations output) {
    allow_next();
    wait_for_previous();
    const uint32_t block = blockIdx.x * 8 + threadIdx.x / WARP, column = block * WARP + threadIdx.x % WARP;
    // The same for all lanes of a warp.
    if (block * WARP >= columns) return;
    const PRODUCT::Stored* row = products + (size_t)blockIdx.y * (1 + SWIGLU) * columns;
    float value = column < columns ? PRODUCT::load(row + column) : 0.0f;
    if (SWIGLU && column < columns) value = value / (1.0f + __expf(-value)) * PRODUCT::load(row + columns + column);
    store_activations(output, blockIdx.y, first_block + block, value);
}
