// Sums over the GPUs of a host for small messages, by the one-shot exchange of one_shot.cuh: alone, and with the RMS
// norm that follows it in every layer, so that a layer has as many launches as on one GPU.
// -DWORLD_SIZE: ranks. -DCHUNKS, -DCLUSTER: see norm.cuh.

#include "norm.cuh"
#include "one_shot.cuh"

// Four values from `index` on, of which those below `len` are there.
__device__ __forceinline__ float4 load_within(const float* values, uint32_t index, uint32_t len) {
    if (index + 4 <= len) return *(const float4*)(values + index);
    const auto at = [&](uint32_t place) { return place < len ? values[place] : 0.0f; };
    return make_float4(at(index), at(index + 1), at(index + 2), at(index + 3));
}

__device__ __forceinline__ void store_within(float* values, uint32_t index, uint32_t len, float4 four) {
    if (index + 4 <= len) {
        *(float4*)(values + index) = four;
    } else {
        const float single[4] = {four.x, four.y, four.z, four.w};
        for (uint32_t place = index; place < len; ++place) values[place] = single[place - index];
    }
}

// values = the sum of `values` over the ranks, [len].
// Launch: enough threads for four values each, at most MAX_BLOCKS blocks.
extern "C" __global__ void __launch_bounds__(256)
    all_reduce(float* values, uint32_t len, const __grid_constant__ Ranks ranks) {
    allow_next();
    const uint32_t chunk = blockIdx.x * blockDim.x + threadIdx.x, index = 4 * chunk;
    const bool is_inside = index < len;
    wait_for_previous();
    OneShot exchange(ranks);
    const float4 own = load_within(values, index, is_inside ? len : 0);
    if (is_inside) exchange.send(chunk, own);
    exchange.keep_epoch();
    if (is_inside) store_within(values, index, len, exchange.receive_sum(chunk, own));
}

// hidden = the sum of `hidden` over the ranks, [num_tokens, output.columns]; output = the RMS norm of hidden.
// Launch: a cluster a token, at most MAX_BLOCKS blocks.
extern "C" __global__ void __launch_bounds__(CLUSTER > 1 ? MAX_CLUSTER_THREADS : 1024)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    all_reduce_norm(float* hidden, const float* __restrict__ weight, float epsilon,
                    const __grid_constant__ Activations output, const __grid_constant__ Ranks ranks) {
    allow_next();
    arrive_at_cluster();
    const uint32_t width = output.columns, token = blockIdx.x / CLUSTER;
    float* row = hidden + (size_t)token * width;
    const auto chunk_at = [&](uint32_t column) { return (token * width + column) / 4; };
    float4 weights[CHUNKS], values[CHUNKS];
    load_row(weight, width, weights);
    wait_for_previous();
    OneShot exchange(ranks);
    load_row(row, width, values);
#pragma unroll
    for (unsigned chunk = 0; chunk < CHUNKS; ++chunk) {
        const uint32_t column = column_of(chunk);
        if (column < width) exchange.send(chunk_at(column), values[chunk]);
    }
    exchange.keep_epoch();
#pragma unroll
    for (unsigned chunk = 0; chunk < CHUNKS; ++chunk) {
        const uint32_t column = column_of(chunk);
        if (column >= width) continue;
        values[chunk] = exchange.receive_sum(chunk_at(column), values[chunk]);
        *(float4*)(row + column) = values[chunk];
    }
    norm_row(values, weights, epsilon, token, output);
}
