//! Contract of the device side of sampling: from a rank's slice of the logits to the few candidates that can be chosen.
//! For: the last pipeline stage; the leader merges the candidates of the tensor-parallel ranks and chooses.
//! Invariant: merging the candidates of all slices gives what one rank with the whole vocabulary would give.

use serde::{Deserialize, Serialize};

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
