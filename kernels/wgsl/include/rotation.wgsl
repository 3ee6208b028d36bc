// The rotation of a pair of elements, for all that rotate: a key's bits do not depend on who does.

// By an angle's cosine and sine. The sum is fused by name, so that no compiler chooses which product it rounds.
fn rotated(pair: vec2<f32>, angle: vec2<f32>) -> vec2<f32> {
    return fma(pair, vec2<f32>(angle.x), vec2<f32>(-pair.y, pair.x) * angle.y);
}
