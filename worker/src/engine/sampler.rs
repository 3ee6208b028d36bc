//! How one sequence's next token is chosen: what to ask of the devices, and what to make of their candidates.
//! For: the scheduler. Invariant: the choice depends on the logits, the sampling parameters, the seed and the token's
//! position in the sequence alone; not on batch, number of candidates, preemption, or the rank that computed the logits.
//!
//! Order and meaning are vLLM's: penalties, temperature, min-p, top-k, top-p over what those two left, then the draw.
//! Each filter keeps a prefix of the tokens sorted by logit (ties: the smaller id first), so a list of the best
//! candidates is enough if the prefix ends inside it. If it does not, [`Choice::MoreCandidates`] has the step of this
//! one token repeated with a longer list: the filters are exact for every distribution, flat ones cost a step more.
//! The length that was needed is remembered, so that a sequence seldom pays twice. Unfiltered rows draw on the device.

use lockstep_kernels::ops::{Candidates, SampleRow};

use super::{Logprobs, Sampling, penalties::Penalties};

/// Temperatures below this are greedy: the quotient would leave the range of f32.
const GREEDY_TEMPERATURE: f32 = 1e-5;
/// Candidates that filtered rows ask for at first.
const FIRST_CANDIDATES: usize = 256;
/// Growth of the list when the filters reach past its end.
const GROWTH: usize = 8;
/// More candidates than any vocabulary has rows.
const MOST_CANDIDATES: usize = 1 << 20;

/// What the candidates come to.
#[derive(Debug, PartialEq)]
pub(super) enum Choice {
    /// The next token.
    Token(u32, Option<Logprobs>),
    /// The filters reach past the candidates: compute the same token again with the row that `row` gives now.
    MoreCandidates,
    /// The candidates hold no number to choose by: the model computed NaN, or the row is empty.
    Invalid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Greedy,
    /// Temperature alone: the device draws from the whole distribution.
    Unfiltered,
    Filtered,
}

/// The sampler of one sequence.
#[derive(Debug)]
pub(super) struct Sampler {
    mode: Mode,
    temperature: f32,
    top_p: f64,
    /// `usize::MAX`: off.
    top_k: usize,
    min_p: f64,
    seed: u64,
    num_logprobs: usize,
    penalties: Penalties,
    /// Length of the list that the next row asks for.
    num_candidates: usize,
}

impl Sampler {
    /// The sampler of a sequence that has only its prompt.
    pub(super) fn new(sampling: &Sampling, prompt: &[u32]) -> Self {
        let top_k = if sampling.top_k == 0 { usize::MAX } else { sampling.top_k };
        let mode = if sampling.temperature < GREEDY_TEMPERATURE {
            Mode::Greedy
        } else if top_k == usize::MAX && sampling.top_p >= 1.0 && sampling.min_p <= 0.0 {
            Mode::Unfiltered
        } else {
            Mode::Filtered
        };
        let num_candidates = match mode {
            Mode::Greedy | Mode::Unfiltered => 1,
            // Without min-p the top-k tokens are needed anyway: their sum is what top-p is a part of.
            Mode::Filtered if top_k < usize::MAX && sampling.min_p <= 0.0 => top_k.min(MOST_CANDIDATES),
            Mode::Filtered => top_k.min(FIRST_CANDIDATES),
        };
        Self {
            mode,
            temperature: sampling.temperature,
            top_p: f64::from(sampling.top_p),
            top_k,
            min_p: f64::from(sampling.min_p),
            seed: sampling.seed,
            num_logprobs: sampling.logprobs,
            penalties: Penalties::new(sampling, prompt),
            num_candidates,
        }
    }

    /// What the devices are to make of the logits for the token at `position`.
    pub(super) fn row(&self, position: usize) -> SampleRow {
        SampleRow {
            top_k: self.num_candidates,
            temperature: if self.mode == Mode::Greedy { 1.0 } else { self.temperature },
            noise_seed: (self.mode == Mode::Unfiltered).then(|| noise_seed(self.seed, position)),
            penalties: self.penalties.list(),
            raw_top_k: self.num_logprobs,
        }
    }

    /// Chooses the token at `position` from what [`Self::row`] brought.
    pub(super) fn choose(&mut self, position: usize, candidates: &Candidates) -> Choice {
        let Some(&(best_id, best_logit)) = candidates.top.first() else {
            return Choice::Invalid;
        };
        if !best_logit.is_finite() {
            return Choice::Invalid;
        }
        let (token_id, raw_logit) = match self.mode {
            Mode::Greedy => (best_id, self.penalties.undo(best_id, best_logit)),
            Mode::Unfiltered => match candidates.drawn {
                Some((token_id, score, raw_logit)) if !score.is_nan() => (token_id, raw_logit),
                _ => return Choice::Invalid,
            },
            Mode::Filtered => {
                let Some(num_kept) = self.num_kept(candidates) else {
                    self.num_candidates =
                        self.num_candidates.saturating_mul(GROWTH).min(self.top_k).min(MOST_CANDIDATES);
                    return Choice::MoreCandidates;
                };
                if self.top_k == usize::MAX || self.min_p > 0.0 {
                    let wanted = num_kept.saturating_mul(2).clamp(FIRST_CANDIDATES, MOST_CANDIDATES);
                    self.num_candidates = wanted.min(self.top_k);
                }
                let (token_id, logit) = self.draw(position, &candidates.top[..num_kept]);
                (token_id, self.penalties.undo(token_id, logit))
            }
        };
        let logprobs = (self.num_logprobs > 0).then(|| logprobs(token_id, raw_logit, candidates));
        Choice::Token(token_id, logprobs)
    }

    /// Counts a token of the output.
    pub(super) fn observe(&mut self, token_id: u32) {
        self.penalties.observe(token_id);
    }

    /// How many of the best candidates pass the filters, at least one; `None` if that cannot be said from so few.
    fn num_kept(&self, candidates: &Candidates) -> Option<usize> {
        let top = &candidates.top;
        let temperature = f64::from(self.temperature);
        let best = f64::from(top[0].1);
        let weight = |logit: f32| ((f64::from(logit) - best) / temperature).exp();
        let within_k = &top[..top.len().min(self.top_k)];
        let num_likely = within_k.iter().take_while(|candidate| weight(candidate.1) >= self.min_p).count().max(1);
        let is_whole_vocabulary = top.len() < self.num_candidates || self.num_candidates == MOST_CANDIDATES;
        let is_closed = num_likely < top.len() || num_likely == self.top_k || is_whole_vocabulary;
        if self.top_p >= 1.0 {
            return is_closed.then_some(num_likely);
        }
        let total = if is_closed {
            top[..num_likely].iter().map(|candidate| weight(candidate.1)).sum::<f64>()
        } else if self.min_p <= 0.0 && self.top_k == usize::MAX {
            (f64::from(candidates.scaled_log_sum_exp) - best / temperature).exp()
        } else {
            return None;
        };
        let mut before = 0.0;
        for (index, candidate) in top[..num_likely].iter().enumerate() {
            if index > 0 && before >= self.top_p * total {
                return Some(index);
            }
            before += weight(candidate.1);
        }
        (is_closed || before >= self.top_p * total).then_some(num_likely)
    }

    /// Draws by the Gumbel-max trick. Unlike a draw along the cumulated probabilities it gives the same token when two
    /// near-equal logits change places, as they do between shardings.
    fn draw(&self, position: usize, kept: &[(u32, f32)]) -> (u32, f32) {
        let seed = noise_seed(self.seed, position);
        let score =
            |&(token_id, logit): &(u32, f32)| f64::from(logit) / f64::from(self.temperature) + gumbel(seed, token_id);
        let mut chosen = kept[0];
        let mut best = score(&chosen);
        for candidate in &kept[1..] {
            let score = score(candidate);
            if score > best {
                (chosen, best) = (*candidate, score);
            }
        }
        chosen
    }
}

fn logprobs(token_id: u32, raw_logit: f32, candidates: &Candidates) -> Logprobs {
    let logprob = |logit: f32| (logit - candidates.raw_log_sum_exp).min(0.0);
    Logprobs {
        chosen: (token_id, logprob(raw_logit)),
        top: candidates.raw_top.iter().map(|&(token_id, logit)| (token_id, logprob(logit))).collect(),
    }
}

/// The seed of the noise for the token at `position` of a sequence. The position counts from the start of the prompt,
/// so a stream that another replica takes over (its tokens then being part of the prompt) goes on as it would have.
fn noise_seed(seed: u64, position: usize) -> u64 {
    mix(mix(seed).wrapping_add(position as u64))
}

/// Gumbel noise of a token, from a uniform number strictly between 0 and 1.
fn gumbel(noise_seed: u64, token_id: u32) -> f64 {
    let uniform = ((mix(noise_seed ^ mix(u64::from(token_id))) >> 12) as f64 + 0.5) * (-52f64).exp2();
    -(-uniform.ln()).ln()
}

/// The output function of SplitMix64 (Steele, Lea and Flood 2014).
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests;
