//! Frequencies of the rotary embedding under every scaling that a `llama` checkpoint may ask for.
//! For: the GGUF and `config.json` readers.
//! Invariant: every frequency that is returned is finite.
//! Sources: llama.cpp `rope_yarn`; transformers `modeling_rope_utils.py`; the YaRN paper (arXiv 2309.00071).

use std::f32::consts::PI;

use crate::{RopeConfig, RopeStyle};

/// How positions beyond the trained context are squeezed into it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// All frequencies divided by `factor`.
    Linear {
        /// Divisor.
        factor: f32,
        /// Factor on cosine and sine.
        magnitude: f32,
    },
    /// Llama 3.1: long waves divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// Divisor of long waves.
        factor: f32,
        /// Waves longer than `original_context / low` are divided.
        low_freq_factor: f32,
        /// Waves shorter than `original_context / high` are kept.
        high_freq_factor: f32,
        /// Context of the training.
        original_context: f32,
    },
    /// YaRN: a ramp over the dimensions, and a factor on cosine and sine.
    Yarn {
        /// Divisor of long waves.
        factor: f32,
        /// Context of the training.
        original_context: f32,
        /// Rotations over the context above which a dimension is kept.
        beta_fast: f32,
        /// Rotations below which it is divided.
        beta_slow: f32,
        /// Factor on cosine and sine.
        magnitude: f32,
    },
}

/// The rotary embedding of base `theta` under a scaling; the error says which number is wrong.
pub(crate) fn rope_config(
    style: RopeStyle,
    rotary_dim: usize,
    theta: f32,
    scaling: &RopeScaling,
) -> Result<RopeConfig, String> {
    if !(theta.is_finite() && theta > 1.0) {
        return Err(format!("expected a rope base above 1, got {theta}"));
    }
    let plain = (0..rotary_dim / 2).map(|pair| (f64::from(theta)).powf(-2.0 * pair as f64 / rotary_dim as f64) as f32);
    let (frequencies, magnitude): (Vec<f32>, f32) = match *scaling {
        RopeScaling::Linear { factor, magnitude } => (plain.map(|frequency| frequency / factor).collect(), magnitude),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let scale = |frequency: f32| {
                let rotations = original_context * frequency / (2.0 * PI);
                let smooth = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let smooth = smooth.clamp(0.0, 1.0);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            };
            (plain.map(scale).collect(), 1.0)
        }
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, magnitude } => {
            let dimension_of = |rotations: f32| {
                rotary_dim as f32 * (original_context / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln())
            };
            let low = dimension_of(beta_fast).floor().max(0.0);
            let high = dimension_of(beta_slow).ceil().min(rotary_dim as f32 - 1.0);
            let scale = |(pair, frequency): (usize, f32)| {
                let ramp = ((pair as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                frequency / factor * ramp + frequency * (1.0 - ramp)
            };
            (plain.enumerate().map(scale).collect(), magnitude)
        }
    };
    if !(magnitude.is_finite() && frequencies.iter().all(|frequency| frequency.is_finite())) {
        return Err(format!("rope scaling {scaling:?} gives frequencies that are not finite"));
    }
    Ok(RopeConfig { style, rotary_dim, frequencies, magnitude })
}

/// Divides each frequency by its divisor (`rope_freqs.weight`); the error says which is wrong.
pub(crate) fn divide(frequencies: &mut [f32], divisors: &[f32]) -> Result<(), String> {
    if frequencies.len() != divisors.len() {
        return Err(format!("expected {} frequency divisors, got {}", frequencies.len(), divisors.len()));
    }
    for (index, (frequency, &divisor)) in frequencies.iter_mut().zip(divisors).enumerate() {
        if !(divisor.is_finite() && divisor > 0.0) {
            return Err(format!("divisor {index}: expected a number above 0, got {divisor}"));
        }
        *frequency /= divisor;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_near(rope: &RopeConfig, expected: &[(usize, f32)]) {
        for &(pair, frequency) in expected {
            let got = rope.frequencies[pair];
            assert!((got / frequency - 1.0).abs() < 2e-6, "pair {pair}: expected {frequency}, got {got}");
        }
    }

    /// Values of transformers' `_compute_llama3_parameters` for Llama 3.1 8B.
    #[test]
    fn llama3_scaling_equals_transformers() {
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
        let rope = rope_config(RopeStyle::Halves, 128, 500_000.0, &scaling).expect("rope");
        let expected = [(0, 1.0), (28, 3.211_446e-3), (30, 1.371_893_6e-3), (32, 5.248_461_5e-4), (34, 1.785_078e-4)];
        assert_near(&rope, &expected);
        assert_near(&rope, &[(36, 7.784_655_3e-5), (63, 3.068_926e-7)]);
        assert_eq!(rope.magnitude, 1.0);
    }

    /// Values of ggml's `rope_yarn` at position 1: factor 4 over a context of 32768.
    #[test]
    fn yarn_scaling_equals_ggml() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 32768.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            magnitude: 1.138_629_4,
        };
        let rope = rope_config(RopeStyle::Interleaved, 128, 1e6, &scaling).expect("rope");
        let expected = [(0, 1.0), (10, 0.115_478_2), (25, 4.131_738e-3), (32, 6.029_412e-4), (39, 6.490_394e-5)];
        assert_near(&rope, &expected);
        assert_near(&rope, &[(63, 3.102_344_4e-7)]);
    }

    #[test]
    fn divisors_divide_and_are_checked() {
        let scaling = RopeScaling::Linear { factor: 2.0, magnitude: 1.0 };
        let mut rope = rope_config(RopeStyle::Interleaved, 4, 100.0, &scaling).expect("rope");
        divide(&mut rope.frequencies, &[1.0, 5.0]).expect("divide");
        assert_near(&rope, &[(0, 0.5), (1, 0.01)]);
        assert!(divide(&mut rope.frequencies, &[1.0]).is_err_and(|problem| problem.contains("expected 2")));
        assert!(divide(&mut rope.frequencies, &[1.0, 0.0]).is_err_and(|problem| problem.contains("divisor 1")));
    }
}
