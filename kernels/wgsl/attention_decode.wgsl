// Paged flash attention of one token: GROUP query heads that share a key/value head, against a range of its keys.
//
// A workgroup takes one item (x) and GROUP query heads of one key/value head (y: the heads, in chunks of GROUP). Each element of
// its keys and values is read once, straight to registers, four keys at a time. Rounds of ROUND_QUADS four keys, one for most
// ranges, have three parts:
//  - scores: KEY_LANES neighbouring threads share four keys, each with every KEY_LANES-th group of four elements;
//  - weights: a share of the threads has one for each four keys of its query head; the softmax is taken online over rounds;
//  - sums: a share of the threads has one for each group of elements of the values, and takes every SHARES-th four keys.
// An item that has not all the keys of its token leaves sums, their weights and the largest score in `partial`. The last
// workgroup of a token's joins them (JOINS), where workgroups can see what others wrote, else `attention_combine.wgsl`.
//
// With STORES the row is not yet rotated, and its key and value are not yet in the cache: queries and key are rotated here, and
// key and value stored by the first chunk whose range ends with them. What others read of that place in this dispatch they do
// not use.
//
// Neighbours are those of a subgroup: where threads shuffle (KEY_LANES > 1), their numbers are made of its own, since the order of
// the local index is promised by nobody. Subgroups are full.
//
// Options: those of `attention`; HEAD_DIM, GROUP (a power of two), THREADS (at least GROUP * GROUPS), KEY_LANES (a power of two, at
// most THREADS / GROUP and the threads of a subgroup) with its logarithm LANE_STEPS: HALVINGS steps that halve the heads and
// MORE_STEPS that do not; SLICE (groups of a key that a thread loads at once), LOADED_QUADS (four keys whose values a thread loads
// at once), POOL (workgroup memory for scores and sums, in vectors: at least THREADS, and for half of the shares), QUAD (4, for
// #repeat alone), MAX_RANGES (of a token, at most THREADS / GROUP).

#include attention
#if QUANTIZE
#include activations
#include quantize
#endif

const NONE = 0xffffffffu;
// Of a round, four keys each.
const ROUND_QUADS = POOL / GROUP;
// Threads that share four keys, and times that they load until they had all groups.
const SLOTS = THREADS / KEY_LANES;
const SLICE_GROUPS = SLICE * KEY_LANES;
const SLICES = (GROUPS + SLICE_GROUPS - 1u) / SLICE_GROUPS;
// Whether all threads have a group at each load.
const IS_EVEN = GROUPS % SLICE_GROUPS == 0u;
// Threads that weigh the keys of a head.
const HEAD_THREADS = THREADS / GROUP;
const HEAD_SLOTS = HEAD_THREADS / KEY_LANES;
// Threads that sum values, and those whose sums `pool` holds at once: it has room for half of them at least.
const SHARES = THREADS / GROUPS;
const ALL_GROUPS = GROUP * GROUPS;
const HAS_ROOM = SHARES * ALL_GROUPS <= POOL;
const LAST_SHARES = select((SHARES + 1u) / 2u, SHARES, HAS_ROOM);
// Heads whose scores a thread has once the lanes have added theirs.
const LANE_HEADS = GROUP >> HALVINGS;

var<workgroup> queries: array<vec4<f32>, ALL_GROUPS>;
// Scores, then weights, four keys each, by head; at the end sums of shares.
var<workgroup> pool: array<vec4<f32>, POOL>;
// What each slot has found for its head: the largest score, at the end the sum of the weights.
var<workgroup> slot_results: array<f32, SLOTS>;
// Of the heads: the largest score so far, and what sums of before are worth by it.
var<workgroup> running_maxima: array<f32, GROUP>;
var<workgroup> rescale: array<f32, GROUP>;
#if STORES
// The token's own key and value.
var<workgroup> own_key_value: array<Stored, 2u * GROUPS>;
#endif
#if JOINS
// Ranges whose workgroups were there before.
var<workgroup> num_before: u32;
#endif
#include decode_rows

// What a thread knows of its head's softmax so far: the largest score, and the sum of the weights that it made itself.
struct Softmax { running_max: f32, running_sum: f32 }

// Groups on their way, of four keys. They have names, not places in an array, so that all are under way at the same time in
// registers.
struct Keys {
#repeat j SLICE
    at_0_$j: Stored, at_1_$j: Stored, at_2_$j: Stored, at_3_$j: Stored,
#end
}

struct Values {
#repeat i LOADED_QUADS
    at_$i_0: Stored, at_$i_1: Stored, at_$i_2: Stored, at_$i_3: Stored,
#end
}

// Where a key of four is, of which the first one is at `start`.
fn place_of(item: Item, head: u32, start: vec2<u32>, first: u32, index: u32, last_key: u32) -> vec2<u32> {
    if (BLOCK_SIZE % 4u == 0u) { return vec2<u32>(start.x + index * GROUPS, start.y); }
    return key_at(item, head, min(first + index, last_key));
}

// Who has no keys loads the last ones.

// `first_group` of four keys and every KEY_LANES-th group from there on.
fn fetch_keys(item: Item, head: u32, last_key: u32, quad: u32, first_group: u32) -> Keys {
    var fetched: Keys;
    let first = 4u * min(quad, last_key / 4u);
    let start = key_at(item, head, first);
#repeat i QUAD
    {
        let place = place_of(item, head, start, first, $iu, last_key);
#repeat j SLICE
        {
            let group = first_group + $ju * KEY_LANES;
            fetched.at_$i_$j = load_key(place.x + select(min(group, GROUPS - 1u), group, IS_EVEN), place.y);
        }
#end
    }
#end
    return fetched;
}

// One group of the values of four keys and of every SHARES-th four from there on.
fn fetch_values(item: Item, head: u32, last_key: u32, first_quad: u32, group: u32) -> Values {
    var fetched: Values;
#repeat i LOADED_QUADS
    {
        let first = 4u * min(first_quad + $iu * SHARES, last_key / 4u);
        let start = key_at(item, head, first);
#repeat j QUAD
        {
            let place = place_of(item, head, start, first, $ju, last_key);
            fetched.at_$i_$j = load_value(place.x + group, place.y);
        }
#end
    }
#end
    return fetched;
}

#if STORES
// Four keys with the token's own in place of one.
fn with_own(fetched: Keys, index: u32, first_group: u32) -> Keys {
    var four = fetched;
#repeat j SLICE
    if (IS_EVEN || first_group + $ju * KEY_LANES < GROUPS) {
        let own = own_key_value[first_group + $ju * KEY_LANES];
        four.at_0_$j = select(four.at_0_$j, own, index == 0u);
        four.at_1_$j = select(four.at_1_$j, own, index == 1u);
        four.at_2_$j = select(four.at_2_$j, own, index == 2u);
        four.at_3_$j = select(four.at_3_$j, own, index == 3u);
    }
#end
    return four;
}
#endif

// Four values of which the cache has those before `end`: with the token's own (STORES), and zeros, where weights are zero too.
fn completed(four: mat4x4<f32>, item: Item, first: u32, end: u32, group: u32) -> mat4x4<f32> {
    var result = four;
    var own = vec4<f32>(0.0);
#if STORES
    own = widen(own_key_value[GROUPS + group]);
#endif
#repeat i QUAD
    if (first + $iu >= end) { result[$i] = select(vec4<f32>(0.0), own, first + $iu == item.position); }
#end
    return result;
}

fn widen_four(a: Stored, b: Stored, c: Stored, d: Stored) -> mat4x4<f32> {
    return mat4x4<f32>(widen(a), widen(b), widen(c), widen(d));
}

// In steps that each are one fused multiplication and addition of vectors.
fn plus_product(sum: vec4<f32>, columns: mat4x4<f32>, factors: vec4<f32>) -> vec4<f32> {
    var result = sum + columns[0] * factors.x;
    result += columns[1] * factors.y;
    result += columns[2] * factors.z;
    result += columns[3] * factors.w;
    return result;
}

fn lanes_max(value: f32) -> f32 {
    var most = value;
#repeat i LANE_STEPS
    most = max(most, subgroupShuffleXor(most, 1u << $iu));
#end
    return most;
}

fn lanes_sum(value: f32) -> f32 {
    var sum = value;
#repeat i LANE_STEPS
    sum += subgroupShuffleXor(sum, 1u << $iu);
#end
    return sum;
}

// Adds what the lanes have of the scores of four keys; lane after lane has LANE_HEADS of the heads then, in their order, or as
// many neighbours as there are more lanes than heads have the same.
fn add_lanes(products: array<vec4<f32>, GROUP>, lane: u32) -> array<vec4<f32>, GROUP> {
    var sums = products;
#repeat i HALVINGS
    {
        const HALF_$i = GROUP >> ($iu + 1u);
        let distance = KEY_LANES >> ($iu + 1u);
        let is_upper = (lane & distance) != 0u;
        for (var j = 0u; j < HALF_$i; j++) {
            let upper = sums[j + HALF_$i];
            let given = select(upper, sums[j], is_upper);
            sums[j] = select(sums[j], upper, is_upper) + subgroupShuffleXor(given, distance);
        }
    }
#end
#repeat i MORE_STEPS
    for (var j = 0u; j < LANE_HEADS; j++) { sums[j] += subgroupShuffleXor(sums[j], 1u << $iu); }
#end
    return sums;
}

// Leaves the scores of `num_quads` four keys from `first` on; the first loads are done.
fn make_scores(item: Item, head: u32, last_key: u32, first: u32, num_quads: u32, fetched: Keys, thread: u32) {
    let slot = thread / KEY_LANES;
    let lane = thread % KEY_LANES;
    var loaded = fetched;
    for (var step = 0u; step < num_quads; step += SLOTS) {
        let quad = first + step + slot;
        var products: array<vec4<f32>, GROUP>;
        for (var i = 0u; i < GROUP; i++) { products[i] = vec4<f32>(0.0); }
        for (var slice = 0u; slice < SLICES; slice++) {
            let first_group = slice * SLICE_GROUPS + lane;
#if STORES
            if (quad == item.position / 4u) { loaded = with_own(loaded, item.position % 4u, first_group); }
#endif
#repeat j SLICE
            if (IS_EVEN || first_group + $ju * KEY_LANES < GROUPS) {
                let group = first_group + $ju * KEY_LANES;
                let columns = transpose(widen_four(loaded.at_0_$j, loaded.at_1_$j, loaded.at_2_$j, loaded.at_3_$j));
                for (var i = 0u; i < GROUP; i++) {
                    products[i] = plus_product(products[i], columns, queries[i * GROUPS + group]);
                }
            }
#end
            let is_done = slice + 1u == SLICES;
            if (!is_done || step + SLOTS < num_quads) {
                let next_group = select(first_group + SLICE_GROUPS, lane, is_done);
                loaded = fetch_keys(item, head, last_key, quad + select(0u, SLOTS, is_done), next_group);
            }
        }
        let sums = add_lanes(products, lane);
        // Of neighbours that have the same head the first one.
        if (step + slot < num_quads && lane % max(KEY_LANES / GROUP, 1u) == 0u) {
            let is_seen = vec4<u32>(4u * quad) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(item.end_key);
            for (var i = 0u; i < LANE_HEADS; i++) {
                let at = (lane * GROUP / KEY_LANES + i) * ROUND_QUADS + step + slot;
                pool[at] = select(vec4<f32>(LOWEST), sums[i], is_seen);
            }
        }
    }
}

// The largest of what the threads of this one's head have.
fn head_max(value: f32, thread: u32) -> f32 {
    var most = lanes_max(value);
    if (thread % KEY_LANES == 0u) { slot_results[thread / KEY_LANES] = most; }
    workgroupBarrier();
    for (var i = 0u; i < HEAD_SLOTS; i++) { most = max(most, slot_results[thread / HEAD_THREADS * HEAD_SLOTS + i]); }
    return most;
}

// Makes weights of the scores, relative to the largest one so far.
fn make_weights(num_quads: u32, before: Softmax, thread: u32) -> Softmax {
    let head = thread / HEAD_THREADS;
    let first = thread % HEAD_THREADS;
    var most = before.running_max;
    for (var i = first; i < num_quads; i += HEAD_THREADS) {
        let scores = pool[head * ROUND_QUADS + i];
        most = max(most, max(max(scores.x, scores.y), max(scores.z, scores.w)));
    }
    most = head_max(most, thread);
    let factor = exp(before.running_max - most);
    var total = before.running_sum * factor;
    for (var i = first; i < num_quads; i += HEAD_THREADS) {
        // A key that is not there weighs nothing.
        let weights = exp(pool[head * ROUND_QUADS + i] - most);
        total += weights.x + weights.y + (weights.z + weights.w);
        pool[head * ROUND_QUADS + i] = weights;
    }
    if (first == 0u) {
        running_maxima[head] = most;
        rescale[head] = factor;
    }
    return Softmax(most, total);
}

// Adds the values of a round, times their weights; the first loads are done.
fn add_values(item: Item, head: u32, end: u32, last_key: u32, first: u32, num_quads: u32, fetched: Values,
        before: array<vec4<f32>, GROUP>, thread: u32) -> array<vec4<f32>, GROUP> {
    let share = thread / GROUPS;
    let group = thread % GROUPS;
    var sums = before;
    var values = fetched;
    for (var i = 0u; i < GROUP; i++) { sums[i] *= rescale[i]; }
    // Threads of no share sum nothing.
    for (var step = select(num_quads, share, share < SHARES); step < num_quads; step += LOADED_QUADS * SHARES) {
#repeat i LOADED_QUADS
        if (step + $iu * SHARES < num_quads) {
            let quad = step + $iu * SHARES;
            let first_key = 4u * (first + quad);
            var four = widen_four(values.at_$i_0, values.at_$i_1, values.at_$i_2, values.at_$i_3);
            if (first_key + 4u > end) { four = completed(four, item, first_key, end, group); }
            for (var j = 0u; j < GROUP; j++) { sums[j] = plus_product(sums[j], four, pool[j * ROUND_QUADS + quad]); }
        }
#end
        if (step + LOADED_QUADS * SHARES < num_quads) {
            values = fetch_values(item, head, last_key, first + step + LOADED_QUADS * SHARES, group);
        }
    }
    return sums;
}

// Leaves the sums of LAST_SHARES in `pool`, and of some threads of each head the weights.
fn leave_shares(running_sum: f32, own: array<vec4<f32>, GROUP>, thread: u32) {
    let total = lanes_sum(running_sum);
    if (thread % KEY_LANES == 0u) { slot_results[thread / KEY_LANES] = total; }
    let share = thread / GROUPS;
    var sums = own;
    if (!HAS_ROOM) {
        let at = thread % GROUPS + share % LAST_SHARES * ALL_GROUPS;
        if (share >= LAST_SHARES && share < SHARES) {
            for (var i = 0u; i < GROUP; i++) { pool[at + i * GROUPS] = sums[i]; }
        }
        workgroupBarrier();
        if (share + LAST_SHARES < SHARES) {
            for (var i = 0u; i < GROUP; i++) { sums[i] += pool[at + i * GROUPS]; }
        }
        workgroupBarrier();
    }
    if (share < LAST_SHARES) {
        let at = thread % GROUPS + share * ALL_GROUPS;
        for (var i = 0u; i < GROUP; i++) { pool[at + i * GROUPS] = sums[i]; }
    }
    workgroupBarrier();
}

// Adds the shares, each thread those of one group of elements of a head, and writes what comes of it.
fn write_heads(item: Item, heads: Heads, is_whole: bool, thread: u32) {
    let group = thread % GROUPS;
    let own_head = thread / GROUPS;
    let head = heads.first + own_head;
    let is_there = own_head < GROUP && head < heads.end;
    var sum = vec4<f32>(0.0);
    var total = 0.0;
    if (is_there) {
        for (var i = 0u; i < LAST_SHARES; i++) { sum += pool[i * ALL_GROUPS + thread]; }
        for (var i = 0u; i < HEAD_SLOTS; i++) { total += slot_results[own_head * HEAD_SLOTS + i]; }
    }
    if (is_there && is_whole) {
        sum /= total;
        let start = (item.row * params.num_heads + head) * HEAD_DIM;
        for (var i = 0u; i < 4u; i++) {
            if (4u * group + i < HEAD_DIM) { output[start + 4u * group + i] = sum[i]; }
        }
    } else if (is_there) {
        let at = (item.slot * params.num_heads + head) * (GROUPS + 1u);
        partial[at + group] = sum;
        if (group == 0u) { partial[at + GROUPS] = vec4<f32>(running_maxima[own_head], total, 0.0, 0.0); }
    }
#if QUANTIZE
    if (is_whole) {
        let quantized = quantize_group(thread, sum);
        if (is_there) {
            let at = (item.row * params.num_heads + head) * GROUPS + group;
            quants[at] = quantized.word;
            if (at % 8u == 0u) { quant_scales[at / 8u] = vec2<u32>(quantized.scale, quantized.sums); }
        }
    }
#endif
}

#if JOINS
// Whether this workgroup leaves the last sums of the token's ranges; it sees those of all others then.
fn is_last(item: Item, index: u32, thread: u32) -> bool {
    // What all threads have left comes before the count.
    storageBarrier();
    if (thread == 0u) {
        let at = (item.slot - item.range % MAX_RANGES) * params.num_key_value_heads * params.chunks + index;
        num_before = atomicAdd(&arrivals[at], 1u);
        // Ready for the next dispatch.
        if (num_before + 1u == item.range / MAX_RANGES) { atomicStore(&arrivals[at], 0u); }
    }
    let is_last = workgroupUniformLoad(&num_before) + 1u == item.range / MAX_RANGES;
    storageBarrier();
    return is_last;
}

// Sums of a share's ranges of the token, and of one range, which this thread weighs for its head, the weights.
struct Joined { sums: array<vec4<f32>, GROUP>, total: f32 }

fn join_ranges(item: Item, heads: Heads, thread: u32) -> Joined {
    let num_ranges = item.range / MAX_RANGES;
    let last_head = heads.end - heads.first - 1u;
    let stride = params.num_heads * (GROUPS + 1u);
    let first = (item.slot - item.range % MAX_RANGES) * stride + heads.first * (GROUPS + 1u);
    let weighed_range = min(thread % HEAD_THREADS, num_ranges - 1u);
    let weight = partial[first + weighed_range * stride + min(thread / HEAD_THREADS, last_head) * (GROUPS + 1u) + GROUPS];
    // The sums of the first range are under way before it is known what they are worth.
    let share = thread / GROUPS;
    var range = min(share, num_ranges - 1u);
    var joined: Joined;
    for (var i = 0u; i < GROUP; i++) {
        joined.sums[i] = partial[first + range * stride + min(i, last_head) * (GROUPS + 1u) + thread % GROUPS];
    }
    let is_weighing = thread % HEAD_THREADS < num_ranges;
    let factor = exp(weight.x - head_max(select(LOWEST, weight.x, is_weighing), thread));
    joined.total = select(0.0, weight.y * factor, is_weighing);
    pool[thread] = vec4<f32>(factor);
    workgroupBarrier();
    let num_summed = select(0u, num_ranges, share < SHARES);
    for (var i = 0u; i < GROUP; i++) { joined.sums[i] *= select(0.0, pool[i * HEAD_THREADS + range].x, share < num_summed); }
    for (range = share + SHARES; range < num_summed; range += SHARES) {
        for (var i = 0u; i < GROUP; i++) {
            let sum = partial[first + range * stride + min(i, last_head) * (GROUPS + 1u) + thread % GROUPS];
            joined.sums[i] += sum * pool[i * HEAD_THREADS + range].x;
        }
    }
    workgroupBarrier();
    return joined;
}
#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>,
#if LANE_STEPS
        @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_size) num_lanes: u32,
        @builtin(subgroup_invocation_id) lane: u32) {
    let thread = subgroup * num_lanes + lane;
#else
        @builtin(local_invocation_index) thread: u32) {
#endif
    let item = items[group.x];
    let heads = heads_of(group.y, GROUP);
    let head = heads.key_value_head;
    // Of keys that are in the cache; one is read in any case.
    var end = item.end_key;
#if STORES
    end = min(end, item.position);
#endif
    let last_key = max(end, item.first_key + 1u) - 1u;
    let first_quad = item.first_key / 4u;
    let end_quad = (item.end_key + 3u) / 4u;
    let slot = thread / KEY_LANES;
    var keys_ahead = fetch_keys(item, head, last_key, first_quad + slot, thread % KEY_LANES);
    load_rows(item, heads, thread, group.y % params.chunks == 0u);
    if (heads.first >= heads.end) { return; }
    workgroupBarrier();

    var softmax = Softmax(LOWEST, 0.0);
    var sums: array<vec4<f32>, GROUP>;
    for (var i = 0u; i < GROUP; i++) { sums[i] = vec4<f32>(0.0); }
    for (var first = first_quad; first < end_quad; first += ROUND_QUADS) {
        let num_quads = min(ROUND_QUADS, end_quad - first);
        make_scores(item, head, last_key, first, num_quads, keys_ahead, thread);
        let values_ahead = fetch_values(item, head, last_key, first + thread / GROUPS, thread % GROUPS);
        workgroupBarrier();
        softmax = make_weights(num_quads, softmax, thread);
        workgroupBarrier();
        sums = add_values(item, head, end, last_key, first, num_quads, values_ahead, sums, thread);
        workgroupBarrier();
        if (first + ROUND_QUADS < end_quad) {
            keys_ahead = fetch_keys(item, head, last_key, first + ROUND_QUADS + slot, thread % KEY_LANES);
        }
    }
    leave_shares(softmax.running_sum, sums, thread);
    write_heads(item, heads, item.slot == NONE, thread);
#if JOINS
    if (item.slot == NONE || !is_last(item, group.y, thread)) { return; }
    let joined = join_ranges(item, heads, thread);
    leave_shares(joined.total, joined.sums, thread);
    write_heads(item, heads, true, thread);
#endif
}
