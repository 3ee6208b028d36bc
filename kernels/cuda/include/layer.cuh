// A linear layer as the kernels get it, and what becomes of its products.
//
// Invariant: the order in which a product's terms are added depends on the layer and the launch's shape alone.

#pragma once

#include "activations.cuh"
#include "weights.cuh"

constexpr unsigned MAX_PARTS = 4;

// Rows of one format; those past `rows` up to a whole group are zeros.
struct Part {
    const uint8_t* tiles;
    uint32_t rows;
    uint32_t first_row;  // in the output
    uint32_t first_unit;  // of the blocks' work
    uint32_t format;  // index in FORMATS
};

// The stacked parts. For SwiGLU there are two of equal height, gate and up.
struct Layer {
    Part parts[MAX_PARTS];
    uint32_t num_parts;
    uint32_t num_tiles;  // of a row
};

// What becomes of the products; the host's `Target` has the same order.
enum class Epilogue { Store, Add, SwiGlu };

__device__ __forceinline__ const uint8_t* group_tiles(const Part& part, uint32_t group, uint32_t num_tiles, unsigned tile_bytes) {
    const uint32_t last = (part.rows + GROUP_ROWS - 1) / GROUP_ROWS - 1;
    return part.tiles + (size_t)min(group, last) * num_tiles * tile_bytes;
}

// The part that does a unit of work.
__device__ __forceinline__ uint32_t part_of(const Layer& layer, uint32_t unit) {
    uint32_t index = 0;
    while (index + 1 < layer.num_parts && unit >= layer.parts[index + 1].first_unit) ++index;
    return index;
}

// Calls `work<F>(args...)` with the format of that index in the list.
template <template <class> class Work, class First, class... Rest, class... Args>
__device__ __forceinline__ void with_format(uint32_t index, Args&&... args) {
    if constexpr (sizeof...(Rest) == 0) {
        Work<First>::run(args...);
    } else if (index == 0) {
        Work<First>::run(args...);
    } else {
        with_format<Work, Rest...>(index - 1, args...);
    }
}

__device__ __forceinline__ float swiglu(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

// The output of a thread, where a block has at least as many threads as outputs: thread `token * ROWS + row` has row
// `first_row + row` of the part. What it adds to is read long before it is needed. Of SwiGLU, where the first half of the
// `ROWS` rows are gates and the second half their ups, a warp has the 32 outputs of a token.
template <Epilogue EPILOGUE, unsigned ROWS, unsigned THREADS>
struct Single {
    static constexpr bool IS_SWIGLU = EPILOGUE == Epilogue::SwiGlu;
    static_assert(!IS_SWIGLU || ROWS == 2 * WARP, "a block makes 32 outputs of SwiGLU");

    const Activations& output;
    size_t place;
    unsigned row, token, first_row;
    uint32_t num_tokens;
    float before;
    bool is_wanted;

    __device__ __forceinline__ Single(const Part& part, uint32_t first_row, uint32_t num_tokens,
                                      const Activations& output)
        : output(output), row(threadIdx.x % ROWS), token(threadIdx.x / ROWS), first_row(first_row),
          num_tokens(num_tokens), before(0.0f) {
        is_wanted = !IS_SWIGLU && token < num_tokens && first_row + row < part.rows;
        place = (size_t)token * output.columns + part.first_row + first_row + row;
    }

    __device__ __forceinline__ void load() {
        if (EPILOGUE == Epilogue::Add && is_wanted) before = output.values[place];
    }

    // `product(row, token)` as for `finish`.
    template <class Product>
    __device__ __forceinline__ void finish(const Product& product) const {
        if constexpr (IS_SWIGLU) {
            const unsigned lane = threadIdx.x % WARP;
            for (unsigned token = threadIdx.x / WARP; token < num_tokens; token += THREADS / WARP) {
                store_activations(output, token, first_row / WARP, swiglu(product(lane, token), product(WARP + lane, token)));
            }
            return;
        }
        if (!is_wanted) return;
        const float value = before + product(row, token);
        if (output.values != nullptr) output.values[place] = value;
        if (EPILOGUE == Epilogue::Store && output.halves != nullptr) {
            output.halves[place] = output.is_bfloat ? to_bfloat(value) : to_half(value);
        }
    }
};

// Hands on the products of a block. `product(row, token)` is one of its `ROWS` rows and `num_tokens` tokens (from
// `first_token` on), of which it takes every `SHARERS`-th from `share` on. For SwiGLU the first half of the rows are
// gates, the second half their ups; else they are rows from `row` on of `part`.
template <Epilogue EPILOGUE, unsigned ROWS, unsigned THREADS, unsigned SHARERS, class Product>
__device__ __forceinline__ void finish(const Part& part, uint32_t row, uint32_t first_token, uint32_t num_tokens,
                                       const Activations& output, const Product& product, unsigned share) {
    // Several outputs at a time, so that their loads are under way together.
    constexpr unsigned TOGETHER = 4;
    if constexpr (EPILOGUE == Epilogue::SwiGlu) {
        constexpr unsigned HALF = ROWS / 2, BLOCKS = HALF / WARP, STEP = THREADS / WARP;
        const unsigned lane = threadIdx.x % WARP;
        const auto token_of = [&](unsigned piece) { return piece / BLOCKS * SHARERS + share; };
        for (unsigned first = threadIdx.x / WARP; token_of(first) < num_tokens; first += STEP * TOGETHER) {
            float gates[TOGETHER], ups[TOGETHER];
#pragma unroll
            for (unsigned i = 0; i < TOGETHER; ++i) {
                const unsigned piece = first + i * STEP, at = piece % BLOCKS * WARP + lane;
                if (token_of(piece) >= num_tokens) break;
                gates[i] = product(at, token_of(piece));
                ups[i] = product(HALF + at, token_of(piece));
            }
#pragma unroll
            for (unsigned i = 0; i < TOGETHER; ++i) {
                const unsigned piece = first + i * STEP, token = token_of(piece), block = piece % BLOCKS;
                if (token >= num_tokens) break;
                if (row + block * WARP >= output.columns) continue;
                // Rows past the end are products with zeros.
                store_activations(output, first_token + token, row / WARP + block, swiglu(gates[i], ups[i]));
            }
        }
    } else {
        const auto token_of = [&](unsigned index) { return index / ROWS * SHARERS + share; };
        for (unsigned first = threadIdx.x; token_of(first) < num_tokens; first += THREADS * TOGETHER) {
            float values[TOGETHER];
            size_t places[TOGETHER];
            bool is_wanted[TOGETHER];
#pragma unroll
            for (unsigned i = 0; i < TOGETHER; ++i) {
                const unsigned index = first + i * THREADS, token = token_of(index), offset = index % ROWS;
                is_wanted[i] = token < num_tokens && row + offset < part.rows;
                places[i] = (size_t)(first_token + token) * output.columns + part.first_row + row + offset;
                values[i] = EPILOGUE == Epilogue::Add && is_wanted[i] ? output.values[places[i]] : 0.0f;
            }
#pragma unroll
            for (unsigned i = 0; i < TOGETHER; ++i) {
                const unsigned index = first + i * THREADS;
                if (is_wanted[i]) values[i] += product(index % ROWS, token_of(index));
            }
#pragma unroll
            for (unsigned i = 0; i < TOGETHER; ++i) {
                if (!is_wanted[i]) continue;
                if (output.values != nullptr) output.values[places[i]] = values[i];
                if (EPILOGUE == Epilogue::Store && output.halves != nullptr) {
                    output.halves[places[i]] = output.is_bfloat ? to_bfloat(values[i]) : to_half(values[i]);
                }
            }
        }
    }
}
