// Root-mean-square norm of rows, as f32 and, with QUANTIZE, as 8-bit blocks.
//
// One workgroup a row. Options: THREADS, QUANTIZE (the width is then a multiple of 32).

struct Params { width: u32, epsilon: f32 }
#include params

#if QUANTIZE
alias Element = vec4<f32>;
#else
alias Element = f32;
#endif
@group(0) @binding(0) var<storage, read> input: array<Element>;
@group(0) @binding(1) var<storage, read> weight: array<Element>;
@group(0) @binding(2) var<storage, read_write> output: array<Element>;
#if QUANTIZE
@group(0) @binding(3) var<storage, read_write> quants: array<u32>;
@group(0) @binding(4) var<storage, read_write> scales: array<vec2<u32>>;
#endif
#if QUANTIZE
#include activations
#include quantize
#endif
#include reduce

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32,
#if SUBGROUPS
        @builtin(subgroup_id) subgroup: u32, @builtin(num_subgroups) num_subgroups: u32,
        @builtin(subgroup_invocation_id) lane: u32
#endif
) {
    var place: Place;
    place.thread = thread;
#if SUBGROUPS
    place.subgroup = subgroup;
    place.num_subgroups = num_subgroups;
    place.lane = lane;
#endif
#if QUANTIZE
    let width = params.width / 4u;
#else
    let width = params.width;
#endif
    let start = group.x * width;
    var sum = 0.0;
    for (var column = thread; column < width; column += THREADS) {
        let value = input[start + column];
#if QUANTIZE
        sum += dot(value, value);
#else
        sum += value * value;
#endif
    }
    let mean = workgroup_sum(place, sum) / f32(params.width);
    let factor = 1.0 / sqrt(mean + params.epsilon);
    for (var first = 0u; first < width; first += THREADS) {
        let column = first + thread;
        var value = Element();
        if (column < width) {
            value = input[start + column] * factor * weight[column];
            output[start + column] = value;
        }
#if QUANTIZE
        let quantized = quantize_group(thread, value);
        if (column < width) {
            let at = start + column;
            quants[at] = quantized.word;
            if (at % 8u == 0u) { scales[at / 8u] = vec2<u32>(quantized.scale, quantized.sums); }
        }
#endif
    }
}
