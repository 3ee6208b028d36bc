// Rows of an embedding table as f32. A thread makes a block of 32 columns.
//
// Rows outside the table (another rank's) are zeros; of a table in several parts each part writes its own rows, and the
// first one those zeros. Options: those of the weights; THREADS.

struct Params { num_blocks: u32, num_rows: u32, first_row: u32, table_rows: u32, first_token: u32 }
#include params

#include weights
@group(0) @binding(4) var<storage, read> token_ids: array<u32>;
@group(0) @binding(5) var<storage, read_write> output: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let block = group.x * THREADS + thread;
    if (block >= params.num_blocks) { return; }
    // Wraps around for ids below the table's.
    let row = token_ids[group.y] - params.first_token;
    let start = group.y * params.num_blocks * 32u + block * 32u;
    if (row >= params.table_rows) {
        if (params.first_row == 0u) {
            for (var i = 0u; i < 32u; i++) { output[start + i] = 0.0; }
        }
        return;
    }
    if (row < params.first_row || row - params.first_row >= params.num_rows) { return; }
    let weights = load_block((row - params.first_row) * params.num_blocks + block);
    for (var half = 0u; half < 2u; half++) {
        let scale = weights.d * f32(weights.scale[half]);
        let minimum = weights.m * f32(weights.min[half]);
        let words = select(weights.first, weights.second, half == 1u);
        for (var word = 0u; word < 4u; word++) {
            let bytes = unpack4xI8(words[word]);
            for (var byte = 0u; byte < 4u; byte++) {
                let value = scale * f32(bytes[byte] - i32(OFFSET)) + minimum;
                output[start + half * 16u + word * 4u + byte] = value;
            }
        }
    }
}
