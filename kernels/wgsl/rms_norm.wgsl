// Root-mean-square norm of rows, as f32 and, with QUANTIZE, as 8-bit blocks.
//
// One workgroup a row. Options: THREADS, QUANTIZE (the width is then a multiple of 32).

struct Params { width: u32, epsilon: f32 }
var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> input: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read_write> output: array<f32>;
#if QUANTIZE
@group(0) @binding(3) var<storage, read_write> quants: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> scales: array<vec2<u32>>;
#include activations
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
    let width = params.width;
    let start = group.x * width;
    var sum = 0.0;
    for (var column = thread; column < width; column += THREADS) {
        let value = input[start + column];
        sum += value * value;
    }
    let mean = workgroup_sum(place, sum) / f32(width);
    let factor = 1.0 / sqrt(mean + params.epsilon);
#if QUANTIZE
    for (var block = thread; block < width / 32u; block += THREADS) {
        var values: array<vec4<f32>, 8>;
        for (var i = 0u; i < 8u; i++) {
            for (var j = 0u; j < 4u; j++) {
                let column = block * 32u + 4u * i + j;
                let value = input[start + column] * factor * weight[column];
                values[i][j] = value;
                output[start + column] = value;
            }
        }
        let quantized = quantize_block(values);
        let at = start / 32u + block;
        quants[2u * at] = vec4<u32>(quantized.words[0], quantized.words[1], quantized.words[2], quantized.words[3]);
        quants[2u * at + 1u] = vec4<u32>(quantized.words[4], quantized.words[5], quantized.words[6], quantized.words[7]);
        scales[at] = vec2<u32>(bitcast<u32>(quantized.scale), pack_sums(quantized.sums));
    }
#else
    for (var column = thread; column < width; column += THREADS) {
        output[start + column] = input[start + column] * factor * weight[column];
    }
#endif
}
