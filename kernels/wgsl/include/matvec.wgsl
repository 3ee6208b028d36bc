// What the products of quantized weights with few tokens share: parameters, bindings, and the loop over the columns. Brings
// `weights` and `activations`.
//
// Options: those of the weights; ROWS (outputs at a time), TOKENS, SWIGLU (an output is of two rows, a gate and an up), ADD (to
// what the output holds).

struct Params { num_outputs: u32, num_blocks: u32, num_tokens: u32, width: u32, first_output: u32 }
#include params

#include weights
@group(0) @binding(4) var<storage, read> quants: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> scales: array<vec2<u32>>;
@group(0) @binding(6) var<storage, read_write> output: array<f32>;
#include activations

// Rows that are multiplied: with SWIGLU gates, then ups.
const ALL_ROWS = ROWS * (1u + SWIGLU);
const SUMS = ALL_ROWS * TOKENS;

// Products of blocks `first_block`, `first_block + step` and so on of the columns, summed: of each row, of each token.
fn share_of_products(first_row: u32, first_token: u32, first_block: u32, step: u32) -> array<f32, SUMS> {
    var sums: array<f32, SUMS>;
    for (var i = 0u; i < SUMS; i++) { sums[i] = 0.0; }
    for (var block = first_block; block < params.num_blocks; block += step) {
        var weights: array<WeightBlock, ALL_ROWS>;
        for (var row = 0u; row < ALL_ROWS; row++) {
            // Rows past the end are computed and not stored.
            let output_row = min(first_row + row % ROWS, params.num_outputs - 1u);
            weights[row] = load_block((output_row + row / ROWS * params.num_outputs) * params.num_blocks + block);
        }
        for (var token = 0u; token < TOKENS; token++) {
            let at = min(first_token + token, params.num_tokens - 1u) * params.num_blocks + block;
            let first = quants[2u * at];
            let second = quants[2u * at + 1u];
            let scale = scales[at];
            let half_sums = unpack_sums(scale.y);
            for (var row = 0u; row < ALL_ROWS; row++) {
                sums[row * TOKENS + token] += product(weights[row], first, second, bitcast<f32>(scale.x), half_sums);
            }
        }
    }
    return sums;
}

fn gated(gate: f32, up: f32) -> f32 {
    return gate / (1.0 + exp(-gate)) * up;
}
