// `output[i] = input[rows[i]]`. A workgroup copies THREADS columns of a row.
//
// Options: THREADS.

struct Params { width: u32 }
#include params

@group(0) @binding(0) var<storage, read> rows: array<u32>;
@group(0) @binding(1) var<storage, read> input: array<f32>;
@group(0) @binding(2) var<storage, read_write> output: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let column = group.x * THREADS + thread;
    if (column < params.width) { output[group.y * params.width + column] = input[rows[group.y] * params.width + column]; }
}
