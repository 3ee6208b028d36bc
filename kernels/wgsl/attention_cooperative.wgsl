// Paged flash attention of prompts by tensor cores: f16 products, summed in f32. Softmax is taken online.
//
// A workgroup of TEAMS subgroups takes one item (x) and GROUP query heads of one key/value head (y: the heads, in chunks of
// GROUP): row `i` is head `i % GROUP` of token `i / GROUP`. For each tile of KEYS keys a subgroup makes the scores of its rows,
// weighs them, and adds the weighted values to what it holds; keys and then values of the tile lie in workgroup memory.
//
// Weights are powers of two of how far a score is above `base`, the largest score of an earlier tile. What a subgroup holds
// cannot be scaled, so a base stays until a score is THRESHOLD above it (weights of up to 2^8 are as exact), and then what was
// held is put down in `output`, scaled.
//
// Options: those of `attention` (16-bit caches) and of the matrices; TEAMS, GROUP, ROW_TILES (matrices along the rows of a
// subgroup), KEY_TILES (along a tile of keys), HEAD_TILES (along a head), LANE_GROUPS (of four keys of a tile, that a thread
// weighs); F16 and COOPERATIVE (directives), both 1.

#include attention
#include matrices
#if QUANTIZE
#include activations
#endif

const THREADS = TEAMS * LANES;
const TEAM_ROWS = ROW_TILES * EDGE;
const ROWS = TEAMS * TEAM_ROWS;
const KEYS = KEY_TILES * EDGE;
// Threads that share a row of scores.
const SHARERS = LANES / TEAM_ROWS;
// Of what lies in workgroup memory, 16 bytes longer than need be so that banks differ: of keys or values, groups; of the scores
// of a key for the rows of a subgroup, numbers; of weights for the keys of a tile, and of columns of values, groups.
const TILE_STRIDE = GROUPS + 2u;
const SCORE_STRIDE = TEAM_ROWS + 4u;
const WEIGHT_STRIDE = KEYS / 4u + 2u;
const NOWHERE = 0xffffffffu;
const LOG2_E = 1.4426950408889634;
const THRESHOLD = 8.0;

var<workgroup> tile: array<Half, max(KEYS * TILE_STRIDE, 4u * GROUPS * WEIGHT_STRIDE) * UNIT>;
// Of each subgroup, key by key.
var<workgroup> scores: array<f32, TEAMS * KEYS * SCORE_STRIDE>;
// Queries on their way to the subgroups, then weights.
var<workgroup> weights: array<Half, ROWS * WEIGHT_STRIDE * UNIT>;
// Of each row: one over the sum of its weights.
var<workgroup> factors: array<f32, ROWS>;
// The first one: whether a base was raised. All that is here takes multiples of 16 bytes: matrices have to begin at such
// (VK_KHR_cooperative_matrix), and nobody else sees to that.
var<workgroup> is_raised: array<atomic<u32>, 4>;

fn narrow(elements: vec4<f32>) -> vec4<f16> {
    return vec4<f16>(clamp(elements, vec4<f32>(-65504.0), vec4<f32>(65504.0)));
}

fn to_half(group: Stored) -> vec4<f16> {
#if NATIVE
    return group;
#else
    return narrow(widen(group));
#endif
}

fn put_tile(at: u32, group: vec4<f16>) {
#if SMALL
    for (var i = 0u; i < 4u; i++) { tile[4u * at + i] = group[i]; }
#else
    tile[at] = group;
#endif
}

fn put_row(at: u32, group: vec4<f16>) {
#if SMALL
    for (var i = 0u; i < 4u; i++) { weights[4u * at + i] = group[i]; }
#else
    weights[at] = group;
#endif
}

// Elements 4 `first`.. of the queries of all rows, KEYS of each, times the scale.
fn copy_queries(item: Item, heads: Heads, thread: u32, first: u32) {
    for (var i = thread; i < ROWS * KEYS / 4u; i += THREADS) {
        let row = i / (KEYS / 4u);
        let group = first + i % (KEYS / 4u);
        let token = min(row / GROUP, item.num_tokens - 1u);
        let head = min(heads.first + row % GROUP, max(heads.end, 1u) - 1u);
        let at = (item.row + token) * qkv_width() + head * params.head_dim + 4u * min(group, GROUPS - 1u);
        let elements = vec4<f32>(qkv[at], qkv[at + 1u], qkv[at + 2u], qkv[at + 3u]);
        put_row(row * WEIGHT_STRIDE + i % (KEYS / 4u), narrow(elements * (params.scale * LOG2_E)));
    }
}

// Past the end comes the last key once more, whose weight is 0 there.
fn copy_keys(item: Item, head: u32, thread: u32, first: u32) {
    for (var i = thread; i < KEYS * GROUPS; i += THREADS) {
        let at = key_at(item, head, min(first + i / GROUPS, item.end_key - 1u));
        put_tile(i / GROUPS * TILE_STRIDE + i % GROUPS, to_half(load_key(at.x + i % GROUPS, at.y)));
    }
}

// By columns; four keys and four columns at a time.
fn copy_values(item: Item, head: u32, thread: u32, first: u32) {
    for (var i = thread; i < KEYS / 4u * GROUPS; i += THREADS) {
        let place = i / 32u;
        let group = place % (GROUPS / 4u) * 4u + i % 4u;
        let keys_at = place / (GROUPS / 4u) * 8u + i / 4u % 8u;
        var elements: array<vec4<f16>, 4>;
        for (var j = 0u; j < 4u; j++) {
            let at = key_at(item, head, min(first + 4u * keys_at + j, item.end_key - 1u));
            elements[j] = to_half(load_value(at.x + group, at.y));
        }
        for (var j = 0u; j < 4u; j++) {
            let column = vec4<f16>(elements[0][j], elements[1][j], elements[2][j], elements[3][j]);
            put_tile((4u * group + j) * WEIGHT_STRIDE + keys_at, column);
        }
    }
}

// Where a row's score of a key is, or a column of what is held.
fn score_at(row: u32, key: u32) -> u32 {
    return (row / TEAM_ROWS * KEYS + key) * SCORE_STRIDE + row % TEAM_ROWS;
}

// Where a column of a row goes: all ones if the row is none.
fn output_at(item: Item, heads: Heads, row: u32, column: u32) -> u32 {
    let token = row / GROUP;
    let head = heads.first + row % GROUP;
    if (token >= item.num_tokens || head >= heads.end || column >= params.head_dim) { return NOWHERE; }
    return ((item.row + token) * params.num_heads + head) * params.head_dim + column;
}

// Puts down KEYS columns of all rows from column `first` on, which lie in `scores`, with what was put down before, each row
// times its factor.
fn put_down(item: Item, heads: Heads, thread: u32, first: u32, is_first: bool) {
    for (var i = thread; i < ROWS * KEYS; i += THREADS) {
        let row = i / KEYS;
        let at = output_at(item, heads, row, first + i % KEYS);
        if (at != NOWHERE) {
            var value = scores[score_at(row, i % KEYS)];
            if (!is_first) { value += output[at]; }
            output[at] = value * factors[row];
        }
    }
}

#if QUANTIZE
// The 8-bit blocks of the same columns, from the output, with the same rounding as the host's.
fn quantize_columns(item: Item, heads: Heads, thread: u32, first: u32) {
    for (var i = thread; i < ROWS * KEYS / 32u; i += THREADS) {
        let at = output_at(item, heads, i / (KEYS / 32u), first + i % (KEYS / 32u) * 32u);
        if (at != NOWHERE) { quantize_block(at); }
    }
}

fn quantize_block(at: u32) {
    var largest = 0.0;
    for (var i = 0u; i < 32u; i++) { largest = max(largest, abs(output[at + i])); }
    var inverse = 0.0;
    if (largest > 0.0) { inverse = 127.0 / largest; }
    var sums = vec2<i32>(0, 0);
    for (var i = 0u; i < 8u; i++) {
        var group: vec4<f32>;
        for (var j = 0u; j < 4u; j++) { group[j] = output[at + 4u * i + j]; }
        let codes = vec4<i32>(round(group * inverse));
        sums[i / 4u] += codes.x + codes.y + codes.z + codes.w;
        quants[at / 4u + i] = pack4xI8(codes);
    }
    quant_scales[at / 32u] = vec2<u32>(bitcast<u32>(largest * (1.0 / 127.0)), pack_sums(sums));
}
#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32,
        @builtin(subgroup_id) team: u32, @builtin(subgroup_invocation_id) lane: u32) {
    let item = items[group.x];
    // Where there are none, what is computed is not stored: matrices must be multiplied by all or none.
    let heads = heads_of(group.y, GROUP);
    let team_row = team * TEAM_ROWS;
    // The row that this thread weighs with its neighbours, and the last key that it sees.
    let row = team_row + lane / SHARERS;
    let sharer = lane % SHARERS;
    let last_key = item.position + min(row / GROUP, item.num_tokens - 1u);
    let scores_at = score_at(row, 4u * sharer);
    let team_scores = team * KEYS * SCORE_STRIDE;

#repeat i ROW_TILES
#repeat j HEAD_TILES
    var held_$i_$j: Sums;
#end
#end
#repeat j HEAD_TILES
    if ($ju % KEY_TILES == 0u) {
        workgroupBarrier();
        copy_queries(item, heads, thread, $ju * EDGE_GROUPS);
        workgroupBarrier();
    }
#repeat i ROW_TILES
    let query_$i_$j = coopLoadT<Left>(
        &weights[((team_row + $iu * EDGE) * WEIGHT_STRIDE + $ju % KEY_TILES * EDGE_GROUPS) * UNIT], WEIGHT_STRIDE * UNIT);
#end
#end
    var zeros: Sums;
    var base = LOWEST;
    var total = 0.0;
    // Whether nothing was put down.
    var is_first = true;
    for (var first = item.first_key; first < item.end_key; first += KEYS) {
        copy_keys(item, heads.key_value_head, thread, first);
        if (thread == 0u) { atomicStore(&is_raised[0], 0u); }
        workgroupBarrier();
#repeat n KEY_TILES
        {
#repeat i ROW_TILES
            var sums_$i = zeros;
#end
#repeat j HEAD_TILES
            let keys_$j = coopLoad<Right>(
                &tile[($nu * EDGE * TILE_STRIDE + $ju * EDGE_GROUPS) * UNIT], TILE_STRIDE * UNIT);
#repeat i ROW_TILES
            sums_$i = coopMultiplyAdd(query_$i_$j, keys_$j, sums_$i);
#end
#end
#repeat i ROW_TILES
            // The matrices are named before the stores: the translator loses operands that are not.
            let result_$i = sums_$i;
            let result_at_$i = &scores[team_scores + $nu * EDGE * SCORE_STRIDE + $iu * EDGE];
            coopStore(result_$i, result_at_$i, SCORE_STRIDE);
#end
        }
#end
        workgroupBarrier();
        copy_values(item, heads.key_value_head, thread, first);
        var highest = LOWEST;
#repeat c LANE_GROUPS
        let key_$c = first + 4u * (sharer + $cu * SHARERS);
        let at_$c = scores_at + 4u * $cu * SHARERS * SCORE_STRIDE;
        let made_$c = vec4<f32>(scores[at_$c], scores[at_$c + SCORE_STRIDE], scores[at_$c + 2u * SCORE_STRIDE],
            scores[at_$c + 3u * SCORE_STRIDE]);
        let seen_$c = vec4<u32>(key_$c) + vec4<u32>(0u, 1u, 2u, 3u) <= vec4<u32>(last_key);
        let group_$c = select(vec4<f32>(LOWEST), made_$c, seen_$c);
        highest = max(highest, max(max(group_$c.x, group_$c.y), max(group_$c.z, group_$c.w)));
#end
        if (SHARERS > 1u) { highest = max(highest, subgroupShuffleXor(highest, 1u)); }
        var correction = 1.0;
        if (highest > base + THRESHOLD || first == item.first_key) {
            correction = exp2(max(base - highest, -200.0));
            base = highest;
            if (first != item.first_key) { atomicStore(&is_raised[0], 1u); }
        }
        total *= correction;
#repeat c LANE_GROUPS
        {
            // A score that is not seen weighs nothing, even where no score is.
            let group_weights = vec4<f16>(select(vec4<f32>(0.0), exp2(group_$c - base), seen_$c));
            total += dot(vec4<f32>(group_weights), vec4<f32>(1.0));
            put_row(row * WEIGHT_STRIDE + sharer + $cu * SHARERS, group_weights);
        }
#end
        workgroupBarrier();
        if (atomicLoad(&is_raised[0]) != 0u) {
            if (sharer == 0u) { factors[row] = correction; }
#repeat j HEAD_TILES
#repeat i ROW_TILES
            let old_$i_$j = held_$i_$j;
            let old_at_$i_$j = &scores[team_scores + $ju % KEY_TILES * EDGE * SCORE_STRIDE + $iu * EDGE];
            coopStore(old_$i_$j, old_at_$i_$j, SCORE_STRIDE);
            held_$i_$j = zeros;
#end
            if ($ju % KEY_TILES == KEY_TILES - 1u || $ju == HEAD_TILES - 1u) {
                workgroupBarrier();
                put_down(item, heads, thread, $ju / KEY_TILES * KEYS, is_first);
                workgroupBarrier();
            }
#end
            is_first = false;
        }
#repeat n KEY_TILES
        {
#repeat i ROW_TILES
            let weights_$i = coopLoadT<Left>(
                &weights[((team_row + $iu * EDGE) * WEIGHT_STRIDE + $nu * EDGE_GROUPS) * UNIT], WEIGHT_STRIDE * UNIT);
#end
#repeat j HEAD_TILES
            let values_$j = coopLoad<Right>(
                &tile[($ju * EDGE * WEIGHT_STRIDE + $nu * EDGE_GROUPS) * UNIT], WEIGHT_STRIDE * UNIT);
#repeat i ROW_TILES
            held_$i_$j = coopMultiplyAdd(weights_$i, values_$j, held_$i_$j);
#end
#end
        }
#end
        workgroupBarrier();
    }
    if (SHARERS > 1u) { total += subgroupShuffleXor(total, 1u); }
    if (sharer == 0u) { factors[row] = 1.0 / total; }
#repeat j HEAD_TILES
#repeat i ROW_TILES
    let result_$i_$j = held_$i_$j;
    let result_at_$i_$j = &scores[team_scores + $ju % KEY_TILES * EDGE * SCORE_STRIDE + $iu * EDGE];
    coopStore(result_$i_$j, result_at_$i_$j, SCORE_STRIDE);
#end
    if ($ju % KEY_TILES == KEY_TILES - 1u || $ju == HEAD_TILES - 1u) {
        workgroupBarrier();
        put_down(item, heads, thread, $ju / KEY_TILES * KEYS, is_first);
        workgroupBarrier();
#if QUANTIZE
        storageBarrier();
        quantize_columns(item, heads, thread, $ju / KEY_TILES * KEYS);
#endif
    }
#end
}
