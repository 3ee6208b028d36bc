// RMS norm: output[t] = input[t] / sqrt(mean(input[t]^2) + epsilon) * weight, one block a token, in the forms that the
// next matmul reads. Source: Zhang and Sennrich 2019.
// A thread has CHUNKS times four consecutive columns, so that eight lanes share a block of 32 and write pairs.
// -DCHUNKS: 1 to 4.
// Launch: [num_tokens] blocks of a multiple of 32 threads, at least width / (4 CHUNKS) of them; width a multiple of 4.

#include "activations.cuh"
#include "reduce.cuh"

constexpr unsigned LANES = 8;  // of a block of 32 columns

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

// input: [num_tokens, width]; weight: [width]; width: a multiple of 4, of 32 if there are tiles
extern "C" __global__ void __launch_bounds__(1024)
    rms_norm(const float* __restrict__ input, const float* __restrict__ weight, float epsilon, uint32_t width,
             const __grid_constant__ Activations output) {
    __shared__ float sums[WARP];
    allow_next();
    const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 weights[CHUNKS], values[CHUNKS];
#pragma unroll
    for (unsigned chunk = 0; chunk < CHUNKS; ++chunk) {
        const uint32_t column = 4 * (chunk * blockDim.x + threadIdx.x);
        weights[chunk] = column < width ? *(const float4*)(weight + column) : zeros;
    }
    wait_for_previous();
    const float* row = input + (uint64_t)blockIdx.x * width;
    float sum = 0.0f;
#pragma unroll
    for (unsigned chunk = 0; chunk < CHUNKS; ++chunk) {
        const uint32_t column = 4 * (chunk * blockDim.x + threadIdx.x);
        const float4 four = column < width ? *(const float4*)(row + column) : zeros;
        values[chunk] = four;
        sum += (four.x * four.x + four.y * four.y) + (four.z * four.z + four.w * four.w);
    }
    const float factor = 1.0f / sqrtf(block_sum(sum, sums) / (float)width + epsilon);
#pragma unroll
    for (unsigned chunk = 0; chunk < CHUNKS; ++chunk) {
        const float4 four = values[chunk], scale = weights[chunk];
        const float normed[4] = {four.x * factor * scale.x, four.y * factor * scale.y, four.z * factor * scale.z,
                                 four.w * factor * scale.w};
        store_four(output, blockIdx.x, 4 * (chunk * blockDim.x + threadIdx.x), normed);
    }
}
