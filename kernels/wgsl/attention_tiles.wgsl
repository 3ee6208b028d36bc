// Paged flash attention of prompts in f32, by tiles in registers. Softmax is taken online.
//
// A workgroup takes one item (x) and GROUP query heads of one key/value head (y: the heads, in chunks of GROUP): row `i` of its
// ROWS is head `i % GROUP` of token `i / GROUP`. For each tile of KEYS keys thread (x, y) of 8 x 16 makes the scores of four
// rows and four keys; two threads weigh those of a row; then a thread adds the weighted values of its four rows, of every eighth
// group of four elements. Queries and keys come to workgroup memory CHUNK groups at a time, values CHUNK keys at a time.
//
// Options: those of `attention` (heads of at most 128 elements); THREADS (128), GROUP, STEPS (groups of a head, by CHUNK).

#include attention
#if QUANTIZE
#include activations
#include quantize
#endif

const ROWS = 64u;
const KEYS = 32u;
const CHUNK = 8u;
// Longer than need be so that banks differ: of queries and keys in groups, of scores in numbers.
const STRIDE = CHUNK + 1u;
const SCORE_STRIDE = KEYS + 1u;

var<workgroup> queries: array<vec4<f32>, ROWS * STRIDE>;
// Keys or values.
var<workgroup> tile: array<vec4<f32>, KEYS * STRIDE>;
var<workgroup> scores: array<f32, ROWS * SCORE_STRIDE>;
// Of each half of a row, and of each row.
var<workgroup> halves: array<f32, THREADS>;
var<workgroup> factors: array<f32, ROWS>;

fn copy_queries(item: Item, heads: Heads, thread: u32, first: u32) {
    for (var i = thread; i < ROWS * CHUNK; i += THREADS) {
        let row = i / CHUNK;
        let group = first + i % CHUNK;
        let token = min(row / GROUP, item.num_tokens - 1u);
        let head = min(heads.first + row % GROUP, heads.end - 1u);
        let start = (item.row + token) * qkv_width() + head * params.head_dim;
        var elements = vec4<f32>(0.0);
        for (var j = 0u; j < 4u; j++) {
            if (4u * group + j < params.head_dim) { elements[j] = qkv[start + 4u * group + j] * params.scale; }
        }
        queries[row * STRIDE + i % CHUNK] = elements;
    }
}

// Past the end comes the last key once more, whose weight is 0 there.
fn copy_keys(item: Item, head: u32, thread: u32, first_key: u32, first: u32) {
    for (var i = thread; i < KEYS * CHUNK; i += THREADS) {
        let group = first + i % CHUNK;
        var elements = vec4<f32>(0.0);
        if (group < GROUPS) {
            let at = key_at(item, head, min(first_key + i / CHUNK, item.end_key - 1u));
            elements = widen(load_key(at.x + group, at.y));
        }
        tile[i / CHUNK * STRIDE + i % CHUNK] = elements;
    }
}

fn copy_values(item: Item, head: u32, thread: u32, first_key: u32) {
    for (var i = thread; i < CHUNK * CHUNK * STEPS; i += THREADS) {
        let group = i % (CHUNK * STEPS);
        var elements = vec4<f32>(0.0);
        if (group < GROUPS) {
            let at = key_at(item, head, min(first_key + i / (CHUNK * STEPS), item.end_key - 1u));
            elements = widen(load_value(at.x + group, at.y));
        }
        tile[i] = elements;
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let item = items[group.x];
    let heads = heads_of(group.y, GROUP);
    if (heads.first >= heads.end) { return; }
    let head = heads.key_value_head;
    let x = thread % CHUNK;
    let y = thread / CHUNK * 4u;
    // The half of a row that this thread weighs.
    let row = thread / 2u;
    let half_at = row * SCORE_STRIDE + thread % 2u * (KEYS / 2u);
    let last_key = item.position + min(row / GROUP, item.num_tokens - 1u);
    var largest = LOWEST;
    var total = 0.0;
#repeat n STEPS
    var held_0_$n = vec4<f32>(0.0);
    var held_1_$n = vec4<f32>(0.0);
    var held_2_$n = vec4<f32>(0.0);
    var held_3_$n = vec4<f32>(0.0);
#end
    for (var first = item.first_key; first < item.end_key; first += KEYS) {
        var made_0 = vec4<f32>(0.0);
        var made_1 = vec4<f32>(0.0);
        var made_2 = vec4<f32>(0.0);
        var made_3 = vec4<f32>(0.0);
        for (var step = 0u; step < STEPS; step++) {
            copy_queries(item, heads, thread, step * CHUNK);
            copy_keys(item, head, thread, first, step * CHUNK);
            workgroupBarrier();
            for (var i = 0u; i < CHUNK; i++) {
                let key_0 = tile[x * STRIDE + i];
                let key_1 = tile[(x + 8u) * STRIDE + i];
                let key_2 = tile[(x + 16u) * STRIDE + i];
                let key_3 = tile[(x + 24u) * STRIDE + i];
                let query_0 = queries[y * STRIDE + i];
                let query_1 = queries[(y + 1u) * STRIDE + i];
                let query_2 = queries[(y + 2u) * STRIDE + i];
                let query_3 = queries[(y + 3u) * STRIDE + i];
                made_0 += vec4<f32>(dot(query_0, key_0), dot(query_0, key_1), dot(query_0, key_2), dot(query_0, key_3));
                made_1 += vec4<f32>(dot(query_1, key_0), dot(query_1, key_1), dot(query_1, key_2), dot(query_1, key_3));
                made_2 += vec4<f32>(dot(query_2, key_0), dot(query_2, key_1), dot(query_2, key_2), dot(query_2, key_3));
                made_3 += vec4<f32>(dot(query_3, key_0), dot(query_3, key_1), dot(query_3, key_2), dot(query_3, key_3));
            }
            workgroupBarrier();
        }
        for (var j = 0u; j < 4u; j++) {
            let at = y * SCORE_STRIDE + x + 8u * j;
            scores[at] = made_0[j];
            scores[at + SCORE_STRIDE] = made_1[j];
            scores[at + 2u * SCORE_STRIDE] = made_2[j];
            scores[at + 3u * SCORE_STRIDE] = made_3[j];
        }
        workgroupBarrier();
        let first_half = first + thread % 2u * (KEYS / 2u);
        var highest = LOWEST;
        for (var i = 0u; i < KEYS / 2u; i++) {
            if (first_half + i <= last_key) { highest = max(highest, scores[half_at + i]); }
        }
        halves[thread] = highest;
        workgroupBarrier();
        highest = max(largest, max(halves[row * 2u], halves[row * 2u + 1u]));
        let correction = exp(largest - highest);
        largest = highest;
        total *= correction;
        factors[row] = correction;
        for (var i = 0u; i < KEYS / 2u; i++) {
            // A score that is not seen weighs nothing, even where no score is.
            let weight = select(0.0, exp(scores[half_at + i] - highest), first_half + i <= last_key);
            scores[half_at + i] = weight;
            total += weight;
        }
        workgroupBarrier();
        let factor = vec4<f32>(factors[y], factors[y + 1u], factors[y + 2u], factors[y + 3u]);
#repeat n STEPS
        held_0_$n *= factor.x;
        held_1_$n *= factor.y;
        held_2_$n *= factor.z;
        held_3_$n *= factor.w;
#end
        for (var chunk = 0u; chunk < KEYS; chunk += CHUNK) {
            copy_values(item, head, thread, first + chunk);
            workgroupBarrier();
            for (var i = 0u; i < CHUNK; i++) {
                let at = y * SCORE_STRIDE + chunk + i;
                let weight_0 = scores[at];
                let weight_1 = scores[at + SCORE_STRIDE];
                let weight_2 = scores[at + 2u * SCORE_STRIDE];
                let weight_3 = scores[at + 3u * SCORE_STRIDE];
#repeat n STEPS
                let value_$n = tile[i * CHUNK * STEPS + x + CHUNK * $nu];
                held_0_$n += weight_0 * value_$n;
                held_1_$n += weight_1 * value_$n;
                held_2_$n += weight_2 * value_$n;
                held_3_$n += weight_3 * value_$n;
#end
            }
            workgroupBarrier();
        }
    }
    halves[thread] = total;
    workgroupBarrier();
    factors[row] = 1.0 / (halves[row * 2u] + halves[row * 2u + 1u]);
    workgroupBarrier();
#repeat n STEPS
    store(item, heads, thread, y, x + CHUNK * $nu, held_0_$n);
    store(item, heads, thread, y + 1u, x + CHUNK * $nu, held_1_$n);
    store(item, heads, thread, y + 2u, x + CHUNK * $nu, held_2_$n);
    store(item, heads, thread, y + 3u, x + CHUNK * $nu, held_3_$n);
#end
}

// Four elements of a row. All threads call it, from uniform control flow.
fn store(item: Item, heads: Heads, thread: u32, row: u32, group: u32, sum: vec4<f32>) {
    let result = sum * factors[row];
    let token = row / GROUP;
    let head = heads.first + row % GROUP;
    let is_there = token < item.num_tokens && head < heads.end && group < GROUPS;
    let start = ((item.row + token) * params.num_heads + head) * params.head_dim;
    if (is_there) {
        for (var j = 0u; j < 4u; j++) {
            if (4u * group + j < params.head_dim) { output[start + 4u * group + j] = result[j]; }
        }
    }
#if QUANTIZE
    let quantized = quantize_group(thread, result);
    if (is_there) {
        let at = start / 4u + group;
        quants[at] = quantized.word;
        if (at % 8u == 0u) { quant_scales[at / 8u] = vec2<u32>(quantized.scale, quantized.sums); }
    }
#endif
}
