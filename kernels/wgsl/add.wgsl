// `output += addend`.
//
// Options: THREADS.

struct Params { num_values: u32 }
#include params

@group(0) @binding(0) var<storage, read> addend: array<f32>;
@group(0) @binding(1) var<storage, read_write> output: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = (group.x + group.y * groups.x) * THREADS + thread;
    if (index < params.num_values) { output[index] += addend[index]; }
}
