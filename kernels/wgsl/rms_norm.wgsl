// Root-mean-square norm of rows, as f32 and, with QUANTIZE, as 8-bit blocks.
//
// One workgroup a row, whose first elements stay in registers. Options: THREADS, QUANTIZE (the width is then a multiple of 32).

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

// Elements of the row and of the weight that a thread reads once, before it waits for the sum.
const KEPT = 2u;

fn square(value: Element) -> f32 {
#if QUANTIZE
    return dot(value, value);
#else
    return value * value;
#endif
}

// All threads call it, with the columns side by side; those past the end write nothing.
fn write(thread: u32, start: u32, column: u32, width: u32, value: Element) {
    if (column < width) { output[start + column] = value; }
#if QUANTIZE
    let quantized = quantize_group(thread, value);
    if (column < width) {
        let at = start + column;
        quants[at] = quantized.word;
        if (at % 8u == 0u) { scales[at / 8u] = vec2<u32>(quantized.scale, quantized.sums); }
    }
#endif
}

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
    var kept: array<Element, KEPT>;
    var kept_weights: array<Element, KEPT>;
    for (var i = 0u; i < KEPT; i++) {
        let column = thread + i * THREADS;
        kept[i] = input[start + min(column, width - 1u)];
        kept_weights[i] = weight[min(column, width - 1u)];
        sum += select(0.0, square(kept[i]), column < width);
    }
    for (var column = thread + KEPT * THREADS; column < width; column += THREADS) {
        sum += square(input[start + column]);
    }
    let mean = workgroup_sum(place, sum) / f32(params.width);
    let factor = 1.0 / sqrt(mean + params.epsilon);
    for (var i = 0u; i < KEPT; i++) {
        if (i * THREADS < width) { write(thread, start, i * THREADS + thread, width, kept[i] * factor * kept_weights[i]); }
    }
    for (var first = KEPT * THREADS; first < width; first += THREADS) {
        let column = first + thread;
        var value = Element();
        if (column < width) { value = input[start + column] * factor * weight[column]; }
        write(thread, start, column, width, value);
    }
}
