//! What follows the product: storing, SwiGLU.
//! For: `matmul`, on the `[T][16]` products of one row group and tile.

use super::format::GROUP;
use crate::cpu::{
    math::silu,
    simd::{LANES, Simd, Vectorized},
};

/// Replaces each gate by `silu(gate) * up`. Equal lengths.
pub(super) struct SwiGlu<'a> {
    pub(super) gate: &'a mut [f32],
    pub(super) up: &'a [f32],
}

impl Vectorized for SwiGlu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (gates, rest) = self.gate.as_chunks_mut::<LANES>();
        let (ups, rest_up) = self.up.as_chunks::<LANES>();
        for (gate, up) in gates.iter_mut().zip(ups) {
            swiglu(simd, gate, up);
        }
        let (mut gate, mut up) = ([0.0; LANES], [0.0; LANES]);
        gate[..rest.len()].copy_from_slice(rest);
        up[..rest_up.len()].copy_from_slice(rest_up);
        swiglu(simd, &mut gate, &up);
        rest.copy_from_slice(&gate[..rest.len()]);
    }
}

#[inline(always)]
fn swiglu<S: Simd>(simd: S, gate: &mut [f32; LANES], up: &[f32; LANES]) {
    let product = simd.mul(silu(simd, simd.load(gate)), simd.load(up));
    simd.store(product, gate);
}

/// Where the products of one row group go: `[num_tokens, width]` outputs, of which this group owns `rows` columns.
pub(super) struct Target<V> {
    /// First output of the first token.
    pub(super) start: *mut V,
    /// Outputs of a token.
    pub(super) width: usize,
    /// First column of the group.
    pub(super) column: usize,
    /// Columns of the group, at most 16.
    pub(super) rows: usize,
}

impl<V: Copy> Target<V> {
    /// Stores the products `[tokens][16]` of the tokens from `first_token`.
    ///
    /// # Safety
    /// The outputs of these tokens and columns are valid and nobody else's at this time.
    #[inline]
    pub(super) unsafe fn write(&self, first_token: usize, products: &[[V; GROUP]]) {
        for (token, products) in products.iter().enumerate() {
            let at = (first_token + token) * self.width + self.column;
            // SAFETY: the caller's promise.
            let outputs = unsafe { std::slice::from_raw_parts_mut(self.start.add(at), self.rows) };
            match outputs.first_chunk_mut::<GROUP>() {
                Some(outputs) => *outputs = *products,
                None => outputs.copy_from_slice(&products[..self.rows]),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::Level;

    #[test]
    fn swiglu_is_close_to_the_exact_one_at_any_length() {
        for level in Level::supported() {
            for len in [0, 1, 16, 37] {
                let gates: Vec<f32> = (0..len).map(|index| index as f32 * 0.9 - 15.0).collect();
                let mut results = gates.clone();
                level.run(SwiGlu { gate: &mut results, up: &vec![1.5; len] });
                for (gate, result) in gates.iter().zip(results) {
                    let exact = f64::from(*gate) / (1.0 + (-f64::from(*gate)).exp()) * 1.5;
                    assert!((f64::from(result) - exact).abs() <= exact.abs() * 1e-6, "{gate}: {result} for {exact}");
                }
            }
        }
    }
}
