// Quantized weights times up to TOKENS tokens, with the outputs as 8-bit blocks as well: a workgroup makes all 32 of a block.
//
// Each subgroup makes ROWS outputs at a time; its threads share the columns. The number of outputs is a multiple of 32.
//
// Options: those of the include; THREADS, SUBGROUP_TEAMS (1: it takes subgroups).

#include matvec
@group(0) @binding(7) var<storage, read_write> output_quants: array<u32>;
@group(0) @binding(8) var<storage, read_write> output_scales: array<vec2<u32>>;
#include quantize

const OUTPUTS = 32u;
// Of each output of each token the product, and with SWIGLU that of the up after all gates.
var<workgroup> products: array<f32, OUTPUTS * TOKENS * (1u + SWIGLU)>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32, @builtin(subgroup_id) subgroup: u32,
        @builtin(num_subgroups) num_subgroups: u32, @builtin(subgroup_size) num_lanes: u32,
        @builtin(subgroup_invocation_id) lane: u32) {
    let block = group.x + group.y * groups.x;
    let first_output = block * OUTPUTS;
    if (first_output >= params.num_outputs) { return; }
    let first_token = group.z * TOKENS;
    for (var first = subgroup * ROWS; first < OUTPUTS; first += num_subgroups * ROWS) {
        var sums = share_of_products(first_output + first, first_token, lane, num_lanes);
        for (var i = 0u; i < SUMS; i++) {
            let sum = subgroupAdd(sums[i]);
            let row = i / TOKENS;
            if (lane == 0u) { products[(row / ROWS * OUTPUTS + first + row % ROWS) * TOKENS + i % TOKENS] = sum; }
        }
    }
    workgroupBarrier();
    // Eight threads have a block.
    let token = thread / 8u;
    let is_there = token < TOKENS && first_token + token < params.num_tokens;
    let start = (first_token + token) * params.width + params.first_output + first_output + thread % 8u * 4u;
    var values = vec4<f32>(0.0);
    if (is_there) {
        for (var i = 0u; i < 4u; i++) {
            let at = (thread % 8u * 4u + i) * TOKENS + token;
            var value = products[at];
#if SWIGLU
            value = gated(value, products[OUTPUTS * TOKENS + at]);
#endif
#if ADD
            value += output[start + i];
#endif
            values[i] = value;
            output[start + i] = value;
        }
    }
    let quantized = quantize_group(thread, values);
    if (!is_there) { return; }
    output_quants[start / 4u] = quantized.word;
    if (thread % 8u == 0u) { output_scales[start / 32u] = vec2<u32>(quantized.scale, quantized.sums); }
}
