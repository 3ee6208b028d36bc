// Quantized weights times many tokens, by tensor cores: f16 products, summed in f32.
//
// A workgroup of TEAMS subgroups makes TILE rows of TILE tokens. Each thread unpacks one block of weights and one of the 8-bit
// activations to f16 in workgroup memory, 64 columns at a time; the next ones are asked for before these are multiplied. A
// subgroup makes half of the rows, 2 HALF_TILES matrices of them, of 32 tokens. With SWIGLU the first half of its rows are
// gates, the others their ups.
//
// Options: those of the weights and of the matrices; TEAMS, HALF_TILES, TOKEN_TILES, COLUMN_TILES (matrices along 64
// columns), ADD, SWIGLU; F16 and COOPERATIVE (directives), both 1.

#include batch
#include matrices

const THREADS = TEAMS * LANES;
const TILE = THREADS / 2u;
const OUTPUTS = TILE / (1u + SWIGLU);
// Groups of four columns of a row in workgroup memory: 64 columns, and eight between rows so that banks differ.
const STRIDE = 18u;
// Rows of the halves of a subgroup, and its tokens.
const HALF_ROWS = HALF_TILES * EDGE;
const TEAM_TOKENS = TOKEN_TILES * EDGE;
// Numbers of a matrix, and of them a thread's.
const SIZE = EDGE * EDGE;
const TAKEN = SIZE / LANES;

var<workgroup> weights: array<Half, TILE * STRIDE * UNIT>;
var<workgroup> inputs: array<Half, TILE * STRIDE * UNIT>;
// A matrix of results of each subgroup.
var<workgroup> results: array<f32, TEAMS * SIZE>;

// The row of the part that is row `index` of the tile.
fn weight_row(group: u32, index: u32) -> u32 {
#if SWIGLU
    let place = index / (2u * HALF_ROWS) * HALF_ROWS + index % HALF_ROWS;
    let is_up = index / HALF_ROWS % 2u;
    return min(group * OUTPUTS + place, params.num_outputs - 1u) + is_up * params.num_outputs;
#else
    return min(group * OUTPUTS + index, params.num_outputs - 1u);
#endif
}

fn unpack(word: u32, factor: f32, addend: f32) -> vec4<f16> {
    return vec4<f16>(vec4<f32>(unpack4xI8(word)) * factor + addend);
}

fn put_weights(at: u32, group: vec4<f16>) {
#if SMALL
    for (var i = 0u; i < 4u; i++) { weights[4u * at + i] = group[i]; }
#else
    weights[at] = group;
#endif
}

fn put_inputs(at: u32, group: vec4<f16>) {
#if SMALL
    for (var i = 0u; i < 4u; i++) { inputs[4u * at + i] = group[i]; }
#else
    inputs[at] = group;
#endif
}

// Row `thread / 2` of a tile, block `thread % 2` of its 64 columns.
fn write_weights(thread: u32, block: WeightBlock, is_there: bool) {
    let at = thread / 2u * STRIDE + thread % 2u * 8u;
    let factors = select(vec4<f32>(0.0), block_factors(block), is_there);
    for (var i = 0u; i < 4u; i++) {
        put_weights(at + i, unpack(block.first[i], factors.x, factors.z));
        put_weights(at + 4u + i, unpack(block.second[i], factors.y, factors.w));
    }
}

fn write_input(thread: u32, first: vec4<u32>, second: vec4<u32>, scale: f32) {
    let at = thread / 2u * STRIDE + thread % 2u * 8u;
    for (var i = 0u; i < 4u; i++) {
        put_inputs(at + i, unpack(first[i], scale, 0.0));
        put_inputs(at + 4u + i, unpack(second[i], scale, 0.0));
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32,
        @builtin(subgroup_id) team: u32, @builtin(subgroup_invocation_id) lane: u32) {
    let row_start = weight_row(group.x, thread / 2u) * params.num_blocks;
    let token_start = min(group.y * TILE + thread / 2u, params.num_tokens - 1u) * params.num_blocks;
    let last = params.num_blocks - 1u;
    var column = min(thread % 2u, last);
    var block = load_block(row_start + column);
    var first = quants[2u * (token_start + column)];
    var second = quants[2u * (token_start + column) + 1u];
    var scale = bitcast<f32>(scales[token_start + column].x);
    let rows = team / (TEAMS / 2u) * 2u * HALF_ROWS * STRIDE * UNIT;
    let tokens = team % (TEAMS / 2u) * TEAM_TOKENS * STRIDE * UNIT;
#repeat i HALF_TILES
#repeat j TOKEN_TILES
    var low_$i_$j: Sums;
    var high_$i_$j: Sums;
#end
#end
    for (var start = 0u; start < params.num_blocks; start += 2u) {
        write_weights(thread, block, start + thread % 2u <= last);
        write_input(thread, first, second, scale);
        workgroupBarrier();
        column = min(start + 2u + thread % 2u, last);
        block = load_block(row_start + column);
        first = quants[2u * (token_start + column)];
        second = quants[2u * (token_start + column) + 1u];
        scale = bitcast<f32>(scales[token_start + column].x);
        for (var k = 0u; k < COLUMN_TILES * EDGE_GROUPS * UNIT; k += EDGE_GROUPS * UNIT) {
#repeat j TOKEN_TILES
            let b_$j = coopLoad<Right>(&inputs[tokens + $ju * EDGE * STRIDE * UNIT + k], STRIDE * UNIT);
#end
#repeat i HALF_TILES
            let a_$i = coopLoadT<Left>(&weights[rows + $iu * EDGE * STRIDE * UNIT + k], STRIDE * UNIT);
#repeat j TOKEN_TILES
            low_$i_$j = coopMultiplyAdd(a_$i, b_$j, low_$i_$j);
#end
            let c_$i = coopLoadT<Left>(&weights[rows + ($iu + HALF_TILES) * EDGE * STRIDE * UNIT + k], STRIDE * UNIT);
#repeat j TOKEN_TILES
            high_$i_$j = coopMultiplyAdd(c_$i, b_$j, high_$i_$j);
#end
#end
        }
        workgroupBarrier();
    }
    // Element `i` of a matrix: row `i % EDGE` of token `i / EDGE`.
    let first_row = group.x * OUTPUTS + team / (TEAMS / 2u) * (OUTPUTS / 2u) + lane % EDGE;
    let first_token = group.y * TILE + team % (TEAMS / 2u) * TEAM_TOKENS + lane / EDGE;
    let at = team * SIZE + lane;
    let results_at = &results[team * SIZE];
#repeat i HALF_TILES
#repeat j TOKEN_TILES
    {
        let row = first_row + $iu * EDGE;
        let token = first_token + $ju * EDGE;
        // What each element of both is added to.
        var held: array<vec2<f32>, TAKEN>;
#if ADD
        for (var n = 0u; n < TAKEN; n++) {
            let place = token + n * (LANES / EDGE);
            held[n] = vec2<f32>(output[output_at(place, row)], output[output_at(place, row + HALF_ROWS)]);
        }
#endif
        // The matrices are named before the stores: the translator loses operands that are not.
        let low = low_$i_$j;
        let high = high_$i_$j;
        coopStore(low, results_at, EDGE);
        workgroupBarrier();
        var taken: array<f32, TAKEN>;
        for (var n = 0u; n < TAKEN; n++) { taken[n] = results[at + n * LANES]; }
        workgroupBarrier();
        coopStore(high, results_at, EDGE);
        workgroupBarrier();
        for (var n = 0u; n < TAKEN; n++) {
            let other = results[at + n * LANES];
            let place = token + n * (LANES / EDGE);
#if SWIGLU
            store_output(place, row, gated(taken[n], other));
#else
            store_output(place, row, held[n].x + taken[n]);
            store_output(place, row + HALF_ROWS, held[n].y + other);
#endif
        }
        workgroupBarrier();
    }
#end
#end
}
