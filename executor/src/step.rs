//! What the leader tells every rank for one forward pass, and what comes of it.
//! Invariant: a `StepPlan` is complete: ranks keep no state about sequences but the KV cache itself. All ranks execute
//! the same plans in the same order, which is what makes their collectives match.

use lockstep_kernels::ops::{Candidates, SampleRow};
use serde::{Deserialize, Serialize};

/// One forward pass of a batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepPlan {
    /// Counts up from 0 within an epoch.
    pub step_id: u64,
    /// Prefill chunks and decodes alike, in the order of their rows.
    pub sequences: Vec<StepSequence>,
    /// Where the spans of a traced step belong.
    pub trace: Option<StepTrace>,
}

/// The leader's span of a step, below which the ranks put theirs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepTrace {
    /// Of its trace.
    pub trace_id: u128,
    /// Its own.
    pub span_id: u64,
    /// Ranks show each exchange between hosts.
    pub is_detailed: bool,
}

/// One sequence's part of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepSequence {
    /// The engine's id of the sequence.
    pub sequence_id: u64,
    /// Position of the first of `token_ids`; everything before it is in the KV cache.
    pub first_position: u32,
    /// Tokens to compute, at least one.
    pub token_ids: Vec<u32>,
    /// KV blocks of the sequence in order of position, enough for `first_position + token_ids.len()` tokens.
    pub block_table: Vec<u32>,
    /// How to reduce the logits of the last token; `None` while the prompt is not complete.
    pub sample: Option<SampleRow>,
}

/// Id of the only sequence of a canary. Engines count up from 0 and do not get there.
const CANARY_SEQUENCE: u64 = u64::MAX;

impl StepPlan {
    /// A step that tries the ranks while they have nothing to do: one token, alone in a block that nobody refers to. It is
    /// given, sent and answered as every other, but passes only the first layer of each stage and samples nothing: so
    /// each device, each thread and each link has its part, at a small part of the cost.
    pub fn canary(step_id: u64, block: u32) -> Self {
        let sequence = StepSequence {
            sequence_id: CANARY_SEQUENCE,
            first_position: 0,
            token_ids: vec![0],
            block_table: vec![block],
            sample: None,
        };
        Self { step_id, sequences: vec![sequence], trace: None }
    }

    /// Whether it is one of [`Self::canary`].
    pub fn is_canary(&self) -> bool {
        self.sequences.first().is_some_and(|sequence| sequence.sequence_id == CANARY_SEQUENCE)
    }

    /// Tokens of the step.
    pub fn num_tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.token_ids.len()).sum()
    }
}

/// What the last stage makes of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepResult {
    /// The plan's.
    pub step_id: u64,
    /// One for each sequence with `sample`, in the plan's order; merged over the tensor-parallel ranks.
    pub candidates: Vec<Candidates>,
}
