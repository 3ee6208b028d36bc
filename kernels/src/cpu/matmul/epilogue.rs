//! What follows the product: storing, adding to the residual, SwiGLU.
//! For: `matmul`, on the `[T][16]` products of one row group and tile.

use super::format::GROUP;

/// Replaces each gate by `silu(gate) * up`.
#[inline(always)]
pub(super) fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

/// `e^x` to about 2 units in the last place, without branches so that loops over it are vectorized; the range is
/// clamped to ±87.3, where f32 ends. Source: the Cephes library, `expf`.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Adding and subtracting it rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const COEFFICIENTS: [f32; 5] = [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5.000_000_1e-1];
    let x = if x > 87.3 { 87.3 } else { x };
    let x = if x < -87.3 { -87.3 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let power = shifted - ROUND;
    let rest = x - power * LN_2_HIGH - power * LN_2_LOW;
    let mut series = 1.987_569_1e-4;
    for coefficient in COEFFICIENTS {
        series = series * rest + coefficient;
    }
    let fraction = series * rest * rest + rest + 1.0;
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).wrapping_add(127);
    fraction * f32::from_bits((exponent << 23) as u32)
}

/// Where the products of one row group go: `[num_tokens, width]` outputs, of which this group owns `rows` columns.
pub(super) struct Target {
    /// First output of the first token.
    pub(super) start: *mut f32,
    /// Outputs of a token.
    pub(super) width: usize,
    /// First column of the group.
    pub(super) column: usize,
    /// Columns of the group, at most 16.
    pub(super) rows: usize,
    /// Whether the products are added.
    pub(super) is_sum: bool,
}

impl Target {
    /// Stores or adds the products `[tokens][16]` of the tokens from `first_token`.
    ///
    /// # Safety
    /// The outputs of these tokens and columns are valid and nobody else's at this time.
    #[inline]
    pub(super) unsafe fn write(&self, first_token: usize, products: &[[f32; GROUP]]) {
        for (token, products) in products.iter().enumerate() {
            let at = (first_token + token) * self.width + self.column;
            // SAFETY: the caller's promise.
            let outputs = unsafe { std::slice::from_raw_parts_mut(self.start.add(at), self.rows) };
            match (outputs.first_chunk_mut::<GROUP>(), self.is_sum) {
                (Some(outputs), false) => *outputs = *products,
                (Some(outputs), true) => outputs.iter_mut().zip(products).for_each(|(output, value)| *output += value),
                (None, false) => outputs.copy_from_slice(&products[..self.rows]),
                (None, true) => outputs.iter_mut().zip(products).for_each(|(output, value)| *output += value),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swiglu_is_close_to_the_exact_one() {
        for step in -2000..2000 {
            let gate = step as f32 * 0.05;
            let exact = f64::from(gate) / (1.0 + (-f64::from(gate)).exp()) * 1.5;
            let mut value = [gate];
            swiglu(&mut value, &[1.5]);
            let error = (f64::from(value[0]) - exact).abs();
            assert!(error <= exact.abs() * 1e-6 + 1e-30, "{gate}: {} for {exact}", value[0]);
        }
    }
}
