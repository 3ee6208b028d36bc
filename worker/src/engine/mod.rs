//! The engine of a replica's leader. `schedule()` says what to run, `update()` takes what came of it.
//! For: the replica's leader thread. Invariants: sole owner of KV block ids; what a sequence yields does not depend on
//! what else runs or ran, on preemptions or on the number of steps in flight; nothing is yielded twice.
//! Not here: threads, network, devices, the clock (passed in), stop texts (the coordinator's).
//!
//! `tenant`: whose a sequence is; `fair_queue`: whose turn it is; `scheduler`: which sequences, with how many tokens;
//! `block_manager`: free and shared KV blocks; `sequence`: one sequence's progress; `sampler`, `penalties`: the choice of
//! the next token; `throughput`: tokens per second.

mod block_manager;
mod fair_queue;
mod penalties;
mod sampler;
mod scheduler;
mod sequence;
mod tenant;
mod throughput;

use std::{collections::VecDeque, time::Instant};

use lockstep_executor::step::{StepPlan, StepResult, StepSequence};
use lockstep_kernels::ops::Candidates;

pub use self::{block_manager::PrefixChanges, tenant::Tenant};
use self::{sampler::Choice, scheduler::Scheduler, sequence::Sequence, throughput::Throughput};

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
    /// Whether sequences share the blocks of equal beginnings.
    pub is_prefix_caching: bool,
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

impl Sampling {
    /// The most likely tokens, up to `max_tokens` of them, whichever they are: no penalties, no stop tokens.
    pub fn greedy(max_tokens: usize) -> Self {
        Self {
            max_tokens,
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            stop_token_ids: Vec::new(),
            logprobs: 0,
        }
    }
}

/// A sequence to run.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceRequest {
    /// For logs.
    pub request_id: String,
    /// Whose it is.
    pub tenant: Tenant,
    /// The prompt, which is not empty, and after it what the sequence has yielded elsewhere; shorter than
    /// `max_sequence_tokens`.
    pub token_ids: Vec<u32>,
    /// How many of the last tokens were yielded elsewhere; the sequence goes on behind them as if it had yielded them.
    pub num_output_tokens: usize,
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
    /// The model gave no usable number for the next token (NaN); the replica goes on.
    Error,
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

/// How a sequence came to its first token here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beginning {
    /// How long it waited for its first step.
    pub queue_ms: f64,
    /// Tokens of its prompt that others had computed.
    pub cached_tokens: usize,
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
        /// With the first token.
        beginning: Option<Beginning>,
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
    pub prefix_query_tokens: u64,
    pub prefix_hit_tokens: u64,
}

/// Schedules the sequences of one replica.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    scheduler: Scheduler,
    in_flight: VecDeque<StepInFlight>,
    next_sequence_id: SequenceId,
    next_step_id: u64,
    throughput: Throughput,
}

/// What is remembered of a step until it returns.
#[derive(Debug)]
struct StepInFlight {
    step_id: u64,
    started: Instant,
    num_prefill_tokens: usize,
    /// In the order of the plan, and whether the sequence's next token is sampled.
    sequences: Vec<(SequenceId, bool)>,
}

impl Engine {
    /// An idle engine.
    pub fn new(config: EngineConfig) -> Self {
        Self {
            config,
            scheduler: Scheduler::new(config),
            in_flight: VecDeque::new(),
            next_sequence_id: 0,
            next_step_id: 0,
            throughput: Throughput::default(),
        }
    }

    /// Queues a sequence.
    ///
    /// # Errors
    /// [`EngineError`]; the engine is unchanged.
    pub fn add(&mut self, request: SequenceRequest, now: Instant) -> Result<SequenceId, EngineError> {
        let max_sequence_tokens = self.scheduler.max_sequence_tokens();
        let (num_tokens, num_output_tokens) = (request.token_ids.len(), request.num_output_tokens);
        if num_tokens <= num_output_tokens {
            return Err(EngineError::EmptyPrompt);
        }
        if num_tokens >= max_sequence_tokens {
            let limit = max_sequence_tokens.saturating_sub(1);
            return Err(EngineError::TooLong { what: "prompt length in tokens", got: num_tokens, limit });
        }
        if !self.scheduler.may_wait(&request.tenant) {
            let (waiting, limit) = (self.scheduler.num_waiting(), self.config.max_waiting_sequences);
            return Err(EngineError::Overloaded { waiting, limit });
        }
        let sequence_id = self.next_sequence_id;
        self.next_sequence_id += 1;
        tracing::debug!(sequence_id, request_id = request.request_id, num_tokens, num_output_tokens, "queued");
        self.scheduler.enqueue(Sequence::new(sequence_id, request, max_sequence_tokens, now));
        Ok(sequence_id)
    }

    /// Forgets a sequence and frees its blocks (at once, or when its step in flight returns). Unknown ids are ignored.
    pub fn cancel(&mut self, sequence_id: SequenceId) {
        self.scheduler.cancel(sequence_id);
    }

    /// The next step, or `None` if nothing can run now: no work, or enough steps in flight.
    pub fn schedule(&mut self, now: Instant) -> Option<StepPlan> {
        if self.in_flight.len() >= self.config.max_steps_in_flight.max(1) {
            return None;
        }
        let sequences = self.scheduler.form_step(self.next_step_id, now);
        if sequences.is_empty() {
            return None;
        }
        let plan = StepPlan { step_id: self.next_step_id, sequences, trace: None };
        self.next_step_id += 1;
        let is_decode = |sequence: &&StepSequence| sequence.sample.is_some() && sequence.token_ids.len() == 1;
        self.in_flight.push_back(StepInFlight {
            step_id: plan.step_id,
            started: now,
            num_prefill_tokens: plan.num_tokens() - plan.sequences.iter().filter(is_decode).count(),
            sequences: plan.sequences.iter().map(|part| (part.sequence_id, part.sample.is_some())).collect(),
        });
        Some(plan)
    }

    /// A step that tries the ranks, or `None` if there is other work. Its block stays free: steps are executed in order, so
    /// whoever is given it next writes it later.
    pub fn canary(&mut self, now: Instant) -> Option<StepPlan> {
        if !self.is_idle() {
            return None;
        }
        let plan = StepPlan::canary(self.next_step_id, self.scheduler.scratch_block()?);
        self.next_step_id += 1;
        let (step_id, sequences) = (plan.step_id, Vec::new());
        self.in_flight.push_back(StepInFlight { step_id, started: now, num_prefill_tokens: 0, sequences });
        Some(plan)
    }

    /// Takes the result of the oldest step in flight and returns what its sequences yield.
    ///
    /// A result of another step or with too few candidates ends the sequences concerned with [`FinishReason::Error`].
    pub fn update(&mut self, result: StepResult, now: Instant) -> Vec<(SequenceId, SequenceOutput)> {
        let Some(step) = self.in_flight.pop_front() else {
            tracing::error!(step_id = result.step_id, "a result came without a step in flight");
            return Vec::new();
        };
        let mut candidates = result.candidates.into_iter();
        if result.step_id != step.step_id {
            tracing::error!(expected = step.step_id, got = result.step_id, "the result is of another step");
            candidates = Vec::new().into_iter();
        }
        let mut outputs = Vec::new();
        let mut num_decode_tokens = 0;
        for (id, is_sampled) in step.sequences {
            if is_sampled {
                let candidates = candidates.next().unwrap_or_default();
                num_decode_tokens += self.advance(id, &candidates, now, &mut outputs);
            }
            self.scheduler.step_returned(id);
        }
        self.throughput.record(step.started, now, step.num_prefill_tokens, num_decode_tokens);
        outputs
    }

    /// Takes the next token of a sequence; returns how many tokens it yields.
    fn advance(
        &mut self,
        id: SequenceId,
        candidates: &Candidates,
        now: Instant,
        outputs: &mut Vec<(SequenceId, SequenceOutput)>,
    ) -> usize {
        let Some(sequence) = self.scheduler.running_mut(id).filter(|sequence| !sequence.is_cancelled) else {
            return 0;
        };
        sequence.is_sampling = false;
        let (num_tokens, finish) = match sequence.sampler.choose(sequence.tokens.len(), candidates) {
            Choice::MoreCandidates => {
                sequence.num_scheduled_tokens -= 1;
                (0, None)
            }
            Choice::Invalid => (0, Some(FinishReason::Error)),
            Choice::Token(token_id, _) if sequence.stop_token_ids.contains(&token_id) => (0, Some(FinishReason::Stop)),
            Choice::Token(token_id, logprobs) => {
                sequence.push(token_id, now);
                let stats = sequence.stats(now);
                let SequenceStats { queue_ms, cached_tokens, .. } = stats;
                let beginning = sequence.has_one_token().then_some(Beginning { queue_ms, cached_tokens });
                outputs.push((id, SequenceOutput::Token { token_id, logprobs, beginning }));
                (1, (sequence.tokens.len() >= sequence.max_tokens).then_some(FinishReason::Length))
            }
        };
        if finish == Some(FinishReason::Error) {
            self.scheduler.distrust(id);
        }
        if let Some(reason) = finish
            && let Some(sequence) = self.scheduler.remove(id)
        {
            outputs.push((id, SequenceOutput::Finished { reason, stats: sequence.stats(now) }));
        }
        num_tokens
    }

    /// Prefixes that new sequences may share: short names of full blocks.
    pub fn prefixes(&self) -> Vec<u64> {
        self.scheduler.blocks().names()
    }

    /// What changed of them since this was last asked.
    pub fn take_prefix_changes(&mut self) -> PrefixChanges {
        self.scheduler.take_prefix_changes()
    }

    /// Whether the result of a step is awaited.
    pub fn has_steps_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Whether no sequence runs or waits and no step is in flight.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.scheduler.num_running() == 0 && self.scheduler.num_waiting() == 0
    }

    /// Numbers for status and metrics.
    pub fn status(&self, now: Instant) -> EngineStatus {
        let (prefill_tokens_per_second, decode_tokens_per_second) = self.throughput.rates(now);
        let prefix = self.scheduler.prefix_counts();
        EngineStatus {
            num_running_sequences: self.scheduler.num_running(),
            num_waiting_sequences: self.scheduler.num_waiting(),
            num_kv_blocks: self.scheduler.blocks().num_blocks(),
            num_free_kv_blocks: self.scheduler.blocks().num_free(),
            prefill_tokens_per_second,
            decode_tokens_per_second,
            num_preemptions: self.scheduler.num_preemptions(),
            prefix_query_tokens: prefix.queries,
            prefix_hit_tokens: prefix.hits,
        }
    }
}

#[cfg(test)]
mod tests;
