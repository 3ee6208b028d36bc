//! A model without weights: the logits of the next token are a hash of all tokens before it, read back through the
//! block tables from a KV cache of token ids. A block that is owned twice or a token that is not computed changes them.

use std::collections::BTreeMap;

use lockstep_executor::step::{StepPlan, StepResult};
use lockstep_kernels::ops::{Candidates, SampleRow};

use crate::engine::{Sampling, SequenceRequest, Tenant};

/// Tokens of the fake vocabulary.
pub const VOCAB_SIZE: usize = 300;

/// A greedy request.
pub fn request(prompt: Vec<u32>, max_tokens: usize) -> SequenceRequest {
    let sampling = Sampling::greedy(max_tokens);
    let (request_id, tenant) = (String::from("test"), Tenant::default());
    SequenceRequest { request_id, tenant, token_ids: prompt, num_output_tokens: 0, sampling }
}

/// FNV-1a with a final mix.
fn hash(values: impl IntoIterator<Item = u64>) -> u64 {
    let folded = values.into_iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, value| {
        (hash ^ value).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
    });
    (folded ^ (folded >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn uniform(values: impl IntoIterator<Item = u64>) -> f64 {
    ((hash(values) >> 12) as f64 + 0.5) / (1u64 << 52) as f64
}

/// What a device makes of a row of logits.
pub fn reduce(logits: &[f32], row: &SampleRow) -> Candidates {
    let best = |logits: &[f32], count: usize| {
        let mut all: Vec<_> = logits.iter().enumerate().map(|(token, &logit)| (token as u32, logit)).collect();
        all.sort_by(|left, right| right.1.total_cmp(&left.1).then(left.0.cmp(&right.0)));
        all.truncate(count);
        all
    };
    let log_sum_exp = |logits: &[f32], temperature: f32| {
        let scaled = || logits.iter().map(|&logit| f64::from(logit) / f64::from(temperature));
        let most = scaled().fold(f64::NEG_INFINITY, f64::max);
        (scaled().map(|logit| (logit - most).exp()).sum::<f64>().ln() + most) as f32
    };
    let mut penalized = logits.to_vec();
    for penalty in &row.penalties {
        let logit = &mut penalized[penalty.token_id as usize];
        *logit = if *logit > 0.0 { *logit / penalty.repetition } else { *logit * penalty.repetition };
        *logit -= penalty.subtract;
    }
    let noisy = |seed: u64, token: usize| {
        let noise = -(-uniform([seed, token as u64]).ln()).ln();
        f64::from(penalized[token]) / f64::from(row.temperature) + noise
    };
    let drawn = row.noise_seed.and_then(|seed| {
        let token = (0..logits.len()).max_by(|&left, &right| noisy(seed, left).total_cmp(&noisy(seed, right)))?;
        Some((token as u32, noisy(seed, token) as f32, logits[token]))
    });
    Candidates {
        top: best(&penalized, row.top_k),
        scaled_log_sum_exp: log_sum_exp(&penalized, row.temperature),
        raw_top: best(logits, row.raw_top_k),
        raw_log_sum_exp: log_sum_exp(logits, 1.0),
        drawn,
    }
}

/// The ranks of a replica.
pub struct FakeModel {
    block_size: usize,
    /// `(block, offset)` to the token stored there.
    cache: BTreeMap<(u32, usize), u32>,
}

impl FakeModel {
    /// An empty cache.
    pub fn new(block_size: usize) -> Self {
        Self { block_size, cache: BTreeMap::new() }
    }

    /// Executes a step.
    pub fn execute(&mut self, plan: &StepPlan) -> StepResult {
        let mut candidates = Vec::new();
        for part in &plan.sequences {
            let slot = |position: usize| (part.block_table[position / self.block_size], position % self.block_size);
            let first = part.first_position as usize;
            for (offset, &token_id) in part.token_ids.iter().enumerate() {
                self.cache.insert(slot(first + offset), token_id);
            }
            let Some(row) = &part.sample else { continue };
            let history: Vec<_> =
                (0..first + part.token_ids.len()).map(|position| u64::from(self.cache[&slot(position)])).collect();
            let state = hash(history);
            let logits: Vec<_> =
                (0..VOCAB_SIZE).map(|token| (uniform([state, token as u64]) * 8.0 - 4.0) as f32).collect();
            candidates.push(reduce(&logits, row));
        }
        StepResult { step_id: plan.step_id, candidates }
    }
}
