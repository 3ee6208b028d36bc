//! Which sequences are part of the next step, with how many tokens and which blocks.
//! For: the engine. Invariants: a tenant's sequences are admitted in the order of their arrival; the sequence that arrived
//! first of all that run takes blocks from any other and loses none, so it always goes on; a block is shared only if an
//! earlier step computes all of it.
//! Not here: sampling and outputs (the engine), block ids (the block manager), who was served how much (the fair queue),
//! who gives blocks to whom (`preemption`).
//!
//! A step takes decodes first, then prompt chunks of running sequences and of waiting ones, each tenant when it is its
//! turn, within a tenant who waited longest. With several steps in flight a step takes its share of the decodes and of the
//! prompt tokens only, so that the next steps have work as well and every pipeline stage stays busy.
//!
//! A tenant that comes while others fill the step does not wait for an end. Sequences are not bound to a place in the
//! step: as long as there are blocks it is admitted beyond the usual number, and decodes of those with more than their
//! share skip a step, which costs nothing; places held free for it would be lost whenever it is away. If blocks lack, the
//! tenant with the most of them loses those of its last sequence, whose tokens are computed again: the price is paid once
//! for each arrival, and never with a tenant's first sequence, so that nobody is thrown out by turns.

mod preemption;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};

use lockstep_executor::step::StepSequence;

use super::{
    EngineConfig, SequenceId, Tenant,
    block_manager::{BlockManager, PrefixChanges},
    fair_queue::FairQueue,
    sequence::Sequence,
};

/// Smallest share of prompt tokens that a step of a pipeline is cut to.
const SMALLEST_PIPELINE_CHUNK: usize = 64;

/// The sequences and blocks of a replica.
#[derive(Debug)]
pub(super) struct Scheduler {
    config: EngineConfig,
    blocks: BlockManager,
    running: BTreeMap<SequenceId, Sequence>,
    waiting: FairQueue,
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
            waiting: FairQueue::default(),
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

    /// Whether one more sequence of a tenant may wait: as long as not too many do, or it has less than its share of these.
    pub(super) fn may_wait(&self, tenant: &Tenant) -> bool {
        let limit = self.config.max_waiting_sequences;
        self.waiting.len() < limit
            || self.waiting.num_waiting_of(&tenant.name) < self.waiting.share(&tenant.name, limit)
    }

    /// How often a sequence lost its blocks to another.
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

    /// A free block, which loses its contents.
    pub(super) fn scratch_block(&mut self) -> Option<u32> {
        let mut blocks = Vec::new();
        self.blocks.grow(&mut blocks, 1);
        let block = blocks.first().copied();
        self.blocks.release(&mut blocks);
        block
    }

    /// Names that blocks were given or lost since this was last asked.
    pub(super) fn take_prefix_changes(&mut self) -> PrefixChanges {
        self.blocks.take_changes()
    }

    /// A running sequence.
    pub(super) fn running_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.running.get_mut(&id)
    }

    /// Puts a new sequence behind all others of its tenant.
    pub(super) fn enqueue(&mut self, sequence: Sequence) {
        self.waiting.push(sequence);
    }

    /// Forgets a sequence; one with a step in flight keeps its blocks until [`Self::step_returned`].
    pub(super) fn cancel(&mut self, id: SequenceId) {
        self.waiting.remove(id);
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
        self.waiting.note_end(&sequence.tenant.name);
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
        self.reclaim();
        let mut forming = Forming {
            step_id,
            now,
            sequences: Vec::new(),
            free_tokens: self.config.max_step_tokens.max(1),
            free_sequences: self.max_step_sequences(),
        };
        let num_decodes = self.num_decodes();
        let num_places = forming.free_sequences - self.num_reserved_for_prompts();
        self.take_decodes(&mut forming, num_decodes.min(num_places));
        forming.free_tokens = forming.free_tokens.min(self.prefill_share());
        self.take_prompts(&mut forming);
        // Places that no prompt could take.
        let num_missing = num_decodes.saturating_sub(forming.sequences.len());
        self.take_decodes(&mut forming, num_missing);
        self.waiting.settle(&self.tenants_of(|sequence| sequence.is_ready()));
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

    /// Sequences that may run as long as nobody has more than its share.
    fn max_running(&self) -> usize {
        self.max_step_sequences().saturating_mul(self.config.max_steps_in_flight.max(1))
    }

    fn tenants_of(&self, accepts: impl Fn(&&Sequence) -> bool) -> BTreeSet<Arc<str>> {
        self.running.values().filter(accepts).map(|sequence| Arc::clone(&sequence.tenant.name)).collect()
    }

    /// Decodes that a step takes: all, or with a pipeline so many that the other stages get some too.
    fn num_decodes(&self) -> usize {
        let decoding = self.running.values().filter(|sequence| sequence.is_decoding() && !sequence.is_cancelled);
        decoding.count().div_ceil(self.config.max_steps_in_flight.max(1))
    }

    /// Takes up to `limit` decodes, as if one after the other of the tenant that was served least: only when they are too
    /// many does the order matter.
    fn take_decodes(&mut self, forming: &mut Forming, limit: usize) {
        let limit = forming.sequences.len() + limit;
        let decodes = self.running.values().filter(|sequence| sequence.is_decoding() && sequence.is_ready());
        let mut ready: Vec<_> = decodes.collect();
        ready.sort_unstable_by_key(|sequence| (sequence.last_step_id, sequence.id));
        let mut num_earlier = BTreeMap::new();
        let mut in_turn: Vec<_> = ready
            .into_iter()
            .map(|sequence| {
                let tenant = &*sequence.tenant.name;
                let num_earlier = num_earlier.entry(tenant).or_insert(0);
                let served = self.waiting.served_after(tenant, *num_earlier);
                *num_earlier += 1;
                (served, sequence.id)
            })
            .collect();
        // Stable: among equals who waited longest stays first.
        in_turn.sort_by(|(left, _), (right, _)| left.total_cmp(right));
        for (_, id) in in_turn {
            if forming.sequences.len() == limit {
                break;
            }
            self.take(id, forming);
        }
    }

    /// Places in the step that decodes leave to prompts: one for each tenant with a prompt and less than its share of
    /// decodes, up to half of all.
    fn num_reserved_for_prompts(&self) -> usize {
        let has_less = |tenant: &Arc<str>| {
            let is_decode = |sequence: &&Sequence| sequence.tenant.name == *tenant && sequence.is_decoding();
            self.running.values().filter(is_decode).count() < self.share_of_running(tenant)
        };
        let with_prompts = self.waiting.in_turn(&self.tenants_of(is_prompt));
        with_prompts.iter().filter(|tenant| has_less(tenant)).count().min(self.max_step_sequences().div_ceil(2))
    }

    fn share_of_running(&self, tenant: &str) -> usize {
        self.waiting.share(tenant, self.max_running())
    }

    fn has_less_than_its_share(&self, tenant: &str) -> bool {
        self.waiting.num_running_of(tenant) < self.share_of_running(tenant)
    }

    /// Whether the number of sequences lets one more of the tenant run.
    fn may_start(&self, tenant: &str) -> bool {
        self.running.len() < self.max_running() || self.has_less_than_its_share(tenant)
    }

    /// Takes prompt chunks while the step has room, always of the tenant that was served least.
    fn take_prompts(&mut self, forming: &mut Forming) {
        let mut running: Vec<_> = self.running.values().filter(is_prompt).map(|sequence| sequence.id).collect();
        let mut is_admitting = true;
        // Tenants that hold their share of the blocks and find no more.
        let mut passed = BTreeSet::new();
        while forming.has_room() {
            let tenant_of = |id: &SequenceId| self.running.get(id).map(|sequence| Arc::clone(&sequence.tenant.name));
            let with_running: BTreeSet<_> = running.iter().filter_map(tenant_of).collect();
            let is_able = |tenant: &Arc<str>| with_running.contains(tenant) || is_admitting && !passed.contains(tenant);
            let Some(tenant) = self.waiting.in_turn(&with_running).into_iter().find(is_able) else {
                return;
            };
            if let Some(index) = running.iter().position(|id| tenant_of(id).as_ref() == Some(&tenant)) {
                self.take(running.remove(index), forming);
            } else if !self.may_start(&tenant) {
                // Nobody overtakes by number: who is served least comes next.
                is_admitting = false;
            } else if let Some(id) = self.admit_first(&tenant) {
                self.take(id, forming);
            } else {
                // Small prompts of others must not keep a large one out for ever.
                is_admitting = !self.has_less_than_its_share(&tenant);
                passed.insert(tenant);
            }
        }
    }

    /// Admits the tenant's first waiting sequence if there are blocks for its tokens.
    fn admit_first(&mut self, tenant: &str) -> Option<SequenceId> {
        let num_blocks = self.claim_of_first(tenant)?.num_blocks;
        if !self.running.is_empty() && self.promised_blocks() + num_blocks > self.blocks.num_free() {
            return None;
        }
        let sequence = self.waiting.start_first(tenant)?;
        let id = sequence.id;
        self.running.insert(id, sequence);
        Some(id)
    }

    /// Prompt tokens that one step takes: all that fit, or with a pipeline so many that the other stages get some too.
    fn prefill_share(&self) -> usize {
        let steps = self.config.max_steps_in_flight;
        if steps <= 1 {
            return usize::MAX;
        }
        let outstanding: usize =
            self.running.values().chain(self.waiting.iter()).map(Sequence::num_outstanding_tokens).sum();
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
            let first = sequence.num_scheduled_tokens;
            let is_first = forming.push(sequence, num_tokens);
            if is_first && self.blocks.is_caching() {
                self.prefix.queries += sequence.tokens.len() as u64;
            }
            let num_new_tokens = sequence.count_new_tokens(first..first + num_tokens);
            self.waiting.charge(&sequence.tenant.name, num_new_tokens);
        }
    }
}

fn is_prompt(sequence: &&Sequence) -> bool {
    sequence.is_ready() && !sequence.is_decoding()
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
