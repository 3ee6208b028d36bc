// Paged flash attention: a few query tokens of a sequence, with the query heads that share a key/value head, against a
// range of its keys. Softmax is taken online, so memory is linear in the keys.
//
// A workgroup takes one item (x) and GROUP query heads of one key/value head (y: the heads, in chunks of GROUP). For each
// tile of THREADS keys a thread first makes the scores of one key, then weighs four elements of every value of its share.
// An item that has not all the keys of its tokens leaves sums, their weights and the largest score in `partial`, which
// `attention_combine.wgsl` joins.
//
// Options: those of `attention`; THREADS (at least a quarter of the head), GROUP, TOKENS (of an item, at most).

#include attention
#if QUANTIZE
#include activations
#include quantize
#endif

const ROWS = GROUP * TOKENS;
const NONE = 0xffffffffu;
// Values are summed in so many shares of the keys.
const SHARES = THREADS / GROUPS;

var<workgroup> queries: array<vec4<f32>, ROWS * GROUPS>;
var<workgroup> weights: array<f32, ROWS * THREADS>;
#if SUBGROUPS
var<workgroup> maxima: array<f32, ROWS * THREADS / 4u>;
#else
var<workgroup> maxima: array<f32, ROWS * THREADS>;
#endif
var<workgroup> sums: array<vec4<f32>, THREADS>;
// Where the keys of the tile begin.
var<workgroup> places: array<vec2<u32>, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32,
#if SUBGROUPS
        @builtin(subgroup_id) subgroup: u32, @builtin(num_subgroups) num_subgroups: u32,
        @builtin(subgroup_invocation_id) lane: u32
#endif
) {
    let item = items[group.x];
    let heads = heads_of(group.y, GROUP);
    if (heads.first >= heads.end) { return; }
    let first_head = heads.first;
    let num_heads = heads.end - heads.first;
    let width = qkv_width();

    for (var i = thread; i < ROWS * GROUPS; i += THREADS) {
        let row = i / GROUPS;
        let token = min(row / GROUP, item.num_tokens - 1u);
        let head = first_head + min(row % GROUP, num_heads - 1u);
        let start = (item.row + token) * width + head * params.head_dim;
        var elements = vec4<f32>(0.0);
        for (var j = 0u; j < 4u; j++) {
            let element = 4u * (i % GROUPS) + j;
            if (element < params.head_dim) { elements[j] = qkv[start + element] * params.scale; }
        }
        queries[i] = elements;
    }
    workgroupBarrier();

    var largest: array<f32, ROWS>;
    var totals: array<f32, ROWS>;
    var weighted: array<vec4<f32>, ROWS>;
    for (var row = 0u; row < ROWS; row++) {
        largest[row] = LOWEST;
        totals[row] = 0.0;
        weighted[row] = vec4<f32>(0.0);
    }
    let share = thread / GROUPS;
    let element_group = thread % GROUPS;
    for (var tile = item.first_key; tile < item.end_key; tile += THREADS) {
        let key = tile + thread;
        var scores: array<f32, ROWS>;
        for (var row = 0u; row < ROWS; row++) { scores[row] = 0.0; }
        if (key < item.end_key) {
            let at = key_at(item, heads.key_value_head, key);
            places[thread] = at;
            for (var i = 0u; i < GROUPS; i++) {
                let elements = widen(load_key(at.x + i, at.y));
                for (var row = 0u; row < ROWS; row++) { scores[row] += dot(elements, queries[row * GROUPS + i]); }
            }
        }
        for (var row = 0u; row < ROWS; row++) {
            let is_seen = key < item.end_key && key <= item.position + row / GROUP;
            scores[row] = select(LOWEST, scores[row], is_seen);
        }
#if SUBGROUPS
        for (var row = 0u; row < ROWS; row++) {
            let highest = subgroupMax(scores[row]);
            if (lane == 0u) { maxima[subgroup * ROWS + row] = highest; }
        }
        workgroupBarrier();
        let num_maxima = num_subgroups;
#else
        for (var row = 0u; row < ROWS; row++) { maxima[thread * ROWS + row] = scores[row]; }
        workgroupBarrier();
        for (var distance = THREADS / 2u; distance > 0u; distance /= 2u) {
            if (thread < distance) {
                for (var row = 0u; row < ROWS; row++) {
                    let at = thread * ROWS + row;
                    maxima[at] = max(maxima[at], maxima[at + distance * ROWS]);
                }
            }
            workgroupBarrier();
        }
        let num_maxima = 1u;
#endif
        for (var row = 0u; row < ROWS; row++) {
            var highest = largest[row];
            for (var i = 0u; i < num_maxima; i++) { highest = max(highest, maxima[i * ROWS + row]); }
            let correction = exp(largest[row] - highest);
            largest[row] = highest;
            weighted[row] *= correction;
            // A score that is not seen weighs nothing, even where no score is.
            let weight = select(0.0, exp(scores[row] - highest), scores[row] > LOWEST);
            totals[row] = totals[row] * correction + weight;
            weights[row * THREADS + thread] = weight;
        }
        workgroupBarrier();
        if (share < SHARES) {
            let num_keys = min(THREADS, item.end_key - tile);
            for (var i = share; i < num_keys; i += SHARES) {
                let at = places[i];
                let elements = widen(load_value(at.x + element_group, at.y));
                for (var row = 0u; row < ROWS; row++) {
                    let weight = weights[row * THREADS + i];
                    // What a weight of 0 meets may be no number.
                    if (TOKENS == 1u || weight > 0.0) { weighted[row] += weight * elements; }
                }
            }
        }
        workgroupBarrier();
    }

    // The weights of all keys.
#if SUBGROUPS
    for (var row = 0u; row < ROWS; row++) {
        let sum = subgroupAdd(totals[row]);
        if (lane == 0u) { maxima[subgroup * ROWS + row] = sum; }
    }
    workgroupBarrier();
    let num_totals = num_subgroups;
#else
    for (var row = 0u; row < ROWS; row++) { maxima[thread * ROWS + row] = totals[row]; }
    workgroupBarrier();
    for (var distance = THREADS / 2u; distance > 0u; distance /= 2u) {
        if (thread < distance) {
            for (var row = 0u; row < ROWS; row++) {
                maxima[thread * ROWS + row] += maxima[(thread + distance) * ROWS + row];
            }
        }
        workgroupBarrier();
    }
    let num_totals = 1u;
#endif
    for (var row = 0u; row < ROWS; row++) {
        sums[thread] = weighted[row];
        workgroupBarrier();
        var total = 0.0;
        for (var i = 0u; i < num_totals; i++) { total += maxima[i * ROWS + row]; }
        let token = row / GROUP;
        let head = row % GROUP;
        let is_there = thread < GROUPS && token < item.num_tokens && head < num_heads;
        var result = vec4<f32>(0.0);
        if (is_there) {
            var sum = sums[thread];
            for (var i = 1u; i < SHARES; i++) { sum += sums[i * GROUPS + thread]; }
            if (item.slot == NONE) {
                result = sum / total;
                let start = ((item.row + token) * params.num_heads + first_head + head) * params.head_dim;
                for (var j = 0u; j < 4u; j++) {
                    let element = 4u * thread + j;
                    if (element < params.head_dim) { output[start + element] = result[j]; }
                }
            } else {
                let at = ((item.slot + token) * params.num_heads + first_head + head) * (GROUPS + 1u);
                partial[at + thread] = sum;
                if (thread == 0u) { partial[at + GROUPS] = vec4<f32>(largest[row], total, 0.0, 0.0); }
            }
        }
#if QUANTIZE
        let quantized = quantize_group(thread, result);
        if (is_there && item.slot == NONE) {
            let at = ((item.row + token) * params.num_heads + first_head + head) * GROUPS + thread;
            quants[at] = quantized.word;
            if (at % 8u == 0u) { quant_scales[at / 8u] = vec2<u32>(quantized.scale, quantized.sums); }
        }
#endif
        workgroupBarrier();
    }
}
