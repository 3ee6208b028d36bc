//! Contract of the device side of sampling: from a rank's slice of the logits to the few candidates that can be chosen.
//! For: the last pipeline stage; the leader merges the candidates of the tensor-parallel ranks and chooses.
//! Invariant: merging the candidates of all slices gives what one rank with the whole vocabulary would give.
//! A logit that is NaN counts as minus infinity: it is never chosen and adds nothing to a sum. A row without any finite
//! logit (a broken model) is thus seen by its best candidate being minus infinity.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use crate::KernelError;

/// A token whose logit is changed before the choice.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenPenalty {
    /// Token id in the whole vocabulary; ids outside this rank's rows are ignored.
    pub token_id: u32,
    /// Divides a positive logit and multiplies a negative one (repetition penalty, Keskar et al. 2019); 1 is none.
    pub repetition: f32,
    /// Subtracted (presence and frequency penalties together).
    pub subtract: f32,
}

/// How one row of logits is to be reduced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleRow {
    /// Candidates wanted, at least 1; fewer come back only if the slice has fewer rows.
    pub top_k: usize,
    /// Temperature for `scaled_log_sum_exp` and the noise; greedy rows pass 1.
    pub temperature: f32,
    /// `Some(seed)`: also draw from the whole distribution `softmax(logits / temperature)` by the Gumbel-max trick.
    /// The noise of a token depends on the seed and the token id alone, so slices draw as one rank would.
    pub noise_seed: Option<u64>,
    /// Logits to change first, each token at most once.
    pub penalties: Vec<TokenPenalty>,
    /// Also return the `raw_top_k` best candidates before penalties (log-probabilities); 0: none.
    pub raw_top_k: usize,
}

/// What a slice of one row comes to. Ids are those of the whole vocabulary; ties go to the smaller id.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Candidates {
    /// `(token_id, logit after penalties)`, best first.
    pub top: Vec<(u32, f32)>,
    /// `ln Σ exp(logit after penalties / temperature)` over the slice.
    pub scaled_log_sum_exp: f32,
    /// The best before penalties, best first, and the same sum at temperature 1 without penalties.
    pub raw_top: Vec<(u32, f32)>,
    /// `ln Σ exp(logit before penalties)` over the slice.
    pub raw_log_sum_exp: f32,
    /// The token drawn by noise: `(token_id, logit / temperature + noise, logit before penalties)`.
    pub drawn: Option<(u32, f32, f32)>,
}

impl SampleRow {
    /// Accepts the row or names the number that is wrong.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if no candidate is wanted, [`KernelError::OutOfRange`] for a temperature that is not a
    /// positive finite number (its bits are named).
    pub fn check(&self) -> Result<(), KernelError> {
        if self.top_k == 0 {
            return Err(KernelError::Shape { operation: "sample", what: "top_k", got: 0, expected: 1 });
        }
        if !(self.temperature.is_normal() && self.temperature > 0.0) {
            return Err(KernelError::OutOfRange {
                operation: "sample",
                what: "temperature (bits of an f32)",
                got: self.temperature.to_bits() as usize,
                limit: f32::INFINITY.to_bits() as usize,
            });
        }
        Ok(())
    }
}

impl Candidates {
    /// What the whole row comes to, from what its slices came to (in any order). An empty iterator gives no candidates.
    pub fn merge(row: &SampleRow, slices: impl IntoIterator<Item = Self>) -> Self {
        let mut merged =
            Self { scaled_log_sum_exp: f32::NEG_INFINITY, raw_log_sum_exp: f32::NEG_INFINITY, ..Self::default() };
        let (mut scaled, mut raw) = (Vec::new(), Vec::new());
        for slice in slices {
            merged.top.extend(slice.top);
            merged.raw_top.extend(slice.raw_top);
            scaled.push(slice.scaled_log_sum_exp);
            raw.push(slice.raw_log_sum_exp);
            merged.drawn = match (merged.drawn, slice.drawn) {
                (Some(one), Some(other)) if better((other.0, other.1), (one.0, one.1)).is_lt() => Some(other),
                (one, other) => one.or(other),
            };
        }
        merged.scaled_log_sum_exp = log_sum_exp(&mut scaled);
        merged.raw_log_sum_exp = log_sum_exp(&mut raw);
        for (top, wanted) in [(&mut merged.top, row.top_k), (&mut merged.raw_top, row.raw_top_k)] {
            top.sort_unstable_by(|one, other| better(*one, *other));
            top.truncate(wanted);
        }
        merged
    }
}

/// Order of candidates, best first: the larger value, of equal ones the smaller id.
fn better(one: (u32, f32), other: (u32, f32)) -> Ordering {
    other.1.total_cmp(&one.1).then(one.0.cmp(&other.0))
}

/// `ln Σ exp(terms)`, in ascending order of the terms so that the order of the slices does not matter.
fn log_sum_exp(terms: &mut [f32]) -> f32 {
    terms.sort_unstable_by(f32::total_cmp);
    match terms.last() {
        Some(&largest) if largest.is_finite() => {
            let sum: f64 = terms.iter().map(|term| f64::from(term - largest).exp()).sum();
            (f64::from(largest) + sum.ln()) as f32
        }
        Some(&largest) => largest,
        None => f32::NEG_INFINITY,
    }
}
