//! The engine of a replica's leader. `schedule()` says what to run, `update()` takes what came of it.
//! Sole owner of KV block ids. Plain state: the clock is passed in, no thread, no network, no device.

use std::time::Instant;

use crate::step::{StepPlan, StepResult};

/// Limits of an engine, from the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// KV blocks of the replica.
    pub num_kv_blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Most sequences in a step.
    pub max_num_sequences: usize,
    /// Most tokens in a step.
    pub max_step_tokens: usize,
    /// Longest sequence, prompt and output together.
    pub max_sequence_tokens: usize,
    /// Most sequences waiting for admission; one more is refused as overloaded.
    pub max_waiting_sequences: usize,
    /// Steps in flight at once: the number of pipeline stages.
    pub max_steps_in_flight: usize,
}

/// The engine's id of a sequence.
pub type SequenceId = u64;

/// How a sequence's tokens are chosen; defaults already applied, values already validated.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "fields as in SamplingParams of lockstep.v1")]
pub struct Sampling {
    pub max_tokens: usize,
    pub temperature: f32,
    pub top_p: f32,
    pub top_k: usize,
    pub min_p: f32,
    pub seed: u64,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// Stop tokens and, unless ignored, the model's end-of-sequence tokens; not part of the output.
    pub stop_token_ids: Vec<u32>,
    pub logprobs: usize,
}

/// A sequence to run.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceRequest {
    /// For logs.
    pub request_id: String,
    /// Not empty, and shorter than `max_sequence_tokens`.
    pub prompt: Vec<u32>,
    /// How to continue it.
    pub sampling: Sampling,
}

/// `(token_id, logprob)` of the chosen token and of the most likely ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// The chosen token.
    pub chosen: (u32, f32),
    /// Most likely first, before penalties and temperature.
    pub top: Vec<(u32, f32)>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token.
    Stop,
    /// `max_tokens` or the longest sequence.
    Length,
}

/// Counts and times of a finished sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs, reason = "fields as in Usage and Timings of lockstep.v1")]
pub struct SequenceStats {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub cached_tokens: usize,
    pub queue_ms: f64,
    pub ttft_ms: f64,
    pub decode_ms: f64,
}

/// What a sequence yields.
#[derive(Clone, Debug, PartialEq)]
pub enum SequenceOutput {
    /// One more token.
    Token {
        /// Its id.
        token_id: u32,
        /// If asked for.
        logprobs: Option<Logprobs>,
    },
    /// The last output.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Counts and times.
        stats: SequenceStats,
    },
}

/// Why a sequence was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The waiting queue is full.
    #[error("{waiting} sequences are waiting, the limit is {limit}")]
    Overloaded {
        /// Now waiting.
        waiting: usize,
        /// Most that may wait.
        limit: usize,
    },
    /// The sequence can never run here.
    #[error("{what} is {got}, the limit is {limit}")]
    TooLong {
        /// What is too long.
        what: &'static str,
        /// Tokens asked for.
        got: usize,
        /// Tokens possible.
        limit: usize,
    },
    /// The prompt has no token.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
}

/// Numbers for status and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs, reason = "fields as in EngineStatus of lockstep.v1")]
pub struct EngineStatus {
    pub num_running_sequences: usize,
    pub num_waiting_sequences: usize,
    pub num_kv_blocks: usize,
    pub num_free_kv_blocks: usize,
    pub prefill_tokens_per_second: f64,
    pub decode_tokens_per_second: f64,
    pub num_preemptions: u64,
}

/// Schedules the sequences of one replica.
pub struct Engine {}

impl Engine {
    /// An idle engine.
    pub fn new(_config: EngineConfig) -> Self {
        todo!()
    }

    /// Queues a sequence.
    ///
    /// # Errors
    /// [`EngineError`]; the engine is unchanged.
    pub fn add(&mut self, _request: SequenceRequest, _now: Instant) -> Result<SequenceId, EngineError> {
        todo!()
    }

    /// Forgets a sequence and frees its blocks (at once, or when its step in flight returns). Unknown ids are ignored.
    pub fn cancel(&mut self, _sequence_id: SequenceId) {
        todo!()
    }

    /// The next step, or `None` if nothing can run now: no work, or enough steps in flight.
    pub fn schedule(&mut self, _now: Instant) -> Option<StepPlan> {
        todo!()
    }

    /// Takes the result of the oldest step in flight and returns what its sequences yield.
    pub fn update(&mut self, _result: StepResult, _now: Instant) -> Vec<(SequenceId, SequenceOutput)> {
        todo!()
    }

    /// Whether any sequence runs or waits.
    pub fn is_idle(&self) -> bool {
        todo!()
    }

    /// Numbers for status and metrics.
    pub fn status(&self, _now: Instant) -> EngineStatus {
        todo!()
    }
}
