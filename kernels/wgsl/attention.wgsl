// Paged flash attention of prompts with heads too large for `attention_tiles.wgsl`: a few query tokens of a sequence, with query
// heads that share a key/value head. Softmax is taken online, so memory is linear in the keys.
//
// A workgroup takes one item (x) and GROUP query heads of one key/value head (y: the heads, in chunks of GROUP). It copies
// tiles of KEYS keys and values to workgroup memory, neighbours by neighbouring threads, the next while it computes the last
// one. A thread makes the scores of one key and one row, then sums one group of four elements of the values for a row or two.
//
// Options: those of `attention`; THREADS (at least a quarter of the head), KEYS (of a tile), COPIES (groups of its keys for each
// thread, rounded up), GROUP, TOKENS (of an item, at most).

#include attention
#if QUANTIZE
#include activations
#include quantize
#endif

const ROWS = GROUP * TOKENS;
// Keys lie so far apart, an odd number: threads that read the same element of neighbouring keys meet in no bank.
const STRIDE = GROUPS + 1u - GROUPS % 2u;
// A share of the threads has one for each group of elements; it sums the values for so many rows.
const SHARES = THREADS / GROUPS;
const SHARE_ROWS = (ROWS + SHARES - 1u) / SHARES;
// Scores that a thread makes.
const SCORES = (ROWS * KEYS + THREADS - 1u) / THREADS;

var<workgroup> queries: array<vec4<f32>, ROWS * GROUPS>;
var<workgroup> tile_keys: array<Stored, KEYS * STRIDE>;
var<workgroup> tile_values: array<Stored, KEYS * GROUPS>;
// Of the tile, scores and then weights.
var<workgroup> scores: array<f32, ROWS * KEYS>;
var<workgroup> weights: array<f32, ROWS * KEYS>;
// Of the rows: what sums of before are worth by the largest score so far.
var<workgroup> corrections: array<f32, ROWS>;

// Groups of keys and values on their way to workgroup memory. They have names, not places in an array, so that all are under
// way at the same time in registers.
struct Copies {
#repeat i COPIES
    key_$i: Stored, value_$i: Stored,
#end
}

// Keys past the end, which no row sees, are the last one.
fn fetch(item: Item, head: u32, tile: u32, thread: u32) -> Copies {
    var copies: Copies;
#repeat i COPIES
    {
        let index = thread + $iu * THREADS;
        let at = key_at(item, head, min(tile + index / GROUPS, item.end_key - 1u));
        copies.key_$i = load_key(at.x + index % GROUPS, at.y);
        copies.value_$i = load_value(at.x + index % GROUPS, at.y);
    }
#end
    return copies;
}

fn keep(copies: Copies, thread: u32) {
#repeat i COPIES
    keep_group(copies.key_$i, copies.value_$i, thread + $iu * THREADS);
#end
}

fn keep_group(key: Stored, value: Stored, index: u32) {
    if (index >= KEYS * GROUPS) { return; }
    tile_keys[index / GROUPS * STRIDE + index % GROUPS] = key;
    tile_values[index] = value;
}

// A group of four elements of the head that begins at `start`, zeros past its end.
fn load_group(start: u32, group: u32) -> vec4<f32> {
    var elements: vec4<f32>;
    for (var i = 0u; i < 4u; i++) {
        let element = 4u * group + i;
        elements[i] = select(0.0, qkv[start + min(element, params.head_dim - 1u)], element < params.head_dim);
    }
    return elements;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let item = items[group.x];
    let heads = heads_of(group.y, GROUP);
    var copies = fetch(item, heads.key_value_head, item.first_key, thread);
    if (heads.first >= heads.end) { return; }
    let num_heads = heads.end - heads.first;
    for (var i = thread; i < ROWS * GROUPS; i += THREADS) {
        let row = i / GROUPS;
        let token = item.row + min(row / GROUP, item.num_tokens - 1u);
        let head = heads.first + min(row % GROUP, num_heads - 1u);
        let start = token * qkv_width() + head * params.head_dim;
        queries[i] = load_group(start, i % GROUPS) * params.scale;
    }
    workgroupBarrier();

    // Of the rows whose scores this thread makes.
    var highest: array<f32, SCORES>;
    for (var i = 0u; i < SCORES; i++) { highest[i] = LOWEST; }
    // Of the rows that its share sums.
    var totals: array<f32, SHARE_ROWS>;
    var weighted: array<vec4<f32>, SHARE_ROWS>;
    for (var i = 0u; i < SHARE_ROWS; i++) {
        totals[i] = 0.0;
        weighted[i] = vec4<f32>(0.0);
    }
    let share = thread / GROUPS;
    let element_group = thread % GROUPS;
    for (var tile = item.first_key; tile < item.end_key; tile += KEYS) {
        keep(copies, thread);
        workgroupBarrier();
        if (tile + KEYS < item.end_key) { copies = fetch(item, heads.key_value_head, tile + KEYS, thread); }
        for (var i = thread; i < ROWS * KEYS; i += THREADS) {
            let row = i / KEYS;
            let key = i % KEYS;
            var products = vec4<f32>(0.0);
            for (var j = 0u; j < GROUPS; j++) {
                products += widen(tile_keys[key * STRIDE + j]) * queries[row * GROUPS + j];
            }
            let is_seen = tile + key < item.end_key && tile + key <= item.position + row / GROUP;
            scores[i] = select(LOWEST, products.x + products.y + (products.z + products.w), is_seen);
        }
        workgroupBarrier();
        for (var i = 0u; i < SCORES; i++) {
            let index = thread + i * THREADS;
            if (index >= ROWS * KEYS) { continue; }
            let row = index / KEYS;
            var most = highest[i];
            for (var j = 0u; j < KEYS; j++) { most = max(most, scores[row * KEYS + j]); }
            // A score that is not seen weighs nothing, even where no score is.
            weights[index] = select(0.0, exp(scores[index] - most), scores[index] > LOWEST);
            if (index % KEYS == 0u) { corrections[row] = exp(highest[i] - most); }
            highest[i] = most;
        }
        workgroupBarrier();
        for (var i = 0u; i < SHARE_ROWS; i++) {
            let row = share + i * SHARES;
            if (share >= SHARES || row >= ROWS) { continue; }
            var total = totals[i] * corrections[row];
            var sum = weighted[i] * corrections[row];
            for (var j = 0u; j < KEYS; j++) {
                let weight = weights[row * KEYS + j];
                total += weight;
                // What a weight of 0 meets may be no number.
                if (weight > 0.0) { sum += weight * widen(tile_values[j * GROUPS + element_group]); }
            }
            totals[i] = total;
            weighted[i] = sum;
        }
        workgroupBarrier();
    }

    for (var i = 0u; i < SHARE_ROWS; i++) {
        let row = share + i * SHARES;
        let token = row / GROUP;
        let head = heads.first + row % GROUP;
        let is_there = share < SHARES && row < ROWS && token < item.num_tokens && head < heads.end;
        var result = vec4<f32>(0.0);
        if (is_there) {
            result = weighted[i] / totals[i];
            let start = ((item.row + token) * params.num_heads + head) * params.head_dim;
            for (var j = 0u; j < 4u; j++) {
                let element = 4u * element_group + j;
                if (element < params.head_dim) { output[start + element] = result[j]; }
            }
        }
#if QUANTIZE
        let quantized = quantize_group(thread, result);
        if (is_there) {
            let at = ((item.row + token) * params.num_heads + head) * GROUPS + element_group;
            quants[at] = quantized.word;
            if (at % 8u == 0u) { quant_scales[at / 8u] = vec2<u32>(quantized.scale, quantized.sums); }
        }
        workgroupBarrier();
#endif
    }
}
