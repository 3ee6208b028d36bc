// Paged flash attention: a few query tokens of a sequence, with the query heads that share a key/value head, against a
// range of its keys. Softmax is taken online, so memory is linear in the keys.
//
// A workgroup takes one item (x) and GROUP query heads of one key/value head (y: the heads, in chunks of GROUP). It copies
// tiles of KEYS keys and values to workgroup memory, neighbours by neighbouring threads, the next while it computes the last
// one. A thread makes the scores of one key and one row, then sums one group of four elements of the values for a row or two.
// An item that has not all the keys of its tokens leaves sums, their weights and the largest score in `partial`, which
// `attention_combine.wgsl` joins.
//
// With STORES the rows are of one token each, not yet rotated, whose keys and values are in the cache but for its own:
// queries and key are rotated here, and key and value stored by the first chunk whose range ends with them. Nobody reads that
// place of the cache in this dispatch.
//
// Options: those of `attention`; THREADS (at least a quarter of the head), KEYS (of a tile), COPIES (groups of its keys for each
// thread, rounded up), GROUP, TOKENS (of an item, at most).

#include attention
#if QUANTIZE
#include activations
#include quantize
#endif

const ROWS = GROUP * TOKENS;
const NONE = 0xffffffffu;
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
// Of the rows: the largest score so far, and what sums of before are worth by it.
var<workgroup> largest: array<f32, ROWS>;
var<workgroup> corrections: array<f32, ROWS>;
#if STORES
// The token's own key and value.
var<workgroup> fresh: array<Stored, 2u * GROUPS>;
#endif

// Groups of keys and values on their way to workgroup memory. They have names, not places in an array, so that all are under
// way at the same time in registers.
struct Copies {
#repeat i COPIES
    key_$i: Stored, value_$i: Stored,
#end
}

fn fetch(item: Item, head: u32, tile: u32, thread: u32) -> Copies {
    var copies: Copies;
    // Keys that are in the cache.
    var end = item.end_key;
#if STORES
    end = min(end, item.position);
#endif
#repeat i COPIES
    {
        let index = thread + $iu * THREADS;
        let key = tile + index / GROUPS;
        if (index < KEYS * GROUPS && key < end) {
            let at = key_at(item, head, key);
            copies.key_$i = load_key(at.x + index % GROUPS, at.y);
            copies.value_$i = load_value(at.x + index % GROUPS, at.y);
        }
    }
#end
    return copies;
}

fn keep(item: Item, copies: Copies, tile: u32, thread: u32) {
#repeat i COPIES
    keep_group(item, copies.key_$i, copies.value_$i, tile, thread + $iu * THREADS);
#end
}

fn keep_group(item: Item, cached_key: Stored, cached_value: Stored, tile: u32, index: u32) {
    if (index >= KEYS * GROUPS) { return; }
    let group = index % GROUPS;
    var key = cached_key;
    var value = cached_value;
#if STORES
    if (tile + index / GROUPS == item.position) {
        key = fresh[group];
        value = fresh[GROUPS + group];
    }
#endif
    tile_keys[index / GROUPS * STRIDE + group] = key;
    tile_values[index] = value;
}

// A group of four elements of the head that begins at `start`, zeros past its end.
fn load_group(start: u32, row: u32, group: u32, is_rotated: bool) -> vec4<f32> {
    var elements = vec4<f32>(0.0);
    for (var i = 0u; i < 4u; i++) {
        let element = 4u * group + i;
        if (element >= params.head_dim) { continue; }
#if STORES
        if (is_rotated && element < params.rotary_dim) {
            elements[i] = rotated(start, row, element);
            continue;
        }
#endif
        elements[i] = qkv[start + element];
    }
    return elements;
}

#if STORES
fn rotated(start: u32, row: u32, element: u32) -> f32 {
    let pairs = params.rotary_dim / 2u;
    let is_interleaved = params.is_interleaved != 0u;
    let pair = select(element % pairs, element / 2u, is_interleaved);
    let first = start + select(pair, 2u * pair, is_interleaved);
    let is_second = select(element >= pairs, element % 2u == 1u, is_interleaved);
    let x = qkv[first];
    let y = qkv[first + select(pairs, 1u, is_interleaved)];
    let angle = angles[row * pairs + pair];
    return select(x * angle.x - y * angle.y, x * angle.y + y * angle.x, is_second);
}

// Makes the token's key and value as the cache holds them and, if that is for this workgroup to do, stores them.
fn make_fresh(item: Item, key_value_head: u32, thread: u32, is_stored: bool) {
    let start = item.row * qkv_width() + (params.num_heads + key_value_head) * params.head_dim;
    let at = key_at(item, key_value_head, item.position);
    for (var i = thread; i < 2u * GROUPS; i += THREADS) {
        let group = i % GROUPS;
        if (i < GROUPS) {
            let key = narrow(load_group(start, item.row, group, true));
            fresh[i] = key;
            if (is_stored) { store_key(at.x + group, at.y, key); }
        } else {
            let value_start = start + params.num_key_value_heads * params.head_dim;
            let value = narrow(load_group(value_start, item.row, group, false));
            fresh[i] = value;
            if (is_stored) { store_value(at.x + group, at.y, value); }
        }
    }
}
#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let item = items[group.x];
    let heads = heads_of(group.y, GROUP);
    var copies = fetch(item, heads.key_value_head, item.first_key, thread);
#if STORES
    if (item.end_key > item.position) {
        make_fresh(item, heads.key_value_head, thread, group.y % params.chunks == 0u);
    }
#endif
    if (heads.first >= heads.end) { return; }
    let num_heads = heads.end - heads.first;
    for (var i = thread; i < ROWS * GROUPS; i += THREADS) {
        let row = i / GROUPS;
        let token = item.row + min(row / GROUP, item.num_tokens - 1u);
        let head = heads.first + min(row % GROUP, num_heads - 1u);
        let start = token * qkv_width() + head * params.head_dim;
        queries[i] = load_group(start, token, i % GROUPS, true) * params.scale;
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
        keep(item, copies, tile, thread);
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
            if (index % KEYS == 0u) {
                corrections[row] = exp(highest[i] - most);
                largest[row] = most;
            }
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
                if (TOKENS == 1u || weight > 0.0) { sum += weight * widen(tile_values[j * GROUPS + element_group]); }
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
        if (is_there && item.slot == NONE) {
            result = weighted[i] / totals[i];
            let start = ((item.row + token) * params.num_heads + head) * params.head_dim;
            for (var j = 0u; j < 4u; j++) {
                let element = 4u * element_group + j;
                if (element < params.head_dim) { output[start + element] = result[j]; }
            }
        } else if (is_there) {
            let at = ((item.slot + token) * params.num_heads + head) * (GROUPS + 1u);
            partial[at + element_group] = weighted[i];
            if (element_group == 0u) { partial[at + GROUPS] = vec4<f32>(largest[row], totals[i], 0.0, 0.0); }
        }
#if QUANTIZE
        if (item.slot == NONE) {
            let quantized = quantize_group(thread, result);
            if (is_there) {
                let at = ((item.row + token) * params.num_heads + head) * GROUPS + element_group;
                quants[at] = quantized.word;
                if (at % 8u == 0u) { quant_scales[at / 8u] = vec2<u32>(quantized.scale, quantized.sums); }
            }
            workgroupBarrier();
        }
#endif
    }
}
