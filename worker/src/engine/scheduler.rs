//! Which sequences are part of the next step, with how many tokens and which blocks.
//! For: the engine. Invariants: sequences are admitted in the order of their arrival, so every running one arrived
//! before every waiting one; blocks are taken only from later arrivals, so the oldest sequence always goes on; a block is
//! shared only if an earlier step computes all of it.
//! Not here: sampling and outputs (the engine), block ids (the block manager).
//!
//! A step takes decodes first, those that waited longest before the others, then prompt chunks of running sequences,
//! then of waiting ones. With several steps in flight a step takes its share of the decodes and of the prompt tokens
//! only, so that the next steps have work as well and every pipeline stage stays busy.

use std::{collections::BTreeMap, time::Instant};

use super::{
    EngineConfig, SequenceId,
    block_manager::{BlockManager, PrefixChanges},
    sequence::Sequence,
};
use crate::step::StepSequence;

/// Smallest share of prompt tokens that a step of a pipeline is cut to.
const SMALLEST_PIPELINE_CHUNK: usize = 64;

/// The sequences and blocks of a replica.
#[derive(Debug)]
pub(super) struct Scheduler {
    config: EngineConfig,
    blocks: BlockManager,
    running: BTreeMap<SequenceId, Sequence>,
    waiting: BTreeMap<SequenceId, Sequence>,
    num_preemptions: u64,
    prefix: PrefixCounts,
}

/// What the cache of prefixes was worth, in tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PrefixCounts {
    /// Of sequences that began to run.
    pub(super) queries: u64,
    /// Of these, those that were computed already.
    pub(super) hits: u64,
}

/// Whether a sequence found room for its next tokens.
enum Room {
    Tokens(usize),
    /// None now: blocks come back when a step in flight returns, or when others end.
    Wait,
}

/// The step being formed.
struct Forming {
    step_id: u64,
    now: Instant,
    sequences: Vec<StepSequence>,
    free_tokens: usize,
    free_sequences: usize,
}

impl Scheduler {
    /// No sequences, all blocks free.
    pub(super) fn new(config: EngineConfig) -> Self {
        Self {
            blocks: BlockManager::new(config.num_kv_blocks, config.block_size, config.is_prefix_caching),
            config,
            running: BTreeMap::new(),
            waiting: BTreeMap::new(),
            num_preemptions: 0,
            prefix: PrefixCounts::default(),
        }
    }

    /// Longest sequence that can run here alone, in tokens.
    pub(super) fn max_sequence_tokens(&self) -> usize {
        self.config.max_sequence_tokens.min(self.blocks.capacity_tokens())
    }

    /// Sequences that were admitted, cancelled ones with a step in flight included.
    pub(super) fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that were not admitted yet, or preempted.
    pub(super) fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// How often a sequence lost its blocks to an older one.
    pub(super) fn num_preemptions(&self) -> u64 {
        self.num_preemptions
    }

    /// Tokens that were looked for in the cache, and those that were found.
    pub(super) fn prefix_counts(&self) -> PrefixCounts {
        self.prefix
    }

    /// The block manager, for its numbers.
    pub(super) fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    /// Names that blocks were given or lost since this was last asked.
    pub(super) fn take_prefix_changes(&mut self) -> PrefixChanges {
        self.blocks.take_changes()
    }

    /// A running sequence.
    pub(super) fn running_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.running.get_mut(&id)
    }

    /// Puts a new sequence behind all others.
    pub(super) fn enqueue(&mut self, sequence: Sequence) {
        self.waiting.insert(sequence.id, sequence);
    }

    /// Forgets a sequence; one with a step in flight keeps its blocks until [`Self::step_returned`].
    pub(super) fn cancel(&mut self, id: SequenceId) {
        self.waiting.remove(&id);
        let Some(sequence) = self.running.get_mut(&id) else {
            return;
        };
        sequence.is_cancelled = true;
        if sequence.num_steps_in_flight == 0 {
            self.remove(id);
        }
    }

    /// Notes that a step returned which `id` was part of.
    pub(super) fn step_returned(&mut self, id: SequenceId) {
        let Some(sequence) = self.running.get_mut(&id) else {
            return;
        };
        sequence.num_steps_in_flight -= 1;
        if sequence.is_cancelled && sequence.num_steps_in_flight == 0 {
            self.remove(id);
        }
    }

    /// Ends a running sequence and frees its blocks.
    pub(super) fn remove(&mut self, id: SequenceId) -> Option<Sequence> {
        let mut sequence = self.running.remove(&id)?;
        sequence.release(&mut self.blocks);
        Some(sequence)
    }

    /// Lets no other sequence share what this one computed.
    pub(super) fn distrust(&mut self, id: SequenceId) {
        if let Some(sequence) = self.running.get_mut(&id) {
            sequence.distrust(&mut self.blocks);
        }
    }

    /// The parts of the next step; empty if nothing can run now.
    pub(super) fn form_step(&mut self, step_id: u64, now: Instant) -> Vec<StepSequence> {
        let mut forming = Forming {
            step_id,
            now,
            sequences: Vec::new(),
            free_tokens: self.config.max_step_tokens.max(1),
            free_sequences: self.max_step_sequences(),
        };
        self.take_decodes(&mut forming);
        forming.free_tokens = forming.free_tokens.min(self.prefill_share());
        self.take_running_prefills(&mut forming);
        self.admit(&mut forming);
        // From the next step on others may read what this one writes.
        for part in &forming.sequences {
            if let Some(sequence) = self.running.get_mut(&part.sequence_id) {
                sequence.publish(&mut self.blocks);
            }
        }
        forming.sequences
    }

    fn max_step_sequences(&self) -> usize {
        self.config.max_num_sequences.min(self.config.max_step_tokens).max(1)
    }

    fn take_decodes(&mut self, forming: &mut Forming) {
        let decoding = || self.running.values().filter(|sequence| sequence.is_decoding() && !sequence.is_cancelled);
        let share = decoding().count().div_ceil(self.config.max_steps_in_flight.max(1));
        let mut ready: Vec<_> = decoding()
            .filter(|sequence| sequence.is_ready())
            .map(|sequence| (sequence.last_step_id, sequence.id))
            .collect();
        ready.sort_unstable();
        for (_, id) in ready {
            if forming.sequences.len() == share {
                break;
            }
            self.take(id, forming);
        }
    }

    fn take_running_prefills(&mut self, forming: &mut Forming) {
        let is_prefilling = |sequence: &&Sequence| sequence.is_ready() && !sequence.is_decoding();
        let ready: Vec<_> = self.running.values().filter(is_prefilling).map(|sequence| sequence.id).collect();
        for id in ready {
            self.take(id, forming);
        }
    }

    /// Admits waiting sequences in order while the step and the blocks have room for them.
    fn admit(&mut self, forming: &mut Forming) {
        let max_running = self.max_step_sequences().saturating_mul(self.config.max_steps_in_flight.max(1));
        while forming.has_room() && self.running.len() < max_running {
            let Some(mut next) = self.waiting.first_entry() else {
                return;
            };
            if !self.running.is_empty() && !admissible(&self.blocks, &self.running, next.get_mut()) {
                return;
            }
            let (id, sequence) = next.remove_entry();
            self.running.insert(id, sequence);
            self.take(id, forming);
        }
    }

    /// Prompt tokens that one step takes: all that fit, or with a pipeline so many that the other stages get some too.
    fn prefill_share(&self) -> usize {
        let steps = self.config.max_steps_in_flight;
        if steps <= 1 {
            return usize::MAX;
        }
        let outstanding: usize =
            self.running.values().chain(self.waiting.values()).map(Sequence::num_outstanding_tokens).sum();
        outstanding.div_ceil(2 * steps).max(SMALLEST_PIPELINE_CHUNK)
    }

    /// Adds the next tokens of a running sequence to the step, if it is (still) ready and finds room.
    fn take(&mut self, id: SequenceId, forming: &mut Forming) {
        if !forming.has_room() {
            return;
        }
        // An earlier part of this step may have preempted it.
        let Some(sequence) = self.running.get_mut(&id) else {
            return;
        };
        self.prefix.hits += sequence.share(&mut self.blocks) as u64;
        let wanted = sequence.num_outstanding_tokens().min(forming.free_tokens);
        let Room::Tokens(num_tokens) = self.make_room(id, wanted) else {
            return;
        };
        if let Some(sequence) = self.running.get_mut(&id) {
            let is_first = forming.push(sequence, num_tokens);
            if is_first && self.blocks.is_caching() {
                self.prefix.queries += sequence.tokens.len() as u64;
            }
        }
    }

    /// Finds blocks for up to `wanted` more tokens of a running sequence, at least for one.
    fn make_room(&mut self, id: SequenceId, wanted: usize) -> Room {
        loop {
            let Some(sequence) = self.running.get_mut(&id) else {
                return Room::Wait;
            };
            let first = sequence.num_scheduled_tokens;
            let within_reach = self.blocks.tokens_in(sequence.blocks.len() + self.blocks.num_free());
            let num_tokens = wanted.min(within_reach.saturating_sub(first));
            if num_tokens > 0 && self.blocks.grow(&mut sequence.blocks, first + num_tokens) {
                return Room::Tokens(num_tokens);
            }
            if !self.preempt_one_younger_than(id) {
                return Room::Wait;
            }
        }
    }

    /// Sends the most recently arrived running sequence back to the queue, if it arrived after `id` and no step in
    /// flight uses its blocks; its tokens so far are computed again later.
    fn preempt_one_younger_than(&mut self, id: SequenceId) -> bool {
        let Some(last) = self.running.last_entry() else {
            return false;
        };
        if *last.key() <= id || last.get().num_steps_in_flight > 0 {
            return false;
        }
        let (victim, mut sequence) = last.remove_entry();
        tracing::debug!(
            sequence_id = victim,
            tenant = &*sequence.tenant.name,
            num_tokens = sequence.tokens.len(),
            "preempted"
        );
        sequence.release(&mut self.blocks);
        self.waiting.insert(victim, sequence);
        self.num_preemptions += 1;
        true
    }
}

/// Whether all tokens of `candidate` find blocks beside what the running sequences still need for theirs, with a
/// reserve of one block for each of these to grow into: a sequence that is admitted too early is soon preempted.
fn admissible(blocks: &BlockManager, running: &BTreeMap<SequenceId, Sequence>, candidate: &mut Sequence) -> bool {
    let missing = |sequence: &Sequence| blocks.blocks_for(sequence.tokens.len()).saturating_sub(sequence.blocks.len());
    let promised: usize = running.values().filter(|sequence| !sequence.is_cancelled).map(missing).sum();
    let wanted = promised + running.len() + missing(candidate);
    wanted <= blocks.num_free() || wanted - candidate.num_shareable_for_nothing(blocks) <= blocks.num_free()
}

impl Forming {
    fn has_room(&self) -> bool {
        self.free_tokens > 0 && self.free_sequences > 0
    }

    /// Says whether this is the first work of the sequence.
    fn push(&mut self, sequence: &mut Sequence, num_tokens: usize) -> bool {
        let first = sequence.num_scheduled_tokens;
        let end = first + num_tokens;
        let is_last = end == sequence.tokens.len();
        self.sequences.push(StepSequence {
            sequence_id: sequence.id,
            first_position: first as u32,
            token_ids: sequence.tokens[first..end].to_vec(),
            block_table: sequence.blocks.clone(),
            sample: is_last.then(|| sequence.sampler.row(sequence.tokens.len())),
        });
        sequence.num_scheduled_tokens = end;
        sequence.num_steps_in_flight += 1;
        sequence.is_sampling = is_last;
        sequence.last_step_id = Some(self.step_id);
        self.free_tokens -= num_tokens;
        self.free_sequences -= 1;
        sequence.mark_scheduled(self.now)
    }
}
