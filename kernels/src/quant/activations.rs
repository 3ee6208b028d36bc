//! Quantization of activations: blocks of 32 signed bytes with one f32 scale.
//! For: every backend's integer matmul, and the oracle that judges it.
//! Invariant: the result depends on the 32 values alone, and is the same at every SIMD level.

/// Activations that share a scale.
pub const ACTIVATION_BLOCK: usize = 32;

/// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// Scale and quants (-127..=127) of one block: `values[i] ≈ scale * quants[i]`.
#[inline(always)]
pub fn quantize_block(values: &[f32; ACTIVATION_BLOCK]) -> (f32, [i8; ACTIVATION_BLOCK]) {
    let mut largest = [0.0_f32; 16];
    for lane in 0..16 {
        let (first, second) = (values[lane].abs(), values[lane + 16].abs());
        largest[lane] = if first > second { first } else { second };
    }
    for width in [8, 4, 2, 1] {
        for lane in 0..width {
            let other = largest[lane + width];
            largest[lane] = if largest[lane] > other { largest[lane] } else { other };
        }
    }
    let inverse = if largest[0] > 0.0 { 127.0 / largest[0] } else { 0.0 };
    let mut quants = [0_i8; ACTIVATION_BLOCK];
    for (quant, value) in quants.iter_mut().zip(values) {
        *quant = (value * inverse + ROUND).to_bits() as i8;
    }
    (largest[0] * (1.0 / 127.0), quants)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_round_to_nearest() {
        let mut values = [0.0; ACTIVATION_BLOCK];
        assert_eq!(quantize_block(&values), (0.0, [0; ACTIVATION_BLOCK]));
        for (index, value) in values.iter_mut().enumerate() {
            *value = (index as f32 - 12.0) * 0.37;
        }
        let (scale, quants) = quantize_block(&values);
        for (value, quant) in values.iter().zip(quants) {
            assert!((value - scale * f32::from(quant)).abs() <= scale * 0.5001, "{value} {quant} {scale}");
        }
        assert_eq!(quants[31], 127);
    }
}
