// Weights of 16 or 32 bits times up to TOKENS tokens of f32.
//
// As `matvec.wgsl`; a row is padded to whole vectors of 16 bytes. Options: DTYPE (0 f16, 1 bf16, 2 f32), THREADS, ROWS,
// TOKENS, ADD, SWIGLU.

struct Params { num_outputs: u32, columns: u32, num_tokens: u32, width: u32, first_output: u32 }
#include params

@group(0) @binding(0) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> input: array<f32>;
@group(0) @binding(2) var<storage, read_write> output: array<f32>;
#include kv_cache

const ALL_ROWS = ROWS * (1u + SWIGLU);
const SUMS = ALL_ROWS * TOKENS;
var<workgroup> partial: array<f32, SUMS * THREADS>;

// Two values of a word, or one with f32.
fn widen(word: u32) -> vec2<f32> {
    switch (DTYPE) {
        case 0u: { return unpack2x16float(word); }
        case 1u: { return unpack_bf16(word); }
        default: { return vec2<f32>(bitcast<f32>(word), 0.0); }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    // Values of a word and of a vector.
    let step = select(2u, 1u, DTYPE == 2u);
    let size = 4u * step;
    let num_vectors = (params.columns + size - 1u) / size;
    let first_row = (group.x + group.y * groups.x) * ROWS;
    let first_token = group.z * TOKENS;
    var sums: array<f32, SUMS>;
    for (var i = 0u; i < SUMS; i++) { sums[i] = 0.0; }
    for (var at = thread; at < num_vectors; at += THREADS) {
        for (var row = 0u; row < ALL_ROWS; row++) {
            let output_row = min(first_row + row % ROWS, params.num_outputs - 1u);
            let words = weights[(output_row + row / ROWS * params.num_outputs) * num_vectors + at];
            for (var token = 0u; token < TOKENS; token++) {
                let start = min(first_token + token, params.num_tokens - 1u) * params.columns;
                var sum = 0.0;
                for (var i = 0u; i < 4u; i++) {
                    let pair = widen(words[i]);
                    let column = at * size + i * step;
                    let first = pair.x * input[start + min(column, params.columns - 1u)];
                    sum += select(0.0, first, column < params.columns);
                    if (DTYPE != 2u) {
                        let second = pair.y * input[start + min(column + 1u, params.columns - 1u)];
                        sum += select(0.0, second, column + 1u < params.columns);
                    }
                }
                sums[row * TOKENS + token] += sum;
            }
        }
    }
    for (var i = 0u; i < SUMS; i++) { partial[thread * SUMS + i] = sums[i]; }
    workgroupBarrier();
    for (var distance = THREADS / 2u; distance > 0u; distance /= 2u) {
        if (thread < distance) {
            for (var i = 0u; i < SUMS; i++) { partial[thread * SUMS + i] += partial[(thread + distance) * SUMS + i]; }
        }
        workgroupBarrier();
    }
    for (var index = thread; index < ROWS * TOKENS; index += THREADS) {
        let row = first_row + index / TOKENS;
        let token = first_token + index % TOKENS;
        if (row >= params.num_outputs || token >= params.num_tokens) { continue; }
        var result = partial[index];
#if SWIGLU
        result = result / (1.0 + exp(-result)) * partial[ROWS * TOKENS + index];
#endif
        let target_index = token * params.width + params.first_output + row;
#if ADD
        result += output[target_index];
#endif
        output[target_index] = result;
    }
}
