// Rotary embedding and KV store: rotates the queries and the keys of each token, and writes keys and values to the
// slots of the paged cache. One block takes HEADS heads of a token through shared memory, so queries may be rotated
// in place.
// Source: RoFormer (Su et al. 2021).
// Launch: [num_tokens, ceil(all heads / HEADS)] blocks of THREADS threads.
// -DHEAD_DIM, -DBLOCK_SIZE, -DBFLOAT: of the cache; -DQKV_FLOAT=1: rows of f32, else of the cache's type;
// -DQUERY_FLOAT=1: rotated queries likewise.

#include "kv_cache.cuh"
#include "rope.cuh"

#if QKV_FLOAT
typedef float qkv_t;
#else
typedef half_t qkv_t;
#endif

constexpr unsigned HEADS = 8;
constexpr unsigned THREADS = 128;

// Eight values of 16 or 32 bytes, aligned as they are.
__device__ __forceinline__ void load_chunk(const float* from, float* to) {
    *(float4*)to = *(const float4*)from;
    *(float4*)(to + 4) = *(const float4*)(from + 4);
}

__device__ __forceinline__ void load_chunk(const half_t* from, float* to) {
    const uint4 packed = *(const uint4*)from;
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (unsigned word = 0; word < 4; ++word) {
        to[2 * word] = to_float((half_t)words[word]);
        to[2 * word + 1] = to_float((half_t)(words[word] >> 16));
    }
}

__device__ __forceinline__ void store_chunk(const float (&values)[CHUNK], float* to) {
    *(float4*)to = make_float4(values[0], values[1], values[2], values[3]);
    *(float4*)(to + 4) = make_float4(values[4], values[5], values[6], values[7]);
}

__device__ __forceinline__ void store_chunk(const float (&values)[CHUNK], half_t* to) {
    uint32_t words[4];
#pragma unroll
    for (unsigned word = 0; word < 4; ++word) {
        words[word] = to_element(values[2 * word]) | (uint32_t)to_element(values[2 * word + 1]) << 16;
    }
    *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
}

// qkv: [num_tokens, (num_heads + 2 num_key_value_heads) * HEAD_DIM]; queries: rows of `query_stride` elements, may be
// qkv itself; positions, slot_mapping: [num_tokens]; layer: of the cache.
extern "C" __global__ __launch_bounds__(THREADS) void rope_and_store(
    const qkv_t* qkv, Rope rope, const uint32_t* __restrict__ positions, const uint32_t* __restrict__ slot_mapping,
    uint32_t num_heads, uint32_t num_key_value_heads,
#if QUERY_FLOAT
    float* queries,
#else
    half_t* queries,
#endif
    uint32_t query_stride, half_t* layer) {
    __shared__ __align__(16) float heads[HEADS][HEAD_DIM];
    __shared__ float2 rotations[HEAD_DIM / 2];
    allow_next();
    const uint32_t token = blockIdx.x, first_head = blockIdx.y * HEADS;
    const uint32_t all_heads = num_heads + 2 * num_key_value_heads;
    const uint32_t here = min(HEADS, all_heads - first_head);
    const uint32_t position = positions[token], slot = slot_mapping[token];
    for (uint32_t pair = threadIdx.x; pair < rope.rotary_dim / 2; pair += THREADS) {
        rotations[pair] = rotation(rope, position, pair);
    }
    wait_for_previous();
    const qkv_t* row = qkv + ((uint64_t)token * all_heads + first_head) * HEAD_DIM;
    for (uint32_t index = threadIdx.x; index < here * HEAD_CHUNKS; index += THREADS) {
        load_chunk(row + index * CHUNK, &heads[0][0] + index * CHUNK);
    }
    __syncthreads();
    for (uint32_t index = threadIdx.x; index < here * HEAD_CHUNKS; index += THREADS) {
        const uint32_t local = index / HEAD_CHUNKS, chunk = index % HEAD_CHUNKS, head = first_head + local;
        const bool is_value = head >= num_heads + num_key_value_heads;
        float values[CHUNK];
#pragma unroll
        for (unsigned element = 0; element < CHUNK; ++element) {
            const unsigned at = chunk * CHUNK + element;
            values[element] = heads[local][at];
            if (!is_value) {
                const Partner other = partner(rope, rotations, at);
                values[element] = values[element] * other.cosine + heads[local][other.index] * other.sine;
            }
        }
        if (head < num_heads) {
            store_chunk(values, queries + (uint64_t)token * query_stride + head * HEAD_DIM + chunk * CHUNK);
        } else {
            const uint32_t stored = head - num_heads - (is_value ? num_key_value_heads : 0);
            half_t* tile = layer + tile_offset(slot / BLOCK_SIZE, stored, num_key_value_heads) + (is_value ? TILE : 0);
            store_chunk(values, tile + chunk_offset<BLOCK_SIZE>(slot % BLOCK_SIZE, chunk));
        }
    }
}
