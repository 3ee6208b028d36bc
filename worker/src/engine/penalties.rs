//! Which tokens a sequence has seen, and how their logits are changed for it.
//! For: the sampler. Invariant: counts depend on the tokens alone, so a preempted sequence goes on with the same ones.

use std::collections::BTreeMap;

use lockstep_kernels::ops::TokenPenalty;

use super::Sampling;

/// Counts of the tokens that penalties apply to; empty if the sequence has no penalty.
#[derive(Debug)]
pub(super) struct Penalties {
    repetition: f32,
    presence: f32,
    frequency: f32,
    /// Token to its number of occurrences in the output; 0 for one that is only in the prompt.
    seen: BTreeMap<u32, u32>,
}

impl Penalties {
    /// Of a sequence that has only its prompt.
    pub(super) fn new(sampling: &Sampling, prompt: &[u32]) -> Self {
        let mut seen = BTreeMap::new();
        if sampling.repetition_penalty != 1.0 {
            seen.extend(prompt.iter().map(|&token_id| (token_id, 0)));
        }
        Self {
            repetition: sampling.repetition_penalty,
            presence: sampling.presence_penalty,
            frequency: sampling.frequency_penalty,
            seen,
        }
    }

    /// Counts a token of the output.
    pub(super) fn observe(&mut self, token_id: u32) {
        if self.repetition != 1.0 || self.presence != 0.0 || self.frequency != 0.0 {
            *self.seen.entry(token_id).or_insert(0) += 1;
        }
    }

    /// What is to be done to the next token's logits.
    pub(super) fn list(&self) -> Vec<TokenPenalty> {
        self.seen.iter().map(|(&token_id, &count)| self.penalty(token_id, count)).collect()
    }

    /// The logit before penalties of a token whose logit after penalties is `logit`.
    pub(super) fn undo(&self, token_id: u32, logit: f32) -> f32 {
        let Some(&count) = self.seen.get(&token_id) else {
            return logit;
        };
        let penalty = self.penalty(token_id, count);
        let scaled = logit + penalty.subtract;
        if scaled > 0.0 { scaled * penalty.repetition } else { scaled / penalty.repetition }
    }

    fn penalty(&self, token_id: u32, count: u32) -> TokenPenalty {
        let presence = if count > 0 { self.presence } else { 0.0 };
        TokenPenalty { token_id, repetition: self.repetition, subtract: presence + self.frequency * count as f32 }
    }
}
