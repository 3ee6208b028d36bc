// Joins the partial sums of attention over ranges of keys.
//
// A workgroup takes one token (x) and one query head (y). A share of its threads has one for each group of elements, and sums
// every SHARES-th range. Options: THREADS, GROUPS (groups of four elements of a head), RANGES (of a token, at most, no more than
// threads), QUANTIZE.

struct Params { num_heads: u32, head_dim: u32 }
#include params

// Row, first slot, ranges.
@group(0) @binding(0) var<storage, read> tokens: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> partial: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> output: array<f32>;
#if QUANTIZE
@group(0) @binding(3) var<storage, read_write> quants: array<u32>;
@group(0) @binding(4) var<storage, read_write> quant_scales: array<vec2<u32>>;
#endif
#if QUANTIZE
#include activations
#include quantize
#endif

const SHARES = THREADS / GROUPS;
// Ranges of a share whose sums are fetched before it is known what they are worth.
const EARLY = 4u;

var<workgroup> largest: array<f32, RANGES>;
var<workgroup> totals: array<f32, RANGES>;
var<workgroup> factors: array<f32, RANGES>;
var<workgroup> sums: array<vec4<f32>, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let token = tokens[group.x];
    let num_ranges = token.z;
    let share = thread / GROUPS;
    let element_group = thread % GROUPS;
    let start = (token.y * params.num_heads + group.y) * (GROUPS + 1u);
    let step = params.num_heads * (GROUPS + 1u);
    // Threads of no share have nothing to sum.
    let num_summed = select(0u, num_ranges, share < SHARES);
    var early: array<vec4<f32>, EARLY>;
    for (var i = 0u; i < EARLY; i++) {
        let range = share + i * SHARES;
        if (range < num_summed) { early[i] = partial[start + range * step + element_group]; }
    }
    if (thread < num_ranges) {
        let weight = partial[start + thread * step + GROUPS];
        largest[thread] = weight.x;
        totals[thread] = weight.y;
    }
    workgroupBarrier();
    if (thread < num_ranges) {
        var highest = largest[0];
        for (var i = 1u; i < num_ranges; i++) { highest = max(highest, largest[i]); }
        // A range of which the token sees nothing weighs nothing.
        factors[thread] = select(0.0, exp(largest[thread] - highest), totals[thread] > 0.0);
    }
    workgroupBarrier();
    var sum = vec4<f32>(0.0);
    for (var i = 0u; i < EARLY; i++) {
        let range = share + i * SHARES;
        if (range < num_summed) { sum += early[i] * factors[range]; }
    }
    for (var range = share + EARLY * SHARES; range < num_summed; range += SHARES) {
        sum += partial[start + range * step + element_group] * factors[range];
    }
    sums[thread] = sum;
    workgroupBarrier();
    let head = token.x * params.num_heads + group.y;
    var result = vec4<f32>(0.0);
    if (thread < GROUPS) {
        for (var i = 1u; i < SHARES; i++) { sum += sums[i * GROUPS + thread]; }
        var total = 0.0;
        for (var i = 0u; i < num_ranges; i++) { total += totals[i] * factors[i]; }
        result = sum / total;
        for (var j = 0u; j < 4u; j++) {
            let element = 4u * thread + j;
            if (element < params.head_dim) { output[head * params.head_dim + element] = result[j]; }
        }
    }
#if QUANTIZE
    let quantized = quantize_group(thread, result);
    if (thread < GROUPS) {
        let at = head * GROUPS + thread;
        quants[at] = quantized.word;
        if (at % 8u == 0u) { quant_scales[at / 8u] = vec2<u32>(quantized.scale, quantized.sums); }
    }
#endif
}
