// RMS norm: output[t] = input[t] / sqrt(mean(input[t]^2) + epsilon) * weight, one cluster a token, in the forms that the
// next matmul reads.
// -DCHUNKS, -DCLUSTER: see norm.cuh.
// Launch: [num_tokens * CLUSTER] blocks.

#include "norm.cuh"

// input: [num_tokens, output.columns]; weight: [output.columns]
extern "C" __global__ void __launch_bounds__(CLUSTER > 1 ? MAX_CLUSTER_THREADS : 1024)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    rms_norm(const float* __restrict__ input, const float* __restrict__ weight, float epsilon,
             const __grid_constant__ Activations output) {
    allow_next();
    arrive_at_cluster();
    const uint32_t width = output.columns, token = blockIdx.x / CLUSTER;
    float4 weights[CHUNKS], values[CHUNKS];
    load_row(weight, width, weights);
    wait_for_previous();
    load_row(input + (uint64_t)token * width, width, values);
    norm_row(values, weights, epsilon, token, output);
}
