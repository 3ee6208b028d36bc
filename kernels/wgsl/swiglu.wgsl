// `output[t, r] = silu(products[t, r]) * products[t, r + width]`, for layers whose products come from several dispatches.
//
// Options: THREADS.

struct Params { width: u32, num_values: u32 }
#include params

@group(0) @binding(0) var<storage, read> products: array<f32>;
@group(0) @binding(1) var<storage, read_write> output: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = (group.x + group.y * groups.x) * THREADS + thread;
    if (index >= params.num_values) { return; }
    let at = index / params.width * 2u * params.width + index % params.width;
    let gate = products[at];
    output[index] = gate / (1.0 + exp(-gate)) * products[at + params.width];
}
