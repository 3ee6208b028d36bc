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
