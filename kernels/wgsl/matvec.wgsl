// Quantized weights times up to TOKENS tokens, by integer dot products with 8-bit activations.
//
// A workgroup makes ROWS outputs of TOKENS tokens; its threads take every THREADS-th block of the columns, and their sums
// are added in workgroup memory. Of SwiGLU, an output is the product of two rows, gate and up.
//
// Options: those of the include; THREADS.

#include matvec

#if SUBGROUPS
// A subgroup has at least four threads.
var<workgroup> partial: array<f32, SUMS * THREADS / 4u>;
#else
var<workgroup> partial: array<f32, SUMS * THREADS>;
#endif

// Where output `index` of the workgroup lies; of one past its end, where the last does.
fn output_at(first_row: u32, first_token: u32, index: u32) -> u32 {
    let own = min(index, ROWS * TOKENS - 1u);
    let token = min(first_token + own % TOKENS, params.num_tokens - 1u);
    return token * params.width + params.first_output + min(first_row + own / TOKENS, params.num_outputs - 1u);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32,
#if SUBGROUPS
        @builtin(subgroup_id) subgroup: u32, @builtin(num_subgroups) num_subgroups: u32,
        @builtin(subgroup_invocation_id) lane: u32
#endif
) {
    let first_row = (group.x + group.y * groups.x) * ROWS;
    let first_token = group.z * TOKENS;
    if (first_row >= params.num_outputs) { return; }
#if ADD
    // Asked for before the products.
    var held = output[output_at(first_row, first_token, thread)];
#endif
    var sums = share_of_products(first_row, first_token, thread, THREADS);
#if SUBGROUPS
    for (var i = 0u; i < SUMS; i++) {
        let sum = subgroupAdd(sums[i]);
        if (lane == 0u) { partial[subgroup * SUMS + i] = sum; }
    }
    workgroupBarrier();
    let num_partial = num_subgroups;
#else
    for (var i = 0u; i < SUMS; i++) { partial[thread * SUMS + i] = sums[i]; }
    workgroupBarrier();
    for (var distance = THREADS / 2u; distance > 0u; distance /= 2u) {
        if (thread < distance) {
            for (var i = 0u; i < SUMS; i++) { partial[thread * SUMS + i] += partial[(thread + distance) * SUMS + i]; }
        }
        workgroupBarrier();
    }
    let num_partial = 1u;
#endif
    for (var index = thread; index < ROWS * TOKENS; index += THREADS) {
#if ADD
        let addend = held;
        held = output[output_at(first_row, first_token, index + THREADS)];
#endif
        let row = first_row + index / TOKENS;
        let token = first_token + index % TOKENS;
        if (row >= params.num_outputs || token >= params.num_tokens) { continue; }
        var result = 0.0;
        for (var i = 0u; i < num_partial; i++) { result += partial[i * SUMS + index]; }
#if SWIGLU
        var up = 0.0;
        for (var i = 0u; i < num_partial; i++) { up += partial[i * SUMS + ROWS * TOKENS + index]; }
        result = gated(result, up);
#endif
#if ADD
        result += addend;
#endif
        output[output_at(first_row, first_token, index)] = result;
    }
}
