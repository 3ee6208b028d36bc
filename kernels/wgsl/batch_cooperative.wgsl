// Quantized weights times many tokens, by tensor cores: f16 products, summed in f32.
//
// A workgroup of eight subgroups of 32 threads makes 128 rows of 128 tokens. Each thread unpacks one block of weights and
// one of the 8-bit activations to f16 in workgroup memory, 64 columns at a time; the next ones are asked for before these are
// multiplied. A subgroup makes 64 rows of 32 tokens: four by two tiles of 16 x 16. With SWIGLU the first two of its tiles of
// rows are gates, the others their ups.
//
// Options: those of the weights; ADD, SWIGLU; F16 and COOPERATIVE (directives), both 1.

struct Params { num_outputs: u32, num_blocks: u32, num_tokens: u32, width: u32, first_output: u32 }
#include params

#include weights
@group(0) @binding(4) var<storage, read> quants: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> scales: array<vec2<u32>>;
@group(0) @binding(6) var<storage, read_write> output: array<f32>;

const TILE = 128u;
const OUTPUTS = TILE / (1u + SWIGLU);
// Groups of four columns of a row in workgroup memory: 64 columns, and eight between rows so that banks differ.
const STRIDE = 18u;

var<workgroup> weights: array<vec4<f16>, TILE * STRIDE>;
var<workgroup> inputs: array<vec4<f16>, TILE * STRIDE>;
// A tile of results of each subgroup.
var<workgroup> results: array<f32, 8u * 256u>;

// The row of the part that is row `index` of the tile.
fn weight_row(group: u32, index: u32) -> u32 {
#if SWIGLU
    let place = index / 64u * 32u + index % 32u;
    let is_up = index / 32u % 2u;
    return min(group * OUTPUTS + place, params.num_outputs - 1u) + is_up * params.num_outputs;
#else
    return min(group * OUTPUTS + index, params.num_outputs - 1u);
#endif
}

fn unpack(word: u32, factor: f32, addend: f32) -> vec4<f16> {
    return vec4<f16>(vec4<f32>(unpack4xI8(word)) * factor + addend);
}

// Row `thread / 2` of a tile, block `thread % 2` of its 64 columns.
fn write_weights(thread: u32, block: WeightBlock, is_there: bool) {
    let at = thread / 2u * STRIDE + thread % 2u * 8u;
    let d = select(0.0, block.d, is_there);
    let m = select(0.0, block.m, is_there);
    let factors = d * vec2<f32>(block.scale);
    var addends = -f32(OFFSET) * factors;
    if (SCALES == HALF_MIN || SCALES == BYTES || SCALES == NIBBLES) { addends += m * vec2<f32>(block.min); }
    for (var i = 0u; i < 4u; i++) {
        weights[at + i] = unpack(block.first[i], factors.x, addends.x);
        weights[at + 4u + i] = unpack(block.second[i], factors.y, addends.y);
    }
}

fn write_input(thread: u32, first: vec4<u32>, second: vec4<u32>, scale: f32) {
    let at = thread / 2u * STRIDE + thread % 2u * 8u;
    for (var i = 0u; i < 4u; i++) {
        inputs[at + i] = unpack(first[i], scale, 0.0);
        inputs[at + 4u + i] = unpack(second[i], scale, 0.0);
    }
}

// A subgroup's tile of results: row `i % 16` of token `i / 16`.
fn store_results(subgroup: u32, lane: u32, first_row: u32, first_token: u32) {
    for (var i = lane; i < 256u; i += 32u) {
        let row = first_row + i % 16u;
        let token = first_token + i / 16u;
        if (row < params.num_outputs && token < params.num_tokens) {
            let at = token * params.width + params.first_output + row;
            var result = results[subgroup * 256u + i];
#if ADD
            result += output[at];
#endif
            output[at] = result;
        }
    }
}

// The same of a tile of ups, with the gates that were taken before.
fn store_gated(subgroup: u32, lane: u32, gates: array<f32, 8>, first_row: u32, first_token: u32) {
    var taken = gates;
    for (var j = 0u; j < 8u; j++) {
        let i = lane + 32u * j;
        let row = first_row + i % 16u;
        let token = first_token + i / 16u;
        if (row < params.num_outputs && token < params.num_tokens) {
            let gate = taken[j];
            output[token * params.width + params.first_output + row] =
                gate / (1.0 + exp(-gate)) * results[subgroup * 256u + i];
        }
    }
}

fn take_results(subgroup: u32, lane: u32) -> array<f32, 8> {
    var taken: array<f32, 8>;
    for (var j = 0u; j < 8u; j++) { taken[j] = results[subgroup * 256u + lane + 32u * j]; }
    return taken;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32,
        @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32) {
    let row_start = weight_row(group.x, thread / 2u) * params.num_blocks;
    let token_start = min(group.y * TILE + thread / 2u, params.num_tokens - 1u) * params.num_blocks;
    let last = params.num_blocks - 1u;
    var column = min(thread % 2u, last);
    var block = load_block(row_start + column);
    var first = quants[2u * (token_start + column)];
    var second = quants[2u * (token_start + column) + 1u];
    var scale = bitcast<f32>(scales[token_start + column].x);
    let rows = subgroup / 4u * 64u * STRIDE;
    let tokens = subgroup % 4u * 32u * STRIDE;
    var c00: coop_mat16x16<f32, C>;
    var c10: coop_mat16x16<f32, C>;
    var c20: coop_mat16x16<f32, C>;
    var c30: coop_mat16x16<f32, C>;
    var c01: coop_mat16x16<f32, C>;
    var c11: coop_mat16x16<f32, C>;
    var c21: coop_mat16x16<f32, C>;
    var c31: coop_mat16x16<f32, C>;
    for (var start = 0u; start < params.num_blocks; start += 2u) {
        write_weights(thread, block, start + thread % 2u <= last);
        write_input(thread, first, second, scale);
        workgroupBarrier();
        column = min(start + 2u + thread % 2u, last);
        block = load_block(row_start + column);
        first = quants[2u * (token_start + column)];
        second = quants[2u * (token_start + column) + 1u];
        scale = bitcast<f32>(scales[token_start + column].x);
        for (var k = 0u; k < 16u; k += 4u) {
            let b0 = coopLoad<coop_mat16x16<f16, B>>(&inputs[tokens + k], STRIDE);
            let b1 = coopLoad<coop_mat16x16<f16, B>>(&inputs[tokens + 16u * STRIDE + k], STRIDE);
            let a0 = coopLoadT<coop_mat16x16<f16, A>>(&weights[rows + k], STRIDE);
            c00 = coopMultiplyAdd(a0, b0, c00);
            c01 = coopMultiplyAdd(a0, b1, c01);
            let a1 = coopLoadT<coop_mat16x16<f16, A>>(&weights[rows + 16u * STRIDE + k], STRIDE);
            c10 = coopMultiplyAdd(a1, b0, c10);
            c11 = coopMultiplyAdd(a1, b1, c11);
            let a2 = coopLoadT<coop_mat16x16<f16, A>>(&weights[rows + 32u * STRIDE + k], STRIDE);
            c20 = coopMultiplyAdd(a2, b0, c20);
            c21 = coopMultiplyAdd(a2, b1, c21);
            let a3 = coopLoadT<coop_mat16x16<f16, A>>(&weights[rows + 48u * STRIDE + k], STRIDE);
            c30 = coopMultiplyAdd(a3, b0, c30);
            c31 = coopMultiplyAdd(a3, b1, c31);
        }
        workgroupBarrier();
    }
    let first_row = group.x * OUTPUTS + subgroup / 4u * (OUTPUTS / 2u);
    let first_token = group.y * TILE + subgroup % 4u * 32u;
    // The matrices are named before the stores: the translator loses operands that are not.
    let r00 = c00;
    let r10 = c10;
    let r20 = c20;
    let r30 = c30;
    let r01 = c01;
    let r11 = c11;
    let r21 = c21;
    let r31 = c31;
    let target_at = &results[subgroup * 256u];
#if SWIGLU
    coopStore(r00, target_at, 16u);
    workgroupBarrier();
    let g00 = take_results(subgroup, lane);
    workgroupBarrier();
    coopStore(r20, target_at, 16u);
    workgroupBarrier();
    store_gated(subgroup, lane, g00, first_row, first_token);
    workgroupBarrier();
    coopStore(r10, target_at, 16u);
    workgroupBarrier();
    let g10 = take_results(subgroup, lane);
    workgroupBarrier();
    coopStore(r30, target_at, 16u);
    workgroupBarrier();
    store_gated(subgroup, lane, g10, first_row + 16u, first_token);
    workgroupBarrier();
    coopStore(r01, target_at, 16u);
    workgroupBarrier();
    let g01 = take_results(subgroup, lane);
    workgroupBarrier();
    coopStore(r21, target_at, 16u);
    workgroupBarrier();
    store_gated(subgroup, lane, g01, first_row, first_token + 16u);
    workgroupBarrier();
    coopStore(r11, target_at, 16u);
    workgroupBarrier();
    let g11 = take_results(subgroup, lane);
    workgroupBarrier();
    coopStore(r31, target_at, 16u);
    workgroupBarrier();
    store_gated(subgroup, lane, g11, first_row + 16u, first_token + 16u);
#else
    coopStore(r00, target_at, 16u);
    workgroupBarrier();
    store_results(subgroup, lane, first_row, first_token);
    workgroupBarrier();
    coopStore(r10, target_at, 16u);
    workgroupBarrier();
    store_results(subgroup, lane, first_row + 16u, first_token);
    workgroupBarrier();
    coopStore(r20, target_at, 16u);
    workgroupBarrier();
    store_results(subgroup, lane, first_row + 32u, first_token);
    workgroupBarrier();
    coopStore(r30, target_at, 16u);
    workgroupBarrier();
    store_results(subgroup, lane, first_row + 48u, first_token);
    workgroupBarrier();
    coopStore(r01, target_at, 16u);
    workgroupBarrier();
    store_results(subgroup, lane, first_row, first_token + 16u);
    workgroupBarrier();
    coopStore(r11, target_at, 16u);
    workgroupBarrier();
    store_results(subgroup, lane, first_row + 16u, first_token + 16u);
    workgroupBarrier();
    coopStore(r21, target_at, 16u);
    workgroupBarrier();
    store_results(subgroup, lane, first_row + 32u, first_token + 16u);
    workgroupBarrier();
    coopStore(r31, target_at, 16u);
    workgroupBarrier();
    store_results(subgroup, lane, first_row + 48u, first_token + 16u);
#endif
}
