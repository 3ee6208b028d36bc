// Quantized weights as the matmuls read them, for every block type.
//
// A matrix is blocks of 32 columns, row by row, in planes of their own:
//   codes   8 bits: 2 x vec4 a block; 4, 5, 6 bits: vec4; 2, 3 bits: vec2
//   high    3, 5 bits: a word a block; 6 bits: vec2
//   fine    a word a block: HALF_MIN f16 d and m, SINGLE f32 d; 16 bits a block: HALF f16 d, BYTES scale and min,
//           NIBBLES scale and min of each half, SIGNED the signed scales of the halves
//   coarse  BYTES, NIBBLES, SIGNED: a word for each 8 blocks, f16 d and m
// Word `j` of a block is its quants 4j..4j + 4, a byte each: with 4 and more bits nibble `j / 4` of code word `j % 4`, with
// less bits `2 (j / 2)..` of code word `j % 2`; its high bits are bit `j` of each byte of the one high word, or bits
// `2 (j / 2)..` of high word `j % 2`. 8 bits are signed.
//
// Invariant: a value is `d * scale * (quant - OFFSET) + m * min`. Options: BITS, OFFSET, SCALES.
// The host's half of this is `src/webgpu/matmul/layout.rs`.

const HALF = 0u;
const HALF_MIN = 1u;
const SINGLE = 2u;
const BYTES = 3u;
const NIBBLES = 4u;
const SIGNED = 5u;

#if FEW_BITS
@group(0) @binding(0) var<storage, read> codes: array<vec2<u32>>;
#else
@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
#endif
#if SIX_BITS
@group(0) @binding(1) var<storage, read> high: array<vec2<u32>>;
#else
@group(0) @binding(1) var<storage, read> high: array<u32>;
#endif
@group(0) @binding(2) var<storage, read> fine: array<u32>;
@group(0) @binding(3) var<storage, read> coarse: array<u32>;

struct WeightBlock {
    // Words 0..4 and 4..8.
    first: vec4<u32>,
    second: vec4<u32>,
    d: f32,
    m: f32,
    // Of the halves: 1, or both the same, where the type has less.
    scale: vec2<i32>,
    min: vec2<i32>,
}

fn load_words(index: u32) -> array<vec4<u32>, 2> {
    var first: vec4<u32>;
    var second: vec4<u32>;
#if FEW_BITS
    let code = codes[index];
    first = vec4<u32>(code.x, code.y, code.x >> 2u, code.y >> 2u) & vec4<u32>(0x03030303u);
    second = vec4<u32>(code.x >> 4u, code.y >> 4u, code.x >> 6u, code.y >> 6u) & vec4<u32>(0x03030303u);
    if (BITS == 3u) {
        let bits = high[index];
        first |= vec4<u32>(bits << 2u, bits << 1u, bits, bits >> 1u) & vec4<u32>(0x04040404u);
        second |= vec4<u32>(bits >> 2u, bits >> 3u, bits >> 4u, bits >> 5u) & vec4<u32>(0x04040404u);
    }
#else
#if EIGHT_BITS
    first = codes[2u * index];
    second = codes[2u * index + 1u];
#else
    let code = codes[index];
    first = code & vec4<u32>(0x0f0f0f0fu);
    second = (code >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu);
#if SIX_BITS
    let bits = high[index];
    first |= vec4<u32>(bits.x << 4u, bits.y << 4u, bits.x << 2u, bits.y << 2u) & vec4<u32>(0x30303030u);
    second |= vec4<u32>(bits.x, bits.y, bits.x >> 2u, bits.y >> 2u) & vec4<u32>(0x30303030u);
#else
    if (BITS == 5u) {
        let bits = high[index];
        first |= vec4<u32>(bits << 4u, bits << 3u, bits << 2u, bits << 1u) & vec4<u32>(0x10101010u);
        second |= vec4<u32>(bits, bits >> 1u, bits >> 2u, bits >> 3u) & vec4<u32>(0x10101010u);
    }
#endif
#endif
#endif
    return array<vec4<u32>, 2>(first, second);
}

// Block number `index` of all blocks of the matrix.
fn load_block(index: u32) -> WeightBlock {
    var block: WeightBlock;
    let words = load_words(index);
    block.first = words[0];
    block.second = words[1];
    block.m = 0.0;
    block.scale = vec2<i32>(1);
    block.min = vec2<i32>(1);
    if (SCALES == HALF_MIN) {
        let factors = unpack2x16float(fine[index]);
        block.d = factors.x;
        block.m = factors.y;
    } else if (SCALES == SINGLE) {
        block.d = bitcast<f32>(fine[index]);
    } else {
        let bits = fine[index / 2u] >> (index % 2u * 16u);
        if (SCALES == HALF) {
            block.d = unpack2x16float(bits & 0xffffu).x;
        } else {
            let factors = unpack2x16float(coarse[index / 8u]);
            block.d = factors.x;
            block.m = factors.y;
            if (SCALES == BYTES) {
                block.scale = vec2<i32>(i32(bits & 255u));
                block.min = vec2<i32>(i32((bits >> 8u) & 255u));
            } else if (SCALES == NIBBLES) {
                block.scale = vec2<i32>(i32(bits & 15u), i32((bits >> 8u) & 15u));
                block.min = vec2<i32>(i32((bits >> 4u) & 15u), i32((bits >> 12u) & 15u));
            } else {
                let signed = bitcast<i32>(bits);
                block.scale = vec2<i32>((signed << 24u) >> 24u, (signed << 16u) >> 24u);
            }
        }
    }
    return block;
}

// The product with a block of 8-bit activations: words 0..4 and 4..8, scale, sums of the halves.
fn product(block: WeightBlock, first: vec4<u32>, second: vec4<u32>, scale: f32, sums: vec2<i32>) -> f32 {
    var halves: vec2<i32>;
    halves.x = dot4I8Packed(block.first.x, first.x) + dot4I8Packed(block.first.y, first.y)
        + dot4I8Packed(block.first.z, first.z) + dot4I8Packed(block.first.w, first.w);
    halves.y = dot4I8Packed(block.second.x, second.x) + dot4I8Packed(block.second.y, second.y)
        + dot4I8Packed(block.second.z, second.z) + dot4I8Packed(block.second.w, second.w);
    if (OFFSET != 0u) { halves -= sums * i32(OFFSET); }
    var sum: i32;
    if (SCALES >= BYTES) {
        sum = halves.x * block.scale.x + halves.y * block.scale.y;
    } else {
        sum = halves.x + halves.y;
    }
    var result = block.d * f32(sum);
    if (SCALES == HALF_MIN) { result += block.m * f32(sums.x + sums.y); }
    if (SCALES == BYTES || SCALES == NIBBLES) {
        result += block.m * f32(sums.x * block.min.x + sums.y * block.min.y);
    }
    return scale * result;
}
