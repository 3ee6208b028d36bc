// A block of 32 activations as 8-bit integers: the same rounding as the host's (`quant/activations.rs`).
//
// Word `j` of a block holds its values 4j..4j + 4. Beside the words come the scale's bits and the sums of the two halves
// of the block, 16 bits each.

struct QuantizedBlock {
    words: array<u32, 8>,
    scale: f32,
    sums: vec2<i32>,
}

fn quantize_block(values: array<vec4<f32>, 8>) -> QuantizedBlock {
    var all = values;
    var largest = 0.0;
    for (var i = 0u; i < 8u; i++) {
        let size = abs(all[i]);
        largest = max(max(largest, max(size.x, size.y)), max(size.z, size.w));
    }
    var inverse = 0.0;
    if (largest > 0.0) { inverse = 127.0 / largest; }
    var block: QuantizedBlock;
    block.scale = largest * (1.0 / 127.0);
    block.sums = vec2<i32>(0, 0);
    for (var i = 0u; i < 8u; i++) {
        let quants = vec4<i32>(round(all[i] * inverse));
        block.words[i] = pack4xI8(quants);
        let sum = quants.x + quants.y + quants.z + quants.w;
        if (i < 4u) { block.sums.x += sum; } else { block.sums.y += sum; }
    }
    return block;
}

fn pack_sums(sums: vec2<i32>) -> u32 {
    return (bitcast<u32>(sums.x) & 0xffffu) | (bitcast<u32>(sums.y) << 16u);
}

fn unpack_sums(word: u32) -> vec2<i32> {
    let bits = bitcast<i32>(word);
    return vec2<i32>((bits << 16u) >> 16u, bits >> 16u);
}
