// The device side of sampling: from rows of logits to their sums and best candidates. Contract: `ops/sample.rs`.
//
// Rows without penalties: `sample_reduce` (both stages in one), `sample_top` if more than the best one is wanted.
// With penalties: reduce and top before them, `sample_penalize`, reduce and top after them.
// A logit that is NaN counts as minus infinity, -0 as 0; both are cleaned wherever logits are read.

#include "gumbel.cuh"
#include "ordered.cuh"
#include "reduce.cuh"

constexpr unsigned SLICE_TOKENS = 2048;  // of the vocabulary, one block of `sample_reduce`
constexpr unsigned REDUCE_THREADS = 256;
constexpr unsigned TOP_THREADS = 1024;
constexpr unsigned MAX_TOP = 2048;  // candidates that `sample_top` can sort

constexpr uint32_t RAW = 1;     // before penalties, at temperature 1
constexpr uint32_t SCALED = 2;  // after penalties, at the row's temperature, with noise

// How one row is to be reduced.
struct Row {
    float inverse_temperature;
    uint32_t has_noise;
    uint32_t seed_low, seed_high;
    uint32_t top_k, raw_top_k;
    uint32_t first_penalty, num_penalties;
};

struct Penalty {
    uint32_t token_id;
    float repetition, subtract;
};

// What a row comes to.
struct Result {
    float scaled_log_sum_exp, raw_log_sum_exp;
    float best;
    uint32_t best_index;
    uint32_t drawn_index;  // meaningful if some logit is above minus infinity
    float drawn_value, drawn_raw;
    uint32_t padding;
};

// What a slice of a row comes to.
struct Partial {
    float maximum, raw_sum, scaled_sum, padding;
    uint64_t best, drawn;
};

struct SampleCall {
    float* logits;  // [num_rows, width]
    const Row* rows;
    const Penalty* penalties;
    float* before;  // logits before their penalties, [number of penalties]
    Partial* partials;  // [num_rows, slices]
    uint32_t* counters;  // [num_rows], zeros, and zeros again afterwards
    Result* results;  // [num_rows]
    uint32_t width, first_token;
};

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < __int_as_float(0x7f800000); }

// Sums of a row from those of its slices, by one warp-multiple block. Thread 0 stores them.
__device__ void finish_row(const SampleCall& call, uint32_t row_index, uint32_t num_slices, uint32_t stages) {
    __shared__ uint64_t keys[2][WARP];
    __shared__ float floats[WARP];
    const Row row = call.rows[row_index];
    const volatile Partial* partials = call.partials + (uint64_t)row_index * num_slices;
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    uint64_t best = 0, drawn = 0;
    for (uint32_t slice = threadIdx.x; slice < num_slices; slice += blockDim.x) {
        best = max_key(best, partials[slice].best);
        drawn = max_key(drawn, partials[slice].drawn);
    }
    best = warp_max_key(best);
    drawn = warp_max_key(drawn);
    if (lane == 0) {
        keys[0][warp] = best;
        keys[1][warp] = drawn;
    }
    __syncthreads();
    const bool is_warp = lane < blockDim.x / WARP;
    best = warp_max_key(is_warp ? keys[0][lane] : 0);
    drawn = warp_max_key(is_warp ? keys[1][lane] : 0);
    const float maximum = value_of((uint32_t)(best >> 32));
    float raw_sum = 0.0f, scaled_sum = 0.0f;
    for (uint32_t slice = threadIdx.x; slice < num_slices; slice += blockDim.x) {
        const float below = partials[slice].maximum - maximum;
        if (is_finite(below)) {
            raw_sum += partials[slice].raw_sum * expf(below);
            scaled_sum += partials[slice].scaled_sum * expf(below * row.inverse_temperature);
        }
    }
    raw_sum = block_sum(raw_sum, floats);
    __syncthreads();
    scaled_sum = block_sum(scaled_sum, floats);
    const uint32_t drawn_index = index_of(drawn);
    Result& result = call.results[row_index];
    if (threadIdx.x == 0) {
        const bool is_regular = is_finite(maximum);
        if (stages & RAW) {
            result.raw_log_sum_exp = is_regular ? (float)((double)maximum + log((double)raw_sum)) : maximum;
        }
        if (stages & SCALED) {
            const double scaled = (double)maximum * row.inverse_temperature + log((double)scaled_sum);
            result.scaled_log_sum_exp = is_regular ? (float)scaled : maximum;
            result.best = maximum;
            result.best_index = index_of(best);
            if (row.has_noise && drawn != 0) {
                result.drawn_index = drawn_index;
                result.drawn_value = value_of((uint32_t)(drawn >> 32));
                result.drawn_raw = clean(call.logits[(uint64_t)row_index * call.width + drawn_index]);
            }
        }
    }
    __syncthreads();
    if ((stages & SCALED) && row.has_noise && drawn != 0) {
        for (uint32_t index = threadIdx.x; index < row.num_penalties; index += blockDim.x) {
            if (call.penalties[row.first_penalty + index].token_id - call.first_token == drawn_index) {
                result.drawn_raw = call.before[row.first_penalty + index];
            }
        }
    }
}

// Launch: [slices, num_rows] blocks of REDUCE_THREADS threads.
extern "C" __global__ void sample_reduce(SampleCall call, uint32_t stages) {
    __shared__ uint64_t keys[2][WARP];
    __shared__ float floats[WARP];
    __shared__ bool is_last;
    constexpr unsigned PER_THREAD = SLICE_TOKENS / REDUCE_THREADS;
    constexpr unsigned NUM_WARPS = REDUCE_THREADS / WARP;
    allow_next();
    wait_for_previous();
    const Row row = call.rows[blockIdx.y];
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const float* logits = call.logits + (uint64_t)blockIdx.y * call.width;
    const uint32_t first = blockIdx.x * SLICE_TOKENS + threadIdx.x;
    const bool draws = (stages & SCALED) && row.has_noise;
    float values[PER_THREAD];
    uint64_t best = 0, drawn = 0;
#pragma unroll
    for (unsigned step = 0; step < PER_THREAD; ++step) {
        const uint32_t index = first + step * REDUCE_THREADS;
        values[step] = index < call.width ? clean(logits[index]) : -__int_as_float(0x7f800000);
        if (index < call.width) {
            best = max_key(best, candidate_key(values[step], index));
            if (draws && values[step] > -__int_as_float(0x7f800000)) {
                const float noise = gumbel(hash(row.seed_low, row.seed_high, call.first_token + index));
                const float value = multiply_add(values[step], row.inverse_temperature, noise);
                drawn = max_key(drawn, candidate_key(value + 0.0f, index));
            }
        }
    }
    best = warp_max_key(best);
    drawn = warp_max_key(drawn);
    if (lane == 0) {
        keys[0][warp] = best;
        keys[1][warp] = drawn;
    }
    __syncthreads();
    best = warp_max_key(lane < NUM_WARPS ? keys[0][lane] : 0);
    drawn = warp_max_key(lane < NUM_WARPS ? keys[1][lane] : 0);
    const float maximum = value_of((uint32_t)(best >> 32));
    float raw_sum = 0.0f, scaled_sum = 0.0f;
    if (is_finite(maximum)) {
#pragma unroll
        for (unsigned step = 0; step < PER_THREAD; ++step) {
            const float below = values[step] - maximum;
            raw_sum += expf(below);
            scaled_sum += expf(below * row.inverse_temperature);
        }
    }
    raw_sum = block_sum(raw_sum, floats);
    __syncthreads();
    scaled_sum = block_sum(scaled_sum, floats);
    if (threadIdx.x == 0) {
        Partial& partial = call.partials[(uint64_t)blockIdx.y * gridDim.x + blockIdx.x];
        partial.maximum = maximum;
        partial.raw_sum = raw_sum;
        partial.scaled_sum = scaled_sum;
        partial.best = best;
        partial.drawn = drawn;
        __threadfence();
        // The counter is 0 again after the last block.
        is_last = atomicInc(&call.counters[blockIdx.y], gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (is_last) {
        finish_row(call, blockIdx.y, gridDim.x, stages);
    }
}

// Changes the logits of penalized tokens and keeps what they were. Launch: [num_rows] blocks.
extern "C" __global__ void sample_penalize(SampleCall call) {
    allow_next();
    wait_for_previous();
    const Row row = call.rows[blockIdx.x];
    float* logits = call.logits + (uint64_t)blockIdx.x * call.width;
    for (uint32_t place = threadIdx.x; place < row.num_penalties; place += blockDim.x) {
        const Penalty penalty = call.penalties[row.first_penalty + place];
        const uint32_t index = penalty.token_id - call.first_token;
        if (penalty.token_id >= call.first_token && index < call.width) {
            const float logit = clean(logits[index]);
            call.before[row.first_penalty + place] = logit;
            const float scaled =
                logit > 0.0f ? __fdiv_rn(logit, penalty.repetition) : __fmul_rn(logit, penalty.repetition);
            logits[index] = clean(__fsub_rn(scaled, penalty.subtract));
        }
    }
}

// Adds the number of threads before this one whose `flag` is set to `base`; returns it and advances `base` for all.
__device__ unsigned block_rank(bool flag, unsigned* base, unsigned* warp_counts) {
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, num_warps = blockDim.x / WARP;
    const unsigned ballot = __ballot_sync(FULL_MASK, flag);
    if (lane == 0) {
        warp_counts[warp] = __popc(ballot);
    }
    __syncthreads();
    unsigned before = 0, total = 0;
    for (unsigned other = 0; other < num_warps; ++other) {
        const unsigned count = warp_counts[other];
        before += other < warp ? count : 0;
        total += count;
    }
    const unsigned rank = *base + before + __popc(ballot & ((1u << lane) - 1));
    __syncthreads();
    if (threadIdx.x == 0) {
        *base += total;
    }
    __syncthreads();
    return rank;
}

// The best `top_k` (or `raw_top_k`) candidates of each row, best first, as keys, `[num_rows, stride]`.
// Launch: [num_rows] blocks of TOP_THREADS threads. Rows that want none are left alone.
extern "C" __global__ void __launch_bounds__(TOP_THREADS)
    sample_top(SampleCall call, uint32_t stages, uint32_t stride, uint64_t* candidates) {
    __shared__ uint64_t found[MAX_TOP];
    __shared__ unsigned histogram[256];
    __shared__ unsigned warp_counts[WARP];
    __shared__ unsigned chosen, remaining, num_found, num_equal;
    allow_next();
    wait_for_previous();
    const Row row = call.rows[blockIdx.x];
    const float* logits = call.logits + (uint64_t)blockIdx.x * call.width;
    const unsigned wanted = min(min(stages & RAW ? row.raw_top_k : row.top_k, call.width), MAX_TOP);
    if (wanted == 0) {
        return;
    }
    // Radix select: the ordered bits of the worst candidate that counts, eight at a time.
    uint32_t threshold = 0;
    if (threadIdx.x == 0) {
        remaining = wanted;
        num_found = 0;
        num_equal = 0;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) {
            histogram[threadIdx.x] = 0;
        }
        __syncthreads();
        for (uint32_t index = threadIdx.x; index < call.width; index += TOP_THREADS) {
            const uint32_t bits = ordered_bits(clean(logits[index]));
            if (shift == 24 || bits >> (shift + 8) == threshold >> (shift + 8)) {
                atomicAdd(&histogram[bits >> shift & 255], 1);
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned digit = 255, left = remaining;
            while (histogram[digit] < left) {
                left -= histogram[digit];
                --digit;
            }
            chosen = digit;
            remaining = left;
        }
        __syncthreads();
        threshold |= chosen << shift;
    }
    // All that are better, and of the equal ones those with the smallest ids: `remaining` of them.
    for (uint32_t start = 0; start < call.width; start += TOP_THREADS) {
        const uint32_t index = start + threadIdx.x;
        const uint32_t bits = index < call.width ? ordered_bits(clean(logits[index])) : 0;
        if (index < call.width && bits > threshold) {
            found[atomicAdd(&num_found, 1)] = (uint64_t)bits << 32 | (uint32_t)~index;
        }
        const bool is_equal = index < call.width && bits == threshold;
        if (__syncthreads_or(is_equal && num_equal < remaining)) {
            const unsigned rank = block_rank(is_equal, &num_equal, warp_counts);
            if (is_equal && rank < remaining) {
                found[wanted - remaining + rank] = (uint64_t)bits << 32 | (uint32_t)~index;
            }
        }
    }
    unsigned size = 1;
    while (size < wanted) {
        size *= 2;
    }
    __syncthreads();
    for (unsigned place = wanted + threadIdx.x; place < size; place += TOP_THREADS) {
        found[place] = 0;
    }
    __syncthreads();
    // Bitonic sort, descending.
    for (unsigned run = 2; run <= size; run *= 2) {
        for (unsigned distance = run / 2; distance > 0; distance /= 2) {
            for (unsigned place = threadIdx.x; place < size; place += TOP_THREADS) {
                const unsigned other = place ^ distance;
                if (other < place) continue;  // its partner's to swap
                const uint64_t one = found[place], two = found[other];
                if ((one < two) == ((place & run) == 0)) {
                    found[place] = two;
                    found[other] = one;
                }
            }
            __syncthreads();
        }
    }
    for (unsigned place = threadIdx.x; place < wanted; place += TOP_THREADS) {
        candidates[(uint64_t)blockIdx.x * stride + place] = found[place];
    }
}
