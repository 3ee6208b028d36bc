// Paged flash attention of prompts in f32, by tiles in registers. Softmax is taken online.
//
// A workgroup takes one item (x) and GROUP query heads of one key/value head (y: the heads, in chunks of GROUP): row `i` of its
// ROWS is head `i % GROUP` of token `i / GROUP`. For each tile of KEYS keys thread (x, y) makes the scores of LINES rows and
// four keys; the threads that share a row weigh its scores; then a thread adds the weighted values of its rows, of every
// ACROSS-th group of four elements. Queries and keys come to workgroup memory CHUNK groups at a time, values VALUE_KEYS keys at
// a time. Weights take the place of queries and keys there.
//
// Options: those of `attention` (heads of at most 128 elements); ROWS, KEYS, LINES, VALUE_KEYS; THREADS (ROWS / LINES times
// KEYS / 4), GROUP, STEPS (groups of a head that a thread holds).

#include attention
#if QUANTIZE
#include activations
#include quantize
#endif

const CHUNK = 8u;
const ACROSS = KEYS / 4u;
// Groups of a head, with those that fill up the last step.
const WIDTH = ACROSS * STEPS;
// Threads that share a row of scores, of which each weighs LINES groups of four.
const SHARERS = ACROSS / LINES;
// In groups, longer than need be so that banks differ: a row of queries or of keys, and of scores.
const STRIDE = CHUNK + 1u;
const SCORE_STRIDE = ACROSS + 2u;
const LOG2_E = 1.4426950408889634;

// Rows of queries, then keys; then rows of scores and weights.
var<workgroup> tile: array<vec4<f32>, max((ROWS + KEYS) * STRIDE, ROWS * SCORE_STRIDE)>;
var<workgroup> value_tile: array<vec4<f32>, VALUE_KEYS * WIDTH>;
// Of each key of a tile: where it is.
var<workgroup> places: array<vec2<u32>, KEYS>;
// Of each thread's part of a row, and of each row.
var<workgroup> shares: array<f32, THREADS>;
var<workgroup> factors: array<f32, ROWS>;

fn copy_queries(item: Item, heads: Heads, thread: u32, first: u32) {
    for (var i = thread; i < ROWS * CHUNK; i += THREADS) {
        let row = i / CHUNK;
        let group = first + i % CHUNK;
        let token = min(row / GROUP, item.num_tokens - 1u);
        let head = min(heads.first + row % GROUP, heads.end - 1u);
        let start = (item.row + token) * qkv_width() + head * params.head_dim;
        var elements: vec4<f32>;
        for (var j = 0u; j < 4u; j++) {
            let element = 4u * group + j;
            let loaded = qkv[start + min(element, params.head_dim - 1u)];
            elements[j] = select(0.0, loaded, element < params.head_dim);
        }
        tile[row * STRIDE + i % CHUNK] = elements * (params.scale * LOG2_E);
    }
}

// The keys that a thread makes scores of lie ACROSS rows apart.
fn copy_keys(thread: u32, first: u32) {
    for (var i = thread; i < KEYS * CHUNK; i += THREADS) {
        let key = i / CHUNK;
        let group = first + i % CHUNK;
        let loaded = widen(load_key(places[key].x + min(group, GROUPS - 1u), places[key].y));
        let elements = select(vec4<f32>(0.0), loaded, group < GROUPS);
        tile[(ROWS + key % 4u * ACROSS + key / 4u) * STRIDE + i % CHUNK] = elements;
    }
}

fn copy_values(thread: u32, first: u32) {
    for (var i = thread; i < VALUE_KEYS * WIDTH; i += THREADS) {
        let place = places[first + i / WIDTH];
        let group = i % WIDTH;
        let loaded = widen(load_value(place.x + min(group, GROUPS - 1u), place.y));
        value_tile[i] = select(vec4<f32>(0.0), loaded, group < GROUPS);
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let item = items[group.x];
    let heads = heads_of(group.y, GROUP);
    if (heads.first >= heads.end) { return; }
    let head = heads.key_value_head;
    let x = thread % ACROSS;
    let y = thread / ACROSS * LINES;
    // The row that this thread weighs with its neighbours, and the last key that it sees.
    let row = thread / SHARERS;
    let sharer = thread % SHARERS;
    let shared_at = row * SCORE_STRIDE + sharer;
    let last_key = item.position + min(row / GROUP, item.num_tokens - 1u);
    var largest = LOWEST;
    var total = 0.0;
#repeat r LINES
#repeat n STEPS
    var held_$r_$n = vec4<f32>(0.0);
#end
#end
    // Past the end comes the last key once more, whose weight is 0 there.
    if (thread < KEYS) { places[thread] = key_at(item, head, min(item.first_key + thread, item.end_key - 1u)); }
    workgroupBarrier();
    for (var first = item.first_key; first < item.end_key; first += KEYS) {
#repeat r LINES
        var made_$r = vec4<f32>(0.0);
#end
        for (var chunk = 0u; chunk < GROUPS; chunk += CHUNK) {
            copy_queries(item, heads, thread, chunk);
            copy_keys(thread, chunk);
            workgroupBarrier();
            for (var i = 0u; i < CHUNK; i++) {
                let at = (ROWS + x) * STRIDE + i;
                let key_0 = tile[at];
                let key_1 = tile[at + ACROSS * STRIDE];
                let key_2 = tile[at + 2u * ACROSS * STRIDE];
                let key_3 = tile[at + 3u * ACROSS * STRIDE];
                let keys_x = vec4<f32>(key_0.x, key_1.x, key_2.x, key_3.x);
                let keys_y = vec4<f32>(key_0.y, key_1.y, key_2.y, key_3.y);
                let keys_z = vec4<f32>(key_0.z, key_1.z, key_2.z, key_3.z);
                let keys_w = vec4<f32>(key_0.w, key_1.w, key_2.w, key_3.w);
#repeat r LINES
                let query_$r = tile[(y + $ru) * STRIDE + i];
                // Sums of one product each: they are fused.
                made_$r += query_$r.x * keys_x;
                made_$r += query_$r.y * keys_y;
                made_$r += query_$r.z * keys_z;
                made_$r += query_$r.w * keys_w;
#end
            }
            workgroupBarrier();
        }
#repeat r LINES
        tile[(y + $ru) * SCORE_STRIDE + x] = made_$r;
#end
        workgroupBarrier();
        var highest = LOWEST;
#repeat r LINES
        let key_$r = vec4<u32>(first + 4u * ($ru * SHARERS + sharer)) + vec4<u32>(0u, 1u, 2u, 3u);
        let seen_$r = key_$r <= vec4<u32>(last_key);
        let scores_$r = select(vec4<f32>(LOWEST), tile[shared_at + $ru * SHARERS], seen_$r);
        highest = max(highest, max(max(scores_$r.x, scores_$r.y), max(scores_$r.z, scores_$r.w)));
#end
        shares[thread] = highest;
        workgroupBarrier();
        highest = largest;
        for (var i = 0u; i < SHARERS; i++) { highest = max(highest, shares[row * SHARERS + i]); }
        let correction = exp2(largest - highest);
        largest = highest;
        total *= correction;
        if (sharer == 0u) { factors[row] = correction; }
#repeat r LINES
        // A score that is not seen weighs nothing, even where no score is.
        let weights_$r = select(vec4<f32>(0.0), exp2(scores_$r - highest), seen_$r);
        total += weights_$r.x + weights_$r.y + weights_$r.z + weights_$r.w;
        tile[shared_at + $ru * SHARERS] = weights_$r;
#end
        copy_values(thread, 0u);
        workgroupBarrier();
#repeat r LINES
        let factor_$r = factors[y + $ru];
#repeat n STEPS
        held_$r_$n *= factor_$r;
#end
#end
        for (var chunk = 0u; chunk < KEYS; chunk += VALUE_KEYS) {
            if (chunk > 0u) {
                copy_values(thread, chunk);
                workgroupBarrier();
            }
            for (var i = 0u; i < VALUE_KEYS; i += 4u) {
                let at = i * WIDTH + x;
#repeat n STEPS
                let value_0_$n = value_tile[at + $nu * ACROSS];
                let value_1_$n = value_tile[at + WIDTH + $nu * ACROSS];
                let value_2_$n = value_tile[at + 2u * WIDTH + $nu * ACROSS];
                let value_3_$n = value_tile[at + 3u * WIDTH + $nu * ACROSS];
#end
#repeat r LINES
                let weight_$r = tile[(y + $ru) * SCORE_STRIDE + (chunk + i) / 4u];
#repeat n STEPS
                held_$r_$n += weight_$r.x * value_0_$n;
                held_$r_$n += weight_$r.y * value_1_$n;
                held_$r_$n += weight_$r.z * value_2_$n;
                held_$r_$n += weight_$r.w * value_3_$n;
#end
#end
            }
            // The next tile's, once all values of this one have come.
            if (chunk + VALUE_KEYS == KEYS && thread < KEYS) {
                places[thread] = key_at(item, head, min(first + KEYS + thread, item.end_key - 1u));
            }
            workgroupBarrier();
        }
    }
    shares[thread] = total;
    workgroupBarrier();
    if (sharer == 0u) {
        for (var i = 1u; i < SHARERS; i++) { total += shares[thread + i]; }
        factors[row] = 1.0 / total;
    }
    workgroupBarrier();
#repeat r LINES
#repeat n STEPS
    store(item, heads, thread, y + $ru, x + $nu * ACROSS, held_$r_$n);
#end
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
