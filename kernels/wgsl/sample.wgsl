// From a slice of a row of logits to the few candidates that can be chosen, its sums, and the token that noise draws.
//
// A workgroup reduces SLICE logits (x: the slice, y: the row); the host merges slices as it does those of ranks. Logits are
// kept as ordered bits: as unsigned numbers they order as the values do; 0 is no logit.
//
// Options: THREADS, SLICE (a power of two). Noise is the host's (`cpu/sample/noise.rs`), operation by operation; a driver may
// join a product and a sum into one rounding.

struct Params { width: u32, first_token: u32, negative_infinity: u32, top_room: u32, raw_top_room: u32 }
#include params

struct Row {
    top_k: u32, raw_top_k: u32, inverse_temperature: f32, is_drawn: u32,
    seed_low: u32, seed_high: u32, first_penalty: u32, num_penalties: u32,
}

@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> rows: array<Row>;
// Token id, bits of the factor, bits of the subtrahend.
@group(0) @binding(2) var<storage, read> penalties: array<vec4<u32>>;
// Of each slice of each row: largest logit and sum of the raw ones, the same of the scaled ones, whether a token is drawn, its
// id, its value, its raw logit; then the candidates, then the raw ones, each a logit's bits and an id.
@group(0) @binding(3) var<storage, read_write> output: array<u32>;

var<workgroup> keys: array<u32, SLICE>;
var<workgroup> places: array<u32, SLICE>;
var<workgroup> numbers: array<f32, THREADS>;
var<workgroup> best_keys: array<u32, THREADS>;
var<workgroup> best_places: array<u32, THREADS>;

fn ordered(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
}

fn value_of(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, (key >> 31u) == 1u));
}

// NaN counts as minus infinity, -0 as 0.
fn clean(value: f32) -> f32 {
    let bits = bitcast<u32>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) { return bitcast<f32>(params.negative_infinity); }
    if (bits == 0x80000000u) { return 0.0; }
    return value;
}

fn load(thread: u32, slice: u32, row: u32) {
    for (var i = thread; i < SLICE; i += THREADS) {
        let column = slice * SLICE + i;
        let logit = logits[row * params.width + min(column, params.width - 1u)];
        keys[i] = select(0u, ordered(clean(logit)), column < params.width);
        places[i] = i;
    }
    workgroupBarrier();
}

fn penalize(thread: u32, slice: u32, row: Row) {
    for (var i = thread; i < row.num_penalties; i += THREADS) {
        let penalty = penalties[row.first_penalty + i];
        let column = penalty.x - params.first_token;
        if (column >= params.width || column / SLICE != slice) { continue; }
        let logit = value_of(keys[column % SLICE]);
        let factor = bitcast<f32>(penalty.y);
        let scaled = select(logit * factor, logit / factor, logit > 0.0);
        keys[column % SLICE] = ordered(clean(scaled - bitcast<f32>(penalty.z)));
    }
    workgroupBarrier();
}

fn largest_key(thread: u32) -> u32 {
    var key = 0u;
    for (var i = thread; i < SLICE; i += THREADS) { key = max(key, keys[i]); }
    best_keys[thread] = key;
    workgroupBarrier();
    for (var distance = THREADS / 2u; distance > 0u; distance /= 2u) {
        if (thread < distance) { best_keys[thread] = max(best_keys[thread], best_keys[thread + distance]); }
        workgroupBarrier();
    }
    let result = best_keys[0];
    workgroupBarrier();
    return result;
}

// Writes the largest logit times the factor, and the sum of the exponentials of what the others are away from it.
fn write_sums(thread: u32, factor: f32, at: u32) {
    let largest = value_of(largest_key(thread));
    let lowest = ordered(bitcast<f32>(params.negative_infinity));
    var sum = 0.0;
    for (var i = thread; i < SLICE; i += THREADS) {
        if (keys[i] > lowest) { sum += exp((value_of(keys[i]) - largest) * factor); }
    }
    numbers[thread] = sum;
    workgroupBarrier();
    for (var distance = THREADS / 2u; distance > 0u; distance /= 2u) {
        if (thread < distance) { numbers[thread] += numbers[thread + distance]; }
        workgroupBarrier();
    }
    if (thread == 0u) {
        output[at] = bitcast<u32>(largest * factor);
        output[at + 1u] = bitcast<u32>(numbers[0]);
    }
    workgroupBarrier();
}

// Whether the first is better: a larger key, of equal ones a smaller place.
fn is_better(key: u32, place: u32, other_key: u32, other_place: u32) -> bool {
    return key > other_key || (key == other_key && place < other_place);
}

// The best of what each thread has; every thread gets its place.
fn best_place(thread: u32, key: u32, place: u32) -> u32 {
    best_keys[thread] = key;
    best_places[thread] = place;
    workgroupBarrier();
    for (var distance = THREADS / 2u; distance > 0u; distance /= 2u) {
        if (thread < distance) {
            let other = thread + distance;
            if (is_better(best_keys[other], best_places[other], best_keys[thread], best_places[thread])) {
                best_keys[thread] = best_keys[other];
                best_places[thread] = best_places[other];
            }
        }
        workgroupBarrier();
    }
    let result = best_places[0];
    workgroupBarrier();
    return result;
}

// Best first.
fn sort(thread: u32) {
    for (var size = 2u; size <= SLICE; size *= 2u) {
        for (var distance = size / 2u; distance > 0u; distance /= 2u) {
            for (var i = thread; i < SLICE / 2u; i += THREADS) {
                let low = i / distance * 2u * distance + i % distance;
                let high = low + distance;
                let is_down = (low & size) == 0u;
                if (is_better(keys[high], places[high], keys[low], places[low]) == is_down) {
                    let key = keys[low];
                    let place = places[low];
                    keys[low] = keys[high];
                    places[low] = places[high];
                    keys[high] = key;
                    places[high] = place;
                }
            }
            workgroupBarrier();
        }
    }
}

fn write_top(thread: u32, wanted: u32, first_id: u32, at: u32) {
    if (wanted == 1u) {
        var key = 0u;
        var place = 0u;
        for (var i = thread; i < SLICE; i += THREADS) {
            if (keys[i] > key) {
                key = keys[i];
                place = i;
            }
        }
        let best = best_place(thread, key, place);
        if (thread == 0u) {
            output[at] = bitcast<u32>(value_of(keys[best]));
            output[at + 1u] = first_id + best;
        }
    } else if (wanted > 1u) {
        sort(thread);
        for (var i = thread; i < min(wanted, SLICE); i += THREADS) {
            output[at + 2u * i] = bitcast<u32>(value_of(keys[i]));
            output[at + 2u * i + 1u] = first_id + places[i];
        }
    }
    workgroupBarrier();
}

fn mix(value: u32) -> u32 {
    var bits = (value ^ (value >> 16u)) * 0x85ebca6bu;
    bits = (bits ^ (bits >> 13u)) * 0xc2b2ae35u;
    return bits ^ (bits >> 16u);
}

// Source: Cephes `logf` (Moshier).
fn natural_log(x: f32) -> f32 {
    let shifted = bitcast<u32>(x) - 0x3f3504f3u;
    let exponent = f32(bitcast<i32>(shifted) >> 23u);
    let m = bitcast<f32>((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0;
    var sum = 7.0376836e-2;
    sum = sum * m - 1.151461e-1;
    sum = sum * m + 1.1676999e-1;
    sum = sum * m - 1.2420141e-1;
    sum = sum * m + 1.4249323e-1;
    sum = sum * m - 1.6668058e-1;
    sum = sum * m + 2.0000715e-1;
    sum = sum * m - 2.4999994e-1;
    sum = sum * m + 3.333333e-1;
    let square = m * m;
    return m + (m * square * sum - 0.5 * square) + exponent * 0.6931472;
}

fn gumbel(bits: u32) -> f32 {
    let w = (f32(bits) + 0.5) * (1.0 / 4294967296.0);
    let small = w * (1.0 + w * (0.5 + w * (1.0 / 3.0)));
    let large = -natural_log(max(1.0 - w, 1.0 / 8589934592.0));
    return -natural_log(select(large, small, w < 1.0 / 1024.0));
}

fn write_drawn(thread: u32, slice: u32, index: u32, row: Row, at: u32) {
    let lowest = ordered(bitcast<f32>(params.negative_infinity));
    let first_id = params.first_token + slice * SLICE;
    var key = 0u;
    var place = 0u;
    for (var i = thread; i < SLICE; i += THREADS) {
        if (keys[i] > lowest) {
            let mixed = mix(((first_id + i) * 0x9e3779b9u) ^ row.seed_low);
            let noise = gumbel(mix((mixed + 0x85ebca6bu) ^ row.seed_high));
            let value = ordered(value_of(keys[i]) * row.inverse_temperature + noise);
            if (value > key) {
                key = value;
                place = i;
            }
        }
    }
    let best = best_place(thread, key, place);
    if (thread == 0u) {
        output[at] = u32(best_keys[0] != 0u);
        output[at + 1u] = first_id + best;
        output[at + 2u] = bitcast<u32>(value_of(best_keys[0]));
        output[at + 3u] = bitcast<u32>(clean(logits[index * params.width + min(slice * SLICE + best, params.width - 1u)]));
    }
    workgroupBarrier();
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let slice = group.x;
    let row = rows[group.y];
    let at = (group.y * groups.x + slice) * (8u + 2u * (params.top_room + params.raw_top_room));
    let first_id = params.first_token + slice * SLICE;
    load(thread, slice, group.y);
    write_sums(thread, 1.0, at);
    if (row.raw_top_k > 0u) {
        write_top(thread, row.raw_top_k, first_id, at + 8u + 2u * params.top_room);
        load(thread, slice, group.y);
    }
    penalize(thread, slice, row);
    write_sums(thread, row.inverse_temperature, at + 2u);
    if (row.is_drawn != 0u) { write_drawn(thread, slice, group.y, row, at + 4u); }
    write_top(thread, row.top_k, first_id, at + 8u);
}
