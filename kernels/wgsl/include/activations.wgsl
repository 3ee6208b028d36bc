// Blocks of 32 activations as 8-bit integers with a scale (`quant/activations.rs`).
//
// Word `j` of a block holds its values 4j..4j + 4. Beside the words come the scale's bits and the sums of the two halves
// of the block, 16 bits each.

fn pack_sums(sums: vec2<i32>) -> u32 {
    return (bitcast<u32>(sums.x) & 0xffffu) | (bitcast<u32>(sums.y) << 16u);
}

fn unpack_sums(word: u32) -> vec2<i32> {
    let bits = bitcast<i32>(word);
    return vec2<i32>((bits << 16u) >> 16u, bits >> 16u);
}
