// Rows as 8-bit blocks. A thread makes a block.
//
// Options: THREADS.

struct Params { num_blocks: u32 }
var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> quants: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> scales: array<vec2<u32>>;
#include activations

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let block = (group.x + group.y * groups.x) * THREADS + thread;
    if (block >= params.num_blocks) { return; }
    var values: array<vec4<f32>, 8>;
    for (var i = 0u; i < 8u; i++) { values[i] = input[block * 8u + i]; }
    let quantized = quantize_block(values);
    quants[2u * block] = vec4<u32>(quantized.words[0], quantized.words[1], quantized.words[2], quantized.words[3]);
    quants[2u * block + 1u] = vec4<u32>(quantized.words[4], quantized.words[5], quantized.words[6], quantized.words[7]);
    scales[block] = vec2<u32>(bitcast<u32>(quantized.scale), pack_sums(quantized.sums));
}
