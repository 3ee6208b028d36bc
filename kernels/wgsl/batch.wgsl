// Quantized weights times many tokens, by integer dot products with 8-bit activations.
//
// A workgroup of 256 threads makes 64 rows of 64 tokens; it copies STEP blocks of the columns at a time, unpacked, to workgroup
// memory. Thread (x, y) of 16 x 16 makes rows y + 16 i of tokens x + 16 j. With SWIGLU the rows of i = 0, 1 are gates, and those
// of i = 2, 3 their ups.
//
// Options: those of the weights; STEP, ADD, SWIGLU.

#include batch
#include activations

const TILE = 64u;
const SIDE = 16u;
// Outputs that a workgroup makes of a token.
const OUTPUTS = TILE / (1u + SWIGLU);

// Of each block of the step: words 0..4 of all rows, then words 4..8.
var<workgroup> weight_words: array<vec4<u32>, STEP * 2u * TILE>;
// Factors of the products with the halves of the activations, and of the sums of the halves.
var<workgroup> weight_factors: array<vec4<f32>, STEP * TILE>;
var<workgroup> input_words: array<vec4<u32>, STEP * 2u * TILE>;
// The scale, and with it the sums of the halves.
var<workgroup> input_factors: array<vec4<f32>, STEP * TILE>;

// The row of the part that is row `index` of the tile.
fn weight_row(group: u32, index: u32) -> u32 {
    let output_row = min(group * OUTPUTS + index % OUTPUTS, params.num_outputs - 1u);
    return output_row + index / OUTPUTS * params.num_outputs;
}

fn copy_weights(group: u32, index: u32, first_block: u32) {
    let block = first_block + index / TILE;
    let row = index % TILE;
    let at = index / TILE * TILE + row;
    let low = index / TILE * 2u * TILE + row;
    if (block >= params.num_blocks) {
        weight_words[low] = vec4<u32>(0u);
        weight_words[low + TILE] = vec4<u32>(0u);
        weight_factors[at] = vec4<f32>(0.0);
        return;
    }
    let weights = load_block(weight_row(group, row) * params.num_blocks + block);
    weight_words[low] = weights.first;
    weight_words[low + TILE] = weights.second;
    weight_factors[at] = block_factors(weights);
}

fn copy_input(group: u32, index: u32, first_block: u32) {
    let block = min(first_block + index / TILE, params.num_blocks - 1u);
    let token = min(group * TILE + index % TILE, params.num_tokens - 1u);
    let at = token * params.num_blocks + block;
    let low = index / TILE * 2u * TILE + index % TILE;
    input_words[low] = quants[2u * at];
    input_words[low + TILE] = quants[2u * at + 1u];
    let scale = scales[at];
    let factor = bitcast<f32>(scale.x);
    input_factors[index] = vec4<f32>(factor, factor * vec2<f32>(unpack_sums(scale.y)), 0.0);
}

fn dot_words(one: vec4<u32>, other: vec4<u32>) -> i32 {
    return dot4I8Packed(one.x, other.x) + dot4I8Packed(one.y, other.y)
        + dot4I8Packed(one.z, other.z) + dot4I8Packed(one.w, other.w);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let x = thread % SIDE;
    let y = thread / SIDE;
    var sums: array<vec4<f32>, 4>;
    for (var i = 0u; i < 4u; i++) { sums[i] = vec4<f32>(0.0); }
    for (var first_block = 0u; first_block < params.num_blocks; first_block += STEP) {
        // Half of the threads copy weights, the others activations.
        for (var i = thread % 128u; i < STEP * TILE; i += 128u) {
            if (thread < 128u) { copy_weights(group.x, i, first_block); } else { copy_input(group.y, i, first_block); }
        }
        workgroupBarrier();
        for (var block = 0u; block < STEP; block++) {
            for (var j = 0u; j < 4u; j++) {
                let token = block * TILE + x + SIDE * j;
                let first = input_words[token + block * TILE];
                let second = input_words[token + block * TILE + TILE];
                let input_factor = input_factors[token];
                for (var i = 0u; i < 4u; i++) {
                    let row = block * TILE + y + SIDE * i;
                    let factors = weight_factors[row];
                    let low = dot_words(weight_words[row + block * TILE], first);
                    let high = dot_words(weight_words[row + block * TILE + TILE], second);
                    var product: f32;
                    if (SCALES > BYTES) {
                        product = factors.x * f32(low) + factors.y * f32(high);
                    } else {
                        product = factors.x * f32(low + high);
                    }
                    product *= input_factor.x;
                    if (SCALES > BYTES) {
                        product += factors.z * input_factor.y + factors.w * input_factor.z;
                    } else if (OFFSET != 0u || SCALES == HALF_MIN || SCALES == BYTES) {
                        product += factors.z * (input_factor.y + input_factor.z);
                    }
                    sums[i][j] += product;
                }
            }
        }
        workgroupBarrier();
    }
#if ADD
    for (var j = 0u; j < 4u; j++) {
        for (var i = 0u; i < 4u; i++) {
            sums[i][j] += output[output_at(group.y * TILE + x + SIDE * j, group.x * OUTPUTS + y + SIDE * i)];
        }
    }
#endif
    for (var j = 0u; j < 4u; j++) {
        let token = group.y * TILE + x + SIDE * j;
        for (var i = 0u; i < 4u / (1u + SWIGLU); i++) {
#if SWIGLU
            let result = gated(sums[i][j], sums[i + 2u][j]);
#else
            let result = sums[i][j];
#endif
            store_output(token, group.x * OUTPUTS + y + SIDE * i, result);
        }
    }
}
