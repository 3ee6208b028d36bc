// Joins the partial sums of attention over ranges of keys.
//
// A workgroup takes one token (x) and one query head (y). Options: THREADS, GROUPS (groups of four elements of a head), QUANTIZE.

struct Params { num_heads: u32, head_dim: u32 }
#include params

// Row, first slot, ranges, how far apart their slots are.
@group(0) @binding(0) var<storage, read> tokens: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> partial: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> output: array<f32>;
#if QUANTIZE
@group(0) @binding(3) var<storage, read_write> quants: array<u32>;
@group(0) @binding(4) var<storage, read_write> quant_scales: array<vec2<u32>>;
#endif
#if QUANTIZE
#include activations
#include quantize
#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let token = tokens[group.x];
    var largest = -3.4e38;
    var total = 0.0;
    var sum = vec4<f32>(0.0);
    let element_group = min(thread, GROUPS - 1u);
    for (var i = 0u; i < token.z; i++) {
        let at = ((token.y + i * token.w) * params.num_heads + group.y) * (GROUPS + 1u);
        let weight = partial[at + GROUPS].xy;
        let highest = max(largest, weight.x);
        let correction = exp(largest - highest);
        // A range of which the token sees nothing weighs nothing.
        let factor = select(0.0, exp(weight.x - highest), weight.y > 0.0);
        total = total * correction + weight.y * factor;
        sum = sum * correction + partial[at + element_group] * factor;
        largest = highest;
    }
    let result = sum / total;
    let head = token.x * params.num_heads + group.y;
    if (thread < GROUPS) {
        for (var j = 0u; j < 4u; j++) {
            let element = 4u * thread + j;
            if (element < params.head_dim) { output[head * params.head_dim + element] = result[j]; }
        }
    }
#if QUANTIZE
    let quantized = quantize_group(thread, result);
    if (thread < GROUPS) {
        let at = head * GROUPS + thread;
        quants[at] = quantized.word;
        if (at % 8u == 0u) { quant_scales[at / 8u] = vec2<u32>(quantized.scale, quantized.sums); }
    }
#endif
}
