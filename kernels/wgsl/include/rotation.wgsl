// The rotation of an element, for all that rotate: a key's bits do not depend on who does.

// `other` is the pair's other element, negated for the pair's first one; `angle` has cosine and sine. The sum is fused by name,
// so that no compiler chooses which product it rounds.
fn rotated(element: f32, other: f32, angle: vec2<f32>) -> f32 {
    return fma(element, angle.x, other * angle.y);
}
