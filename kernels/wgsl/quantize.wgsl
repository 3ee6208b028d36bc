// Rows as 8-bit blocks. A thread takes four values, eight threads a block.
//
// Options: THREADS.

struct Params { num_groups: u32 }
#include params

@group(0) @binding(0) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> quants: array<u32>;
@group(0) @binding(2) var<storage, read_write> scales: array<vec2<u32>>;
#include activations
#include quantize

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let at = (group.x + group.y * groups.x) * THREADS + thread;
    var value = vec4<f32>(0.0);
    if (at < params.num_groups) { value = input[at]; }
    let quantized = quantize_group(thread, value);
    if (at >= params.num_groups) { return; }
    quants[at] = quantized.word;
    if (at % 8u == 0u) { scales[at / 8u] = vec2<u32>(quantized.scale, quantized.sums); }
}
