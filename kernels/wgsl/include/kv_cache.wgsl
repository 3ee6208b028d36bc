// Keys and values in the cache: `[block, head, offset, head_dim]`, rounded up to whole groups of four elements.
//
// DTYPE: 0 f16, 1 bf16, 2 f32. Elements go in groups of four: two words of 16-bit elements, four of f32.

fn pack_bf16(pair: vec2<f32>) -> u32 {
    // Rounds to nearest, ties to even; what is too large was cut before.
    var bits = bitcast<vec2<u32>>(pair);
    bits += 0x7fffu + ((bits >> vec2<u32>(16u)) & vec2<u32>(1u));
    return (bits.x >> 16u) | (bits.y & 0xffff0000u);
}

fn unpack_bf16(word: u32) -> vec2<f32> {
    return bitcast<vec2<f32>>(vec2<u32>(word << 16u, word & 0xffff0000u));
}

// The largest finite value: what is larger is stored as it.
fn cache_limit() -> f32 {
    switch (DTYPE) {
        case 0u: { return 65504.0; }
        case 1u: { return 3.3895314e38; }
        default: { return 3.4028234663852886e38; }
    }
}
