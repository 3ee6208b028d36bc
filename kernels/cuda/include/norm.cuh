// RMS norm of a row that the threads of a block or cluster share, in the forms that the next matmul reads.
// Source: Zhang and Sennrich 2019. For: rms_norm, all_reduce.
// A thread has CHUNKS times four consecutive columns, so that eight lanes share a block of 32 and write pairs.
// -DCHUNKS: 1 to 4. -DCLUSTER: blocks of a row. Blocks are multiples of 32 threads and CLUSTER * CHUNKS * 4 of them
// together cover the row, whose width is a multiple of 4, of 32 if there are tiles.
//
// Invariant: the order of the sum of squares depends on the width and the launch constants alone.

#pragma once

#include "activations.cuh"
#include "cluster.cuh"
#include "reduce.cuh"

constexpr unsigned LANES = 8;  // of a block of 32 columns
constexpr unsigned MAX_CLUSTER_THREADS = 512;  // of each block of a cluster

// The largest of the eight lanes that share a block.
__device__ __forceinline__ float block_max(float value) {
#pragma unroll
    for (unsigned distance = LANES / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(FULL_MASK, value, distance));
    }
    return value;
}

// Quantizes four of the 32 values of block `block` in each of its eight lanes, exactly as `quantize_block` does.
__device__ __forceinline__ void quantize_four(const float (&values)[4], unsigned block, bool is_inside,
                                              ActivationTile* tiles) {
    const unsigned place = threadIdx.x % LANES;
    const float own = fmaxf(fmaxf(fabsf(values[0]), fabsf(values[1])), fmaxf(fabsf(values[2]), fabsf(values[3])));
    const float largest = block_max(own);
    const float inverse = largest > 0.0f ? __fdiv_rn(127.0f, largest) : 0.0f;
    int sum = 0;
    uint16_t pairs[2] = {0, 0};
#pragma unroll
    for (unsigned index = 0; index < 4; ++index) {
        const int quant = __float2int_rn(__fmul_rn(values[index], inverse));
        sum += quant;
        pairs[index / 2] |= (uint16_t)((quant & 255) << 8 * (index % 2));
    }
    // The four lanes of a half.
    sum += __shfl_xor_sync(FULL_MASK, sum, 1);
    sum += __shfl_xor_sync(FULL_MASK, sum, 2);
    const int other = __shfl_xor_sync(FULL_MASK, sum, LANES / 2);
    if (!is_inside) return;
    ActivationTile& tile = tiles[block / 8];
    int8_t* half = tile.quants[place / 4][block % 8];
#pragma unroll
    for (unsigned pair = 0; pair < 2; ++pair) {
        *(uint16_t*)&half[place_in_half(place % 4 * 4 + 2 * pair)] = pairs[pair];
    }
    if (place == 0) {
        ActivationTile::Block scale;
        scale.scale = __fmul_rn(largest, 1.0f / 127.0f);
        scale.sums[0] = (int16_t)sum;
        scale.sums[1] = (int16_t)other;
        tile.blocks[block % 8] = scale;
    }
}

__device__ __forceinline__ void store_four(const Activations& to, unsigned token, unsigned column,
                                           const float (&values)[4]) {
    const bool is_inside = column < to.columns;
    if (to.tiles != nullptr) {
        const unsigned tiles_per_token = (to.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
        quantize_four(values, column / WARP, is_inside, to.tiles + (size_t)token * tiles_per_token);
    }
    if (!is_inside) return;
    const size_t at = (size_t)token * to.columns + column;
    if (to.halves != nullptr) {
        uint32_t words[2];
#pragma unroll
        for (unsigned index = 0; index < 2; ++index) {
            const float low = values[2 * index], high = values[2 * index + 1];
            words[index] = to.is_bfloat ? to_bfloat(low) | (uint32_t)to_bfloat(high) << 16
                                        : to_half(low) | (uint32_t)to_half(high) << 16;
        }
        *(uint2*)(to.halves + at) = make_uint2(words[0], words[1]);
    }
    if (to.values != nullptr) *(float4*)(to.values + at) = make_float4(values[0], values[1], values[2], values[3]);
}

// The first of the four columns of a thread's chunk.
__device__ __forceinline__ uint32_t column_of(unsigned chunk) {
    return 4 * ((chunk * CLUSTER + place_in_cluster()) * blockDim.x + threadIdx.x);
}

// A thread's columns of a row; zeros past its end.
__device__ __forceinline__ void load_row(const float* row, uint32_t width, float4 (&values)[CHUNKS]) {
#pragma unroll
    for (unsigned chunk = 0; chunk < CHUNKS; ++chunk) {
        const uint32_t column = column_of(chunk);
        values[chunk] = column < width ? *(const float4*)(row + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// The sum over all threads of a row, in every thread. The kernel begins with `arrive_at_cluster`.
__device__ __forceinline__ float row_sum(float value) {
    __shared__ float sums[CLUSTER > 1 ? CLUSTER * MAX_CLUSTER_THREADS / WARP : WARP];
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, num_warps = blockDim.x / WARP;
    value = warp_sum(value);
    wait_for_arrivals();
    // To all blocks, in a lane each: a barrier further on the sums are where they are read.
    if (lane < CLUSTER) store_to(&sums[place_in_cluster() * num_warps + warp], lane, value);
    __syncwarp();
    wait_for_cluster();
    value = 0.0f;
    for (unsigned index = lane; index < CLUSTER * num_warps; index += WARP) value += sums[index];
    __syncwarp();
    return warp_sum(value);
}

// output[token] = values / sqrt(mean(values^2) + epsilon) * weights
__device__ __forceinline__ void norm_row(const float4 (&values)[CHUNKS], const float4 (&weights)[CHUNKS], float epsilon,
                                         unsigned token, const Activations& output) {
    float sum = 0.0f;
#pragma unroll
    for (unsigned chunk = 0; chunk < CHUNKS; ++chunk) {
        const float4 four = values[chunk];
        sum += (four.x * four.x + four.y * four.y) + (four.z * four.z + four.w * four.w);
    }
    const float factor = 1.0f / sqrtf(row_sum(sum) / (float)output.columns + epsilon);
#pragma unroll
    for (unsigned chunk = 0; chunk < CHUNKS; ++chunk) {
        const float4 four = values[chunk], scale = weights[chunk];
        const float normed[4] = {four.x * factor * scale.x, four.y * factor * scale.y, four.z * factor * scale.z,
                                 four.w * factor * scale.w};
        store_four(output, token, column_of(chunk), normed);
    }
}
