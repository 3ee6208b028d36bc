//! Steps of all the sizes at which a device chooses other kernels: powers of two of sequences that decode, of tokens of a
//! prompt, and both together.
//! For: [`Executor::prepare`](super::Executor::prepare). Invariant: every plan keeps the limits of the replica.

use lockstep_kernels::ops::SampleRow;

use crate::{
    StepLimits,
    step::{StepPlan, StepSequence},
};

/// Tokens of the prompt that stands beside decoding sequences.
const MIXED_PROMPT_TOKENS: usize = 16;

/// The steps.
pub(super) fn plans(limits: &StepLimits) -> Vec<StepPlan> {
    let slots = limits.num_kv_blocks * limits.block_size;
    let longest = limits.max_step_tokens.min(limits.max_sequence_tokens).min(slots);
    let most = limits.max_num_sequences.min(limits.max_step_tokens).min(limits.num_kv_blocks);
    let decodes = sizes(most).map(|sequences| vec![1; sequences]);
    let prompts = sizes(longest).map(|tokens| vec![tokens]);
    let prompt_tokens = MIXED_PROMPT_TOKENS.min(limits.max_sequence_tokens);
    // A prompt beside them keeps the decoding sequences from fused kernels, of which there are as many.
    let most_beside = most
        .saturating_sub(1)
        .min(limits.max_step_tokens.saturating_sub(prompt_tokens))
        .min(limits.num_kv_blocks.saturating_sub(prompt_tokens.div_ceil(limits.block_size)));
    let mixed = (most_beside > 0).then(|| sizes(most_beside)).into_iter().flatten();
    let mixed = mixed.map(|sequences| [vec![prompt_tokens], vec![1; sequences]].concat());
    decodes.chain(prompts).chain(mixed).map(|lengths| plan(limits, &lengths)).collect()
}

/// Powers of two up to `most`, and `most`.
fn sizes(most: usize) -> impl Iterator<Item = usize> {
    let powers = std::iter::successors(Some(1_usize), |size| size.checked_mul(2));
    powers.take_while(move |size| *size < most).chain([most])
}

/// New sequences of so many tokens, each in blocks of its own.
fn plan(limits: &StepLimits, lengths: &[usize]) -> StepPlan {
    let mut next_block = 0;
    let sequences = lengths.iter().zip(0..).map(|(num_tokens, sequence_id)| {
        let first_block = next_block;
        next_block += num_tokens.div_ceil(limits.block_size) as u32;
        StepSequence {
            sequence_id,
            first_position: 0,
            token_ids: vec![0; *num_tokens],
            block_table: (first_block..next_block).collect(),
            sample: Some(SampleRow {
                top_k: 1,
                temperature: 1.0,
                noise_seed: None,
                penalties: Vec::new(),
                raw_top_k: 0,
            }),
        }
    });
    StepPlan { step_id: 0, sequences: sequences.collect(), trace: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Batch;

    #[test]
    fn every_plan_keeps_the_limits() {
        let limits = StepLimits {
            vocab_size: 100,
            num_kv_blocks: 100,
            block_size: 16,
            max_num_sequences: 24,
            max_step_tokens: 300,
            max_sequence_tokens: 4096,
        };
        let tight = StepLimits { num_kv_blocks: 1, block_size: 4, max_num_sequences: 1, ..limits };
        let short = StepLimits { max_step_tokens: 1, max_sequence_tokens: 1, ..limits };
        for (limits, expected) in [(limits, 6 + 10 + 6), (tight, 1 + 3), (short, 1 + 1)] {
            let plans = plans(&limits);
            assert_eq!(plans.len(), expected, "{limits:?}");
            for plan in &plans {
                let batch = Batch::new(plan, &limits).unwrap();
                let mut slots = batch.slot_mapping.clone();
                slots.sort_unstable();
                slots.dedup();
                assert_eq!(slots.len(), plan.num_tokens(), "{plan:?}");
            }
        }
    }
}
