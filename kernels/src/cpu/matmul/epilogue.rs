//! What follows the product: storing, adding up in f64, SwiGLU.
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

impl<V> Target<V> {
    /// The outputs of a token.
    ///
    /// # Safety
    /// They are valid and nobody else's while they are used.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "the caller's promise")]
    pub(super) unsafe fn outputs(&self, token: usize) -> &mut [V] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(token * self.width + self.column), self.rows) }
    }
}

impl Target<f32> {
    /// Stores the products `[tokens][16]` of the tokens from `first_token`.
    ///
    /// # Safety
    /// The outputs of these tokens and columns are valid and nobody else's at this time.
    #[inline]
    pub(super) unsafe fn write(&self, first_token: usize, products: &[[f32; GROUP]]) {
        for (token, products) in (first_token..).zip(products) {
            // SAFETY: the caller's promise.
            let outputs = unsafe { self.outputs(token) };
            match outputs.first_chunk_mut::<GROUP>() {
                Some(outputs) => *outputs = *products,
                None => outputs.copy_from_slice(&products[..self.rows]),
            }
        }
    }
}

/// What takes a sum over columns.
pub(super) trait Total: Copy + Send {
    /// Takes it.
    fn take(&mut self, sum: f64);
}

/// A value of the residual stream: it is added to, and rounded once.
impl Total for f32 {
    #[inline(always)]
    fn take(&mut self, sum: f64) {
        *self = (f64::from(*self) + sum) as f32;
    }
}

/// A share of a sum over ranks.
impl Total for f64 {
    #[inline(always)]
    fn take(&mut self, sum: f64) {
        *self = sum;
    }
}

/// Adds sums `[sums][T]` to totals `[T]`, in their order. Of f32 numbers f64 adds hundreds without loss unless their
/// sizes are 2^20 apart, so that totals do not show where the columns were cut.
pub(super) struct AddSums<'a> {
    pub(super) sums: &'a [[f32; GROUP]],
    pub(super) totals: &'a mut [[f64; GROUP]],
}

impl Vectorized for AddSums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let width = self.totals.len();
        for (token, totals) in self.totals.iter_mut().enumerate() {
            let mut own = *totals;
            for sums in self.sums.iter().skip(token).step_by(width) {
                for (total, sum) in own.iter_mut().zip(sums) {
                    *total += f64::from(*sum);
                }
            }
            *totals = own;
        }
    }
}

/// Hands the totals of a token to its outputs.
pub(super) struct TakeTotals<'a, V> {
    pub(super) totals: &'a [f64; GROUP],
    pub(super) outputs: &'a mut [V],
}

impl<V: Total> Vectorized for TakeTotals<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        match self.outputs.first_chunk_mut::<GROUP>() {
            Some(outputs) => outputs.iter_mut().zip(self.totals).for_each(|(output, total)| output.take(*total)),
            None => self.outputs.iter_mut().zip(self.totals).for_each(|(output, total)| output.take(*total)),
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
