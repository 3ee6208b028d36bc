// Weights of 16 or 32 bits times one to eight tokens.
//
// A block makes `SETS * ROWS_EACH` rows: each of its warps `ROWS_EACH` rows over every `SPLITS`-th piece of the columns,
// summed over the warps in shared memory. `STAGES` pieces of the weights are under way in registers, the first ones before
// the wait for the kernel that makes the activations. For SwiGLU the first half of the sets are gates, the second half ups, and a block makes 32 outputs.
//
// Launch constants: WEIGHT and INPUT (F32, F16, BF16), VECTOR (elements of 16 bytes of weights if `columns` is a multiple
// of them, else 1), ROWS_EACH, SETS, SPLITS, STAGES, TOKENS, EPILOGUE. Grid: one block a unit.

#include "layer.cuh"
#include "plain.cuh"

constexpr unsigned NUM_WARPS = SETS * SPLITS, THREADS = NUM_WARPS * WARP, ROWS = SETS * ROWS_EACH;
constexpr unsigned STEP = VECTOR * WARP * SPLITS;
constexpr Epilogue KIND = Epilogue::EPILOGUE;
static_assert(KIND == Epilogue::SwiGlu || ROWS * TOKENS <= THREADS, "a thread finishes one output");

// What a thread reads at once of a row, as stored and as floats.
template <class Type, unsigned SIZE>
struct Vector {
    using Raw = typename Type::Eight;
    static __device__ __forceinline__ Raw load(const typename Type::Stored* from) { return Type::load8(from); }
    static __device__ __forceinline__ Raw stream(const typename Type::Stored* from) { return Type::stream8(from); }
    static __device__ __forceinline__ void convert(const Raw& raw, float (&values)[SIZE]) { Type::convert(raw, values); }
};

template <class Type>
struct Vector<Type, 1> {
    using Raw = float;
    static __device__ __forceinline__ Raw load(const typename Type::Stored* from) { return Type::load(from); }
    static __device__ __forceinline__ Raw stream(const typename Type::Stored* from) { return Type::load(from); }
    static __device__ __forceinline__ void convert(float raw, float (&values)[1]) { values[0] = raw; }
};

template <>
struct Vector<F32, 4> {
    using Raw = float4;
    static __device__ __forceinline__ Raw load(const float* from) { return *(const float4*)from; }
    static __device__ __forceinline__ Raw stream(const float* from) { return F32::stream4(from); }
    static __device__ __forceinline__ void convert(const Raw& raw, float (&values)[4]) {
        values[0] = raw.x, values[1] = raw.y, values[2] = raw.z, values[3] = raw.w;
    }
};

using Weights = Vector<WEIGHT, VECTOR>;
using Inputs = Vector<INPUT, VECTOR>;

extern "C" __global__ void __launch_bounds__(THREADS)
    matvec_plain(const __grid_constant__ Layer layer, const INPUT::Stored* input, uint32_t columns,
                 const __grid_constant__ Activations output, uint32_t num_tokens) {
    __shared__ float partial[SPLITS][TOKENS][ROWS];
    allow_next();
    const unsigned warp = threadIdx.x / WARP, set = warp / SPLITS, lane = threadIdx.x % WARP;
    const bool is_up = KIND == Epilogue::SwiGlu && set >= SETS / 2;
    const uint32_t index = KIND == Epilogue::SwiGlu ? (is_up ? 1 : 0) : part_of(layer, blockIdx.x);
    const Part& part = layer.parts[index];
    const uint32_t unit = KIND == Epilogue::SwiGlu ? blockIdx.x : blockIdx.x - part.first_unit;
    constexpr unsigned UNIT_ROWS = KIND == Epilogue::SwiGlu ? ROWS / 2 : ROWS;
    const uint32_t first_row = unit * UNIT_ROWS + (is_up ? set - SETS / 2 : set) * ROWS_EACH;
    const WEIGHT::Stored* rows[ROWS_EACH];
#pragma unroll
    for (unsigned row = 0; row < ROWS_EACH; ++row) {
        rows[row] = (const WEIGHT::Stored*)part.tiles + (size_t)min(first_row + row, part.rows - 1) * columns;
    }
    const uint32_t first_column = (warp % SPLITS * WARP + lane) * VECTOR;
    typename Weights::Raw pending[STAGES][ROWS_EACH];
    const auto fetch = [&](uint32_t column, unsigned stage) {
        if (column >= columns) return;
#pragma unroll
        for (unsigned row = 0; row < ROWS_EACH; ++row) pending[stage][row] = Weights::stream(rows[row] + column);
    };
#pragma unroll
    for (unsigned stage = 0; stage < STAGES; ++stage) fetch(first_column + stage * STEP, stage);
    Single<KIND, ROWS, THREADS> own(part, unit * UNIT_ROWS, num_tokens, output);
    wait_for_previous();
    own.load();
    float sums[ROWS_EACH][TOKENS] = {};
#pragma unroll 1
    for (uint32_t start = first_column; start < columns; start += STAGES * STEP) {
#pragma unroll
        for (unsigned stage = 0; stage < STAGES; ++stage) {
            const uint32_t column = start + stage * STEP;
            if (column >= columns) break;
            // The next weights are asked for before these are there: then twice as many are under way.
            typename Weights::Raw loaded[ROWS_EACH];
#pragma unroll
            for (unsigned row = 0; row < ROWS_EACH; ++row) loaded[row] = pending[stage][row];
            fetch(column + STAGES * STEP, stage);
#pragma unroll
            for (unsigned token = 0; token < TOKENS; ++token) {
                if (token > 0 && token >= num_tokens) break;
                float values[VECTOR];
                Inputs::convert(Inputs::load(input + (size_t)token * columns + column), values);
#pragma unroll
                for (unsigned row = 0; row < ROWS_EACH; ++row) {
                    float weights[VECTOR];
                    Weights::convert(loaded[row], weights);
#pragma unroll
                    for (unsigned i = 0; i < VECTOR; ++i) {
                        sums[row][token] = fmaf(weights[i], values[i], sums[row][token]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (unsigned row = 0; row < ROWS_EACH; ++row) {
#pragma unroll
        for (unsigned token = 0; token < TOKENS; ++token) {
            float sum = sums[row][token];
            for (unsigned distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, distance);
            if (lane == 0) partial[warp % SPLITS][token][set * ROWS_EACH + row] = sum;
        }
    }
    __syncthreads();
    const auto product = [&](unsigned row, unsigned token) {
        float sum = 0.0f;
        for (unsigned split = 0; split < SPLITS; ++split) sum += partial[split][token][row];
        return sum;
    };
    own.finish(product);
}
