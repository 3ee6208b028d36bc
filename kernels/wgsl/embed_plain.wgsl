// Rows of an embedding table of 16 or 32 bits as f32, as in `embed.wgsl`. A thread makes the values of a word.
//
// Options: DTYPE (0 f16, 1 bf16, 2 f32), THREADS.

struct Params { columns: u32, num_rows: u32, first_row: u32, table_rows: u32, first_token: u32 }
#include params

@group(0) @binding(0) var<storage, read> weights: array<u32>;
@group(0) @binding(1) var<storage, read> token_ids: array<u32>;
@group(0) @binding(2) var<storage, read_write> output: array<f32>;
#include kv_cache

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let step = select(2u, 1u, DTYPE == 2u);
    let column = (group.x * THREADS + thread) * step;
    if (column >= params.columns) { return; }
    let row = token_ids[group.y] - params.first_token;
    let start = group.y * params.columns + column;
    var values = vec2<f32>(0.0);
    if (row < params.table_rows) {
        if (row < params.first_row || row - params.first_row >= params.num_rows) { return; }
        let row_words = (params.columns + 4u * step - 1u) / (4u * step) * 4u;
        let word = weights[(row - params.first_row) * row_words + column / step];
        if (DTYPE == 0u) { values = unpack2x16float(word); }
        else if (DTYPE == 1u) { values = unpack_bf16(word); }
        else { values.x = bitcast<f32>(word); }
    } else if (params.first_row != 0u) {
        return;
    }
    output[start] = values.x;
    if (step == 2u && column + 1u < params.columns) { output[start + 1u] = values.y; }
}
