// Attention of a few query tokens a sequence over its whole cache; memory-bound, so every key and value is read once.
// Sources: Flash-Decoding (Dao et al. 2023); FlashAttention-4's rule to rescale only where the maximum grows much.
//
// Inside a segment (decode_work.cuh) each warp takes 16 tokens of a unit through its own ring of copies. Products are
// transposed, S = K x Q' and O' = V' x P', so that the 8 columns of the tensor cores hold the query rows (heads of the
// group times tokens) and the 16 rows hold keys. A segment that is not all of its sequence is written to `partials`; of
// the blocks that share a sequence and head the last to arrive adds up, in the order of the blocks, so results repeat.
// Clusters have their partials in shared memory and all add up a share.
// Launch: any number of blocks of THREADS threads, the same as partials were allocated for, or enough clusters; dynamic
// shared memory.
// -DHEAD_DIM -DBLOCK_SIZE -DBFLOAT as in kv_cache.cuh; -DQUERY_FLOAT=1: queries of f32; -DWARPS; -DSTAGES: copies in a ring;
// -DQUERY_ROWS: query rows of a segment, 8 or 16 or 32; -DFUSED=1: rows are qkv of one new token a sequence, not yet
// rotated: rotates, stores keys and values in the cache and attends, all in one.

#include "decode_sums.cuh"

// Query rows in shared memory, padded against bank conflicts.
constexpr unsigned QUERY_STRIDE = HEAD_DIM + 8;
constexpr unsigned OUTPUT_STRIDE = HEAD_DIM + 4;
// A partial: QUERY_ROWS x HEAD_DIM sums, then maxima and sums of weights of the rows.
constexpr unsigned PARTIAL = QUERY_ROWS * (HEAD_DIM + 2);

constexpr unsigned RING_BYTES = WARPS * STAGES * STAGE * 2;
// Sums of the warps take the place of the rings, and behind them a block's partial for its cluster.
constexpr unsigned WARP_SUMS = WARPS * QUERY_ROWS * OUTPUT_STRIDE;
static_assert((WARP_SUMS + (CLUSTER > 1 ? PARTIAL : 0)) * 4 <= RING_BYTES, "sums fit where the rings were");

struct Shared {
    half_t* rings;  // [WARPS][STAGES][STAGE]; afterwards float [WARPS][QUERY_ROWS][OUTPUT_STRIDE]
    half_t* queries;  // [QUERY_ROWS][QUERY_STRIDE]
    half_t* fresh;  // [2][HEAD_DIM]: key and value of the new token
    float2* rotations;  // [HEAD_DIM / 2]
    uint32_t* tokens;  // [QUERY_ROWS]: row of queries and output that a row of the segment is of
    uint32_t* heads;  // [QUERY_ROWS]: its query head
    float* maxima;  // [WARPS][QUERY_ROWS]
    float* sums;  // [WARPS][QUERY_ROWS]
    uint32_t* prefix;  // [MAX_SEQUENCES + 1]: units times row tiles before each sequence
};

// Says of which token and head each row is, once for all who ask; computes the angles of the new token.
__device__ __forceinline__ void describe_rows(const Call& call, const Segment& segment, const Shared& shared) {
    if (threadIdx.x < QUERY_ROWS) {
        const uint32_t place = segment.row_tile * QUERY_ROWS + threadIdx.x, count = max(segment.heads.count, 1);
        const uint32_t token = min(place / count, segment.num_tokens - 1);
        shared.tokens[threadIdx.x] = segment.first_token + token;
        shared.heads[threadIdx.x] = segment.heads.first + place % count;
    }
    if (FUSED) {
        for (uint32_t pair = threadIdx.x; pair < call.rope.rotary_dim / 2; pair += THREADS) {
            shared.rotations[pair] = rotation(call.rope, segment.num_keys - 1, pair);
        }
    }
}

// Brings the query rows to shared memory; rotates them, and the new key and value, if they are not yet.
__device__ __forceinline__ void load_rows(const Call& call, const Segment& segment, const Shared& shared) {
    constexpr unsigned OWN = QUERY_ROWS * HEAD_DIM / THREADS, FRESH = (2 * HEAD_DIM + THREADS - 1) / THREADS;
    static_assert(QUERY_ROWS * HEAD_DIM % THREADS == 0, "every thread has as many elements");
    constexpr unsigned EACH = OWN + (FUSED ? FRESH : 0);
    const uint32_t rows = num_rows(segment), kept = call.heads.num_heads + segment.key_value_head;
    const bool has_fresh = FUSED && segment.end_unit == segment.num_units &&
                           (segment.num_keys - 1) % UNIT / SHARE == place_in_cluster();
    query_t own[EACH], other[EACH];
    Partner partners[EACH];
    // All loads without a branch or a use between them, so that they are under way together.
#pragma unroll
    for (unsigned turn = 0; turn < EACH; ++turn) {
        const unsigned index = (turn < OWN ? turn : turn - OWN) * THREADS + threadIdx.x;
        const unsigned row = index / HEAD_DIM, element = index % HEAD_DIM;
        const uint32_t side = row == 0 ? kept : kept + call.heads.num_key_value_heads;
        const uint32_t token = shared.tokens[turn < OWN ? row : 0], head = turn < OWN ? shared.heads[row] : side;
        const query_t* from = call.queries + token * call.query_stride + head * HEAD_DIM;
        partners[turn] = {element, 1.0f, 0.0f};
        if (FUSED && (turn < OWN || row == 0)) partners[turn] = partner(call.rope, shared.rotations, element);
        const bool is_there = turn < OWN ? row < rows : has_fresh && row < 2;
        own[turn] = is_there ? from[element] : (query_t)0;
        other[turn] = FUSED && is_there ? from[partners[turn].index] : (query_t)0;
    }
    half_t values[EACH];
#pragma unroll
    for (unsigned turn = 0; turn < EACH; ++turn) {
        const float value = to_float(own[turn]);
        const Partner& by = partners[turn];
        values[turn] = to_element(FUSED ? value * by.cosine + to_float(other[turn]) * by.sine : value);
    }
#pragma unroll
    for (unsigned turn = 0; turn < OWN; ++turn) {
        const unsigned index = turn * THREADS + threadIdx.x;
        shared.queries[index / HEAD_DIM * QUERY_STRIDE + index % HEAD_DIM] = values[turn];
    }
    if (!has_fresh) return;
    const uint32_t position = segment.num_keys - 1;
    half_t* tile = call.layer + tile_offset(segment.table[position / BLOCK_SIZE], segment.key_value_head,
                                            call.heads.num_key_value_heads);
#pragma unroll
    for (unsigned turn = OWN; turn < EACH; ++turn) {
        const unsigned index = (turn - OWN) * THREADS + threadIdx.x, element = index % HEAD_DIM;
        if (index >= 2 * HEAD_DIM) break;
        shared.fresh[index] = values[turn];
        if (segment.row_tile == 0) {
            const unsigned at = chunk_offset<BLOCK_SIZE>(position % BLOCK_SIZE, element / CHUNK) + element % CHUNK;
            tile[(index < HEAD_DIM ? 0 : TILE) + at] = values[turn];
        }
    }
}

// Writes the new token over what was copied of its slot.
__device__ __forceinline__ void place_fresh(const Shared& shared, half_t* stage, uint32_t row) {
    for (unsigned chunk = threadIdx.x % WARP; chunk < 2 * HEAD_CHUNKS; chunk += WARP) {
        const unsigned side = chunk / HEAD_CHUNKS;
        half_t* to = stage + side * (STEP * HEAD_DIM) + chunk_offset<STEP>(row, chunk % HEAD_CHUNKS);
        *(uint4*)to = *(const uint4*)(shared.fresh + chunk * CHUNK);
    }
    __syncwarp();
}

// All steps of the warp.
__device__ __forceinline__ void run(const Call& call, const Segment& segment, const Shared& shared, Feed& feed,
                                    Sums& sums) {
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint32_t queries[COLUMNS][DEPTH][2], limits[COLUMNS][2];
#pragma unroll
    for (unsigned column = 0; column < COLUMNS; ++column) {
#pragma unroll
        for (unsigned depth = 0; depth < DEPTH; ++depth) {
            const half_t* row = shared.queries + (8 * column + lane / 4) * QUERY_STRIDE + 16 * depth + lane % 4 * 2;
            queries[column][depth][0] = *(const uint32_t*)row;
            queries[column][depth][1] = *(const uint32_t*)(row + 8);
        }
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
            const uint32_t token = shared.tokens[8 * column + lane % 4 * 2 + half];
            limits[column][half] = feed.first_position + token - segment.first_token + 1;
        }
    }
    const uint32_t position = segment.num_keys - 1;
    for (uint32_t step = 0; step < feed.num_steps; ++step) {
        await_copies<STAGES - 1>();
        __syncwarp();
        const uint32_t key = feed.first_key + step * UNIT;
        if (FUSED && position - key < STEP) {
            place_fresh(shared, shared.rings + (warp * STAGES + step % STAGES) * STAGE, position - key);
        }
        attend(sums, queries, feed.stage(step), key, limits, key + STEP > feed.first_position, call.scale);
        __syncwarp();
        feed.issue(step + STAGES);
    }
    await_copies<0>();
}

// Stores 32 columns of a head; `columns` of the output need be no multiple of 32 where there are no tiles.
__device__ __forceinline__ void store(const Activations& to, uint32_t token, uint32_t head, unsigned part,
                                      float value) {
    if (HEAD_DIM % WARP == 0) {
        store_activations(to, token, head * (HEAD_DIM / WARP) + part, value);
    } else if (part * WARP + threadIdx.x % WARP < HEAD_DIM) {
        const uint64_t at = (uint64_t)token * to.columns + head * HEAD_DIM + part * WARP + threadIdx.x % WARP;
        if (to.halves != nullptr) to.halves[at] = to.is_bfloat ? to_bfloat(value) : to_half(value);
        if (to.values != nullptr) to.values[at] = value;
    }
}

// Adds `count` partials of a row and stores it. `at(p)` gives partial p.
template <typename Locate>
__device__ __forceinline__ void combine_row(const Call& call, const Shared& shared, uint32_t row, uint32_t count,
                                            Locate at) {
    constexpr unsigned PARTS = (HEAD_DIM + WARP - 1) / WARP, AHEAD = 8;
    const unsigned lane = threadIdx.x % WARP;
    float output[PARTS] = {}, largest = LOWEST, sum = 0.0f;
    for (uint32_t base = 0; base < count; base += WARP) {
        // A lane has the weight of one partial.
        const float* own = at(min(base + lane, count - 1));
        const float maximum = base + lane < count ? __ldcg(own + QUERY_ROWS * HEAD_DIM + row) : LOWEST;
        const float own_sum = base + lane < count ? __ldcg(own + QUERY_ROWS * (HEAD_DIM + 1) + row) : 0.0f;
        const uint32_t here = min(WARP, count - base);
        float values[AHEAD][PARTS], weight = 0.0f;
        for (uint32_t part = 0; part < here; part += AHEAD) {
#pragma unroll
            for (unsigned index = 0; index < AHEAD * PARTS; ++index) {
                const unsigned column = min(index % PARTS * WARP + lane, HEAD_DIM - 1);
                const float* from = at(base + min(part + index / PARTS, here - 1));
                values[index / PARTS][index % PARTS] = __ldcg(from + row * HEAD_DIM + column);
            }
            if (part == 0) {
                float all = fmaxf(largest, maximum);
#pragma unroll
                for (unsigned distance = 16; distance > 0; distance /= 2) {
                    all = fmaxf(all, __shfl_xor_sync(FULL_MASK, all, distance));
                }
                const float factor = exp2_fast(largest - all);
                largest = all;
                weight = base + lane < count ? exp2_fast(maximum - all) : 0.0f;
                sum = sum * factor + weight * own_sum;
#pragma unroll
                for (unsigned index = 0; index < PARTS; ++index) output[index] *= factor;
            }
#pragma unroll
            for (unsigned index = 0; index < AHEAD; ++index) {
                const float known = __shfl_sync(FULL_MASK, weight, min(part + index, WARP - 1));
                const float other = part + index < here ? known : 0.0f;
#pragma unroll
                for (unsigned column = 0; column < PARTS; ++column) output[column] += other * values[index][column];
            }
        }
    }
#pragma unroll
    for (unsigned distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, distance);
    const uint32_t token = shared.tokens[row], head = shared.heads[row];
#pragma unroll
    for (unsigned index = 0; index < PARTS; ++index) {
        store(call.output, token, head, index, __fdividef(output[index], sum));
    }
}

// Adds one for all writes of the block before it, and sees the writes of those that did so before.
__device__ __forceinline__ uint32_t count_arrival(uint32_t* counter) {
    uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Joins the sums of the warps: into the output if the segment is all of its pair, else into a partial.
__device__ __forceinline__ void join_warps(const Call& call, const Segment& segment, const Shared& shared, Sums& sums,
                                           float* partial) {
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float* outputs = (float*)shared.rings;
#pragma unroll
    for (unsigned column = 0; column < COLUMNS; ++column) {
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
            const unsigned row = 8 * column + lane % 4 * 2 + half;
            float sum = sums.sum[column][half];
#pragma unroll
            for (unsigned distance = 4; distance < WARP; distance *= 2) {
                sum += __shfl_xor_sync(FULL_MASK, sum, distance);
            }
            if (lane < 4) {
                shared.maxima[warp * QUERY_ROWS + row] = sums.maximum[column][half];
                shared.sums[warp * QUERY_ROWS + row] = sum;
            }
            float* to = outputs + (warp * QUERY_ROWS + row) * OUTPUT_STRIDE + lane / 4;
#pragma unroll
            for (unsigned depth = 0; depth < DEPTH; ++depth) {
                to[16 * depth] = sums.output[column][depth][half];
                to[16 * depth + 8] = sums.output[column][depth][2 + half];
            }
        }
    }
    __syncthreads();
    const uint32_t rows = num_rows(segment);
    for (uint32_t row = warp; row < rows; row += WARPS) {
        float largest = LOWEST, sum = 0.0f, weights[WARPS];
#pragma unroll
        for (unsigned other = 0; other < WARPS; ++other) {
            largest = fmaxf(largest, shared.maxima[other * QUERY_ROWS + row]);
        }
#pragma unroll
        for (unsigned other = 0; other < WARPS; ++other) {
            weights[other] = exp2_fast(shared.maxima[other * QUERY_ROWS + row] - largest);
            sum += weights[other] * shared.sums[other * QUERY_ROWS + row];
        }
        const uint32_t token = shared.tokens[row], head = shared.heads[row];
#pragma unroll
        for (unsigned part = 0; part < (HEAD_DIM + WARP - 1) / WARP; ++part) {
            const unsigned element = part * WARP + lane;
            float value = 0.0f;
#pragma unroll
            for (unsigned other = 0; other < WARPS; ++other) {
                // Reads of the padding behind a row of 80 are harmless and not stored.
                value +=
                    weights[other] * outputs[(other * QUERY_ROWS + row) * OUTPUT_STRIDE + min(element, HEAD_DIM - 1)];
            }
            if (partial == nullptr) {
                store(call.output, token, head, part, __fdividef(value, sum));
            } else if (element < HEAD_DIM) {
                partial[row * HEAD_DIM + element] = value;
            }
        }
        if (partial != nullptr && lane == 0) {
            partial[QUERY_ROWS * HEAD_DIM + row] = largest;
            partial[QUERY_ROWS * (HEAD_DIM + 1) + row] = sum;
        }
    }
}

// Counts this block among those of the pair; the last one adds up their partials.
__device__ __forceinline__ void combine_blocks(const Call& call, const Segment& segment, const Shared& shared,
                                               uint32_t range) {
    __shared__ bool is_last;
    const uint32_t first = segment.pair_start / range;
    const uint32_t last = (segment.pair_start + segment.num_units - 1) / range;
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = count_arrival(call.counters + first) == last - first;
        if (is_last) call.counters[first] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    const bool starts_range = segment.pair_start % range == 0;
    for (uint32_t row = threadIdx.x / WARP; row < num_rows(segment); row += WARPS) {
        combine_row(call, shared, row, last - first + 1, [&](uint32_t part) {
            // A block's first segment is in its first place, its last one in the second.
            const uint64_t place = 2ull * (first + part) + (part == 0 && !starts_range);
            return call.partials + place * PARTIAL;
        });
    }
}

// Adds up the partials of the cluster's blocks, each of them some rows' parts of 32 columns.
__device__ __forceinline__ void combine_cluster(const Call& call, const Segment& segment, const Shared& shared,
                                                const float* partial) {
    constexpr unsigned PARTS = (HEAD_DIM + WARP - 1) / WARP;
    const unsigned lane = threadIdx.x % WARP, pieces = num_rows(segment) * PARTS;
    wait_for_cluster();
    for (unsigned piece = place_in_cluster() * WARPS + threadIdx.x / WARP; piece < pieces; piece += CLUSTER * WARPS) {
        const unsigned row = piece / PARTS, part = piece % PARTS;
        const float* own = partial + row * HEAD_DIM + min(part * WARP + lane, HEAD_DIM - 1);
        float values[CLUSTER];
#pragma unroll
        for (unsigned other = 0; other < CLUSTER; ++other) values[other] = load_from(own, other);
        // A lane has the weight of one partial.
        const float maximum = load_from(partial + QUERY_ROWS * HEAD_DIM + row, lane % CLUSTER);
        const float own_sum = load_from(partial + QUERY_ROWS * (HEAD_DIM + 1) + row, lane % CLUSTER);
        float largest = maximum;
#pragma unroll
        for (unsigned distance = 1; distance < CLUSTER; distance *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, distance));
        }
        const float weight = exp2_fast(maximum - largest);
        float sum = weight * own_sum, value = 0.0f;
#pragma unroll
        for (unsigned distance = 1; distance < CLUSTER; distance *= 2) sum += __shfl_xor_sync(FULL_MASK, sum, distance);
#pragma unroll
        for (unsigned other = 0; other < CLUSTER; ++other) {
            value += __shfl_sync(FULL_MASK, weight, other) * values[other];
        }
        store(call.output, shared.tokens[row], shared.heads[row], part, __fdividef(value, sum));
    }
    // Nobody leaves while others read what it has.
    wait_for_cluster();
}

// Has under way together what is read one after the other below: until the kernel before leaves room for this one it
// cannot begin, and then this is its longest wait.
__device__ __forceinline__ void warm_up(const Call& call) {
    const Batch& batch = call.batch;
    if (batch.num_sequences > 1) return;
    const uint32_t entry = (place_in_cluster() * SHARE + threadIdx.x / WARP * STEP) / BLOCK_SIZE;
    const uint32_t* words[] = {batch.token_offsets + 1, batch.first_positions, batch.table_offsets,
                               batch.block_tables + min(entry, MIN_TABLE - 1)};
#pragma unroll
    for (const uint32_t* word : words) {
        uint32_t ignored;
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(ignored) : "l"(word));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    attention_decode(const __grid_constant__ Call call) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ __align__(16) half_t queries[QUERY_ROWS * QUERY_STRIDE];
    __shared__ __align__(16) half_t fresh[2 * HEAD_DIM];
    __shared__ float2 rotations[HEAD_DIM / 2];
    __shared__ uint32_t row_tokens[QUERY_ROWS], row_heads[QUERY_ROWS];
    __shared__ float maxima[WARPS * QUERY_ROWS], weight_sums[WARPS * QUERY_ROWS];
    __shared__ uint32_t prefix[MAX_SEQUENCES + 1];
    const Shared shared = {(half_t*)dynamic, queries, fresh, rotations, row_tokens, row_heads,
                           maxima, weight_sums, prefix};
    allow_next();
    warm_up(call);
    const WorkList list = make_list(call, prefix);
    const uint32_t begin = min(list.len, blockIdx.x / CLUSTER * list.range), end = min(list.len, begin + list.range);
    const uint32_t ring = shared_address(dynamic) + threadIdx.x / WARP * (STAGES * STAGE * 2);
    for (uint32_t at = begin; at < end;) {
        const Segment segment = find_segment(call, list, at, end);
        Feed feed(call, segment, ring);
#pragma unroll
        for (unsigned step = 0; step < STAGES; ++step) feed.issue(step);
        describe_rows(call, segment, shared);
        __syncthreads();
        wait_for_previous();
        load_rows(call, segment, shared);
        __syncthreads();
        Sums sums;
        sums.clear();
        run(call, segment, shared, feed, sums);
        __syncthreads();
        const bool is_whole = segment.first_unit == 0 && segment.end_unit == segment.num_units;
        if (CLUSTER > 1) {
            float* partial = (float*)shared.rings + WARP_SUMS;
            join_warps(call, segment, shared, sums, partial);
            combine_cluster(call, segment, shared, partial);
        } else {
            const unsigned place = at == begin ? 0 : 1;
            join_warps(call, segment, shared, sums,
                       is_whole ? nullptr : call.partials + (2ull * blockIdx.x + place) * PARTIAL);
            if (!is_whole) combine_blocks(call, segment, shared, list.range);
        }
        __syncthreads();
        at = segment.next;
    }
    wait_for_previous();
}
