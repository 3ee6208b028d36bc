//! A step plan, checked against the limits of the replica and laid out as the kernels want it.
//! Invariant: every token id, position and KV block of a `Batch` lies inside its table, so a wrong plan is an error
//! here and never a panic or a foreign block later.

use lockstep_kernels::ops::{AttentionSequence, SampleRow};

use crate::{
    ExecutorError,
    step::{StepPlan, StepSequence},
};

/// What a step may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// KV blocks of the replica.
    pub num_kv_blocks: usize,
    /// Tokens in a KV block.
    pub block_size: usize,
    /// Most sequences in a step.
    pub max_num_sequences: usize,
    /// Most tokens in a step.
    pub max_step_tokens: usize,
    /// Longest sequence.
    pub max_sequence_tokens: usize,
}

/// Bytes of an encoded message and of each of its rows, beside their lists; integers take up to nine.
const MESSAGE_ROW_BYTES: usize = 128;
/// Bytes of an encoded token id or KV block.
const ID_BYTES: usize = 5;
/// Bytes of an encoded candidate, `(u32, f32)`.
const CANDIDATE_BYTES: usize = ID_BYTES + 4;
/// Bytes of an encoded `TokenPenalty`.
const PENALTY_BYTES: usize = ID_BYTES + 4 + 4;

impl StepLimits {
    /// Bytes that no encoded step plan within these limits exceeds, and no rank's result of one, whatever the sampling
    /// parameters: a flat distribution has the whole vocabulary for candidates, a long sequence a penalty for each token.
    pub fn max_message_bytes(&self) -> usize {
        let rows = |list_bytes: usize| {
            list_bytes.saturating_add(MESSAGE_ROW_BYTES).saturating_mul(self.max_num_sequences.saturating_add(1))
        };
        let num_blocks = self.max_sequence_tokens.div_ceil(self.block_size.max(1)).min(self.num_kv_blocks);
        let num_penalties = self.max_sequence_tokens.min(self.vocab_size);
        let table_bytes = num_blocks.saturating_mul(ID_BYTES);
        let of_plan = rows(table_bytes.saturating_add(num_penalties.saturating_mul(PENALTY_BYTES)))
            .saturating_add(self.max_step_tokens.saturating_mul(ID_BYTES));
        // The best candidates, and the best before penalties.
        let of_result = rows(self.vocab_size.saturating_mul(2 * CANDIDATE_BYTES));
        of_plan.max(of_result)
    }
}

/// The rows of one step. All vectors but the last two have one entry for each token.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Tokens to compute.
    pub token_ids: Vec<u32>,
    /// Position of each in its sequence.
    pub positions: Vec<u32>,
    /// `block * block_size + offset` of each.
    pub slot_mapping: Vec<u32>,
    /// Sequences in the order of their rows.
    pub sequences: Vec<AttentionSequence<'a>>,
    /// Rows whose logits are wanted: the last of each sequence that samples.
    pub sampled_rows: Vec<u32>,
    /// How to reduce them.
    pub samples: Vec<SampleRow>,
}

impl<'a> Batch<'a> {
    /// Checks and lays out a plan.
    ///
    /// # Errors
    /// [`ExecutorError::Step`] naming the sequence and the number that is out of bounds.
    pub fn new(plan: &'a StepPlan, limits: &StepLimits) -> Result<Self, ExecutorError> {
        let wrong = |problem: String| ExecutorError::Step { step_id: plan.step_id, problem };
        let num_tokens = plan.num_tokens();
        if num_tokens == 0 || num_tokens > limits.max_step_tokens {
            return Err(wrong(format!("{num_tokens} tokens, expected 1 to {}", limits.max_step_tokens)));
        }
        if plan.sequences.len() > limits.max_num_sequences {
            return Err(wrong(format!(
                "{} sequences, the limit is {}",
                plan.sequences.len(),
                limits.max_num_sequences
            )));
        }
        let mut batch = Self {
            token_ids: Vec::with_capacity(num_tokens),
            positions: Vec::with_capacity(num_tokens),
            slot_mapping: Vec::with_capacity(num_tokens),
            sequences: Vec::with_capacity(plan.sequences.len()),
            sampled_rows: Vec::new(),
            samples: Vec::new(),
        };
        for sequence in &plan.sequences {
            check(sequence, limits)
                .map_err(|problem| wrong(format!("sequence {}: {problem}", sequence.sequence_id)))?;
            batch.push(sequence, limits.block_size);
        }
        Ok(batch)
    }

    /// Tokens of the step.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    fn push(&mut self, sequence: &'a StepSequence, block_size: usize) {
        let first_position = sequence.first_position as usize;
        for (index, token_id) in sequence.token_ids.iter().enumerate() {
            let position = first_position + index;
            let slot = sequence.block_table[position / block_size] as usize * block_size + position % block_size;
            self.token_ids.push(*token_id);
            self.positions.push(position as u32);
            self.slot_mapping.push(slot as u32);
        }
        self.sequences.push(AttentionSequence {
            num_tokens: sequence.token_ids.len(),
            first_position,
            block_table: &sequence.block_table,
        });
        if let Some(sample) = &sequence.sample {
            self.sampled_rows.push(self.token_ids.len() as u32 - 1);
            self.samples.push(sample.clone());
        }
    }
}

fn check(sequence: &StepSequence, limits: &StepLimits) -> Result<(), String> {
    if sequence.token_ids.is_empty() {
        return Err("it has no tokens".to_owned());
    }
    let end = sequence.first_position as usize + sequence.token_ids.len();
    if end > limits.max_sequence_tokens {
        return Err(format!("it ends at {end}, the longest sequence is {}", limits.max_sequence_tokens));
    }
    if sequence.block_table.len() * limits.block_size < end {
        return Err(format!("{} blocks of {} for {end} tokens", sequence.block_table.len(), limits.block_size));
    }
    if let Some(block) = sequence.block_table.iter().find(|block| **block as usize >= limits.num_kv_blocks) {
        return Err(format!("kv block {block} is not below {}", limits.num_kv_blocks));
    }
    if let Some(token_id) = sequence.token_ids.iter().find(|token_id| **token_id as usize >= limits.vocab_size) {
        return Err(format!("token {token_id} is not below {}", limits.vocab_size));
    }
    if sequence.sample.as_ref().is_some_and(|sample| sample.top_k == 0) {
        return Err("top_k of its sample is 0".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::StepTrace;

    const LIMITS: StepLimits = StepLimits {
        vocab_size: 100,
        num_kv_blocks: 8,
        block_size: 4,
        max_num_sequences: 2,
        max_step_tokens: 8,
        max_sequence_tokens: 32,
    };

    fn sequence(first_position: u32, token_ids: &[u32], block_table: &[u32], samples: bool) -> StepSequence {
        let sample = SampleRow { top_k: 1, temperature: 1.0, noise_seed: None, penalties: Vec::new(), raw_top_k: 0 };
        StepSequence {
            sequence_id: 7,
            first_position,
            token_ids: token_ids.to_vec(),
            block_table: block_table.to_vec(),
            sample: samples.then_some(sample),
        }
    }

    fn encoded_bytes(value: &impl serde::Serialize) -> usize {
        bincode::serde::encode_to_vec(value, bincode::config::standard()).unwrap().len()
    }

    fn plan(sequences: Vec<StepSequence>) -> StepPlan {
        StepPlan { step_id: 3, sequences, trace: None }
    }

    #[test]
    fn rows_follow_the_sequences() {
        let plan = plan(vec![sequence(3, &[1, 2, 3], &[5, 2], false), sequence(0, &[9], &[7], true)]);
        let batch = Batch::new(&plan, &LIMITS).unwrap();
        assert_eq!(batch.token_ids, [1, 2, 3, 9]);
        assert_eq!(batch.positions, [3, 4, 5, 0]);
        assert_eq!(batch.slot_mapping, [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 7 * 4]);
        assert_eq!(batch.sampled_rows, [3]);
        assert_eq!(batch.sequences.len(), 2);
    }

    #[test]
    fn the_longest_messages_fit() {
        use lockstep_kernels::ops::{Candidates, TokenPenalty};
        for limits in [
            LIMITS,
            StepLimits {
                vocab_size: 128_256,
                num_kv_blocks: 400,
                max_num_sequences: 3,
                max_sequence_tokens: 8192,
                ..LIMITS
            },
            StepLimits {
                vocab_size: 50,
                num_kv_blocks: 4000,
                max_num_sequences: 64,
                max_sequence_tokens: 8192,
                ..LIMITS
            },
        ] {
            let penalty = TokenPenalty { token_id: u32::MAX, repetition: 1.1, subtract: 0.5 };
            let sample = SampleRow {
                top_k: usize::MAX,
                temperature: 1.0,
                noise_seed: Some(u64::MAX),
                penalties: vec![penalty; limits.vocab_size.min(limits.max_sequence_tokens)],
                raw_top_k: usize::MAX,
            };
            let sequence = StepSequence {
                sequence_id: u64::MAX,
                first_position: u32::MAX,
                token_ids: vec![u32::MAX; limits.max_step_tokens / limits.max_num_sequences],
                block_table: vec![
                    u32::MAX;
                    limits.max_sequence_tokens.div_ceil(limits.block_size).min(limits.num_kv_blocks)
                ],
                sample: Some(sample),
            };
            let trace = Some(StepTrace { trace_id: u128::MAX, span_id: u64::MAX, is_detailed: true });
            let plan = StepPlan { step_id: u64::MAX, sequences: vec![sequence; limits.max_num_sequences], trace };
            let top = vec![(u32::MAX, 0.0); limits.vocab_size];
            let candidates =
                Candidates { top: top.clone(), raw_top: top, drawn: Some((u32::MAX, 0.0, 0.0)), ..Default::default() };
            let result = (u64::MAX, vec![candidates; limits.max_num_sequences]);
            let longest = encoded_bytes(&plan).max(encoded_bytes(&result));
            let limit = limits.max_message_bytes();
            assert!((longest..2 * longest).contains(&limit), "{limits:?}: {limit} for {longest}");
        }
    }

    #[test]
    fn wrong_plans_are_refused_with_the_number() {
        let cases = [
            (plan(vec![]), "0 tokens"),
            (plan(vec![sequence(0, &[1; 9], &[0, 1, 2], false)]), "9 tokens"),
            (plan(vec![sequence(0, &[], &[0], false), sequence(0, &[1], &[0], false)]), "no tokens"),
            (plan(vec![sequence(0, &[1], &[8], false)]), "kv block 8"),
            (plan(vec![sequence(4, &[1], &[0], false)]), "1 blocks of 4 for 5"),
            (plan(vec![sequence(0, &[100], &[0], false)]), "token 100"),
            (plan(vec![sequence(u32::MAX, &[1], &[0], false)]), "longest sequence is 32"),
            (plan((0..3).map(|_| sequence(0, &[1], &[0], false)).collect()), "3 sequences"),
        ];
        for (plan, expected) in cases {
            let message = Batch::new(&plan, &LIMITS).unwrap_err().to_string();
            assert!(message.starts_with("step 3") && message.contains(expected), "{message}");
        }
    }
}
