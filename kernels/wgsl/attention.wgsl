// Paged flash attention: a few query tokens of a sequence, with the query heads that share a key/value head, against a
// range of its keys. Softmax is taken online, so memory is linear in the keys.
//
// A workgroup takes one item (x) and GROUP query heads of one key/value head (y: the heads, in chunks of GROUP). For each
// tile of THREADS keys a thread first makes the scores of one key, then weighs four elements of every value of its share.
// An item that has not all the keys of its tokens leaves sums, their weights and the largest score in `partial`, which
// `attention_combine.wgsl` joins.
//
// Options: those of the cache; PARTED (the cache of a layer is in four buffers); THREADS (at least a quarter of the head), GROUP, TOKENS (of an item, at most), GROUPS (groups
// of four elements of a head), BLOCK_SIZE, QUANTIZE (the output as 8-bit blocks as well; heads are then whole blocks).

struct Params {
    num_heads: u32, num_key_value_heads: u32, head_dim: u32, group_size: u32, group_offset: u32, scale: f32,
    chunks: u32, part_blocks: u32,
}
#include params

struct Item {
    // First row of `qkv`, rows, where the block table begins, the first key of the range,
    row: u32, num_tokens: u32, table: u32, first_key: u32,
    // its end, the position of the first row, and where to leave partial sums: all ones if there is no need.
    end_key: u32, position: u32, slot: u32, unused: u32,
}

@group(0) @binding(0) var<storage, read> qkv: array<f32>;
@group(0) @binding(1) var<storage, read> items: array<Item>;
@group(0) @binding(2) var<storage, read> tables: array<u32>;
#if WIDE
alias Stored = vec4<u32>;
#else
alias Stored = vec2<u32>;
#endif
@group(0) @binding(3) var<storage, read> keys: array<Stored>;
@group(0) @binding(4) var<storage, read> values: array<Stored>;
@group(0) @binding(5) var<storage, read_write> output: array<f32>;
@group(0) @binding(6) var<storage, read_write> partial: array<vec4<f32>>;
#if QUANTIZE
@group(0) @binding(7) var<storage, read_write> quants: array<u32>;
@group(0) @binding(8) var<storage, read_write> quant_scales: array<vec2<u32>>;
#endif
#if PARTED
@group(0) @binding(9) var<storage, read> keys_1: array<Stored>;
@group(0) @binding(10) var<storage, read> values_1: array<Stored>;
@group(0) @binding(11) var<storage, read> keys_2: array<Stored>;
@group(0) @binding(12) var<storage, read> values_2: array<Stored>;
@group(0) @binding(13) var<storage, read> keys_3: array<Stored>;
@group(0) @binding(14) var<storage, read> values_3: array<Stored>;
#endif
#include kv_cache
#if QUANTIZE
#include activations
#include quantize
#endif

const ROWS = GROUP * TOKENS;
const NONE = 0xffffffffu;
const LOWEST = -3.4e38;
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

fn widen(group: Stored) -> vec4<f32> {
#if WIDE
    return bitcast<vec4<f32>>(group);
#else
    if (DTYPE == 0u) { return vec4<f32>(unpack2x16float(group.x), unpack2x16float(group.y)); }
    return vec4<f32>(unpack_bf16(group.x), unpack_bf16(group.y));
#endif
}

// Where the elements of a key begin, in groups, and in which part of the cache.
fn key_at(item: Item, head: u32, key: u32) -> vec2<u32> {
    var block = tables[item.table + key / BLOCK_SIZE];
    var part = 0u;
#if PARTED
    part = block / params.part_blocks;
    block %= params.part_blocks;
#endif
    let row = (block * params.num_key_value_heads + head) * BLOCK_SIZE + key % BLOCK_SIZE;
    return vec2<u32>(row * GROUPS, part);
}

fn load_key(at: u32, part: u32) -> vec4<f32> {
#if PARTED
    switch (part) {
        case 1u: { return widen(keys_1[at]); }
        case 2u: { return widen(keys_2[at]); }
        case 3u: { return widen(keys_3[at]); }
        default: {}
    }
#endif
    return widen(keys[at]);
}

fn load_value(at: u32, part: u32) -> vec4<f32> {
#if PARTED
    switch (part) {
        case 1u: { return widen(values_1[at]); }
        case 2u: { return widen(values_2[at]); }
        case 3u: { return widen(values_3[at]); }
        default: {}
    }
#endif
    return widen(values[at]);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32,
#if SUBGROUPS
        @builtin(subgroup_id) subgroup: u32, @builtin(num_subgroups) num_subgroups: u32,
        @builtin(subgroup_invocation_id) lane: u32
#endif
) {
    let item = items[group.x];
    let key_value_head = group.y / params.chunks;
    // Query heads of this key/value head, and of them this workgroup's.
    let group_start = key_value_head * params.group_size;
    let heads_start = max(group_start, params.group_offset) - params.group_offset;
    let heads_end = min(group_start + params.group_size - min(params.group_offset, group_start + params.group_size),
        params.num_heads);
    let first_head = heads_start + group.y % params.chunks * GROUP;
    if (first_head >= heads_end) { return; }
    let num_heads = min(heads_end - first_head, GROUP);
    let width = (params.num_heads + 2u * params.num_key_value_heads) * params.head_dim;

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
            let at = key_at(item, key_value_head, key);
            places[thread] = at;
            for (var i = 0u; i < GROUPS; i++) {
                let elements = load_key(at.x + i, at.y);
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
                let elements = load_value(at.x + element_group, at.y);
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
