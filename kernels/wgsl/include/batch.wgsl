// What the products with many tokens share: their parameters and bindings. Needs nothing; brings `weights`.

struct Params { num_outputs: u32, num_blocks: u32, num_tokens: u32, width: u32, first_output: u32 }
#include params

#include weights
@group(0) @binding(4) var<storage, read> quants: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> scales: array<vec2<u32>>;
@group(0) @binding(6) var<storage, read_write> output: array<f32>;

// Of a block: factors of the quants of its halves, and what is added to each product.
fn block_factors(block: WeightBlock) -> vec4<f32> {
    let factors = block.d * vec2<f32>(block.scale);
    var addends = -f32(OFFSET) * factors;
    if (SCALES == HALF_MIN || SCALES == BYTES || SCALES == NIBBLES) { addends += block.m * vec2<f32>(block.min); }
    return vec4<f32>(factors, addends);
}

fn gated(gate: f32, up: f32) -> f32 {
    return gate / (1.0 + exp(-gate)) * up;
}

// Where an output lies; of one past the end, where the last does.
fn output_at(token: u32, row: u32) -> u32 {
    return min(token, params.num_tokens - 1u) * params.width + params.first_output + min(row, params.num_outputs - 1u);
}

fn store_output(token: u32, row: u32, value: f32) {
    if (token < params.num_tokens && row < params.num_outputs) { output[output_at(token, row)] = value; }
}
