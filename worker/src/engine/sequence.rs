//! One sequence: its tokens, how far they are computed, its blocks and times.
//! For: the scheduler. Invariant: tokens `[0, num_scheduled_tokens)` have been given to the ranks under the present
//! blocks; while the next token is being sampled nothing of the sequence can be scheduled.

use std::{ops::Range, time::Instant};

use lockstep_proto::prefix::BlockHash;

use super::{SequenceId, SequenceRequest, SequenceStats, Tenant, block_manager::BlockManager, sampler::Sampler};

/// A sequence that waits or runs.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) tenant: Tenant,
    /// Prompt and output.
    pub(super) tokens: Vec<u32>,
    pub(super) num_prompt_tokens: usize,
    /// Tokens of the output that another replica yielded.
    num_earlier_tokens: usize,
    /// Tokens given to the ranks, by this sequence or by those that it shares blocks with; back to 0 at preemption.
    pub(super) num_scheduled_tokens: usize,
    /// The most that were ever given to them.
    num_served_tokens: usize,
    /// In order of position.
    pub(super) blocks: Vec<u32>,
    /// What stands before the first block.
    root: BlockHash,
    /// Names of its first blocks, as far as they were needed.
    names: Vec<BlockHash>,
    /// Blocks that others may find, or that it found itself.
    num_published: usize,
    /// Tokens that others had computed.
    num_cached_tokens: usize,
    was_preempted: bool,
    pub(super) num_steps_in_flight: usize,
    /// A step in flight samples its next token.
    pub(super) is_sampling: bool,
    /// Nobody wants its tokens; its blocks go back when no step in flight writes to them.
    pub(super) is_cancelled: bool,
    /// The step that it was last part of; who waited longest goes first.
    pub(super) last_step_id: Option<u64>,
    pub(super) sampler: Sampler,
    pub(super) stop_token_ids: Vec<u32>,
    /// Length at which it ends, prompt included.
    pub(super) max_tokens: usize,
    times: Times,
}

#[derive(Debug)]
struct Times {
    arrived: Instant,
    first_scheduled: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl Sequence {
    /// A sequence that may become `max_sequence_tokens` long.
    pub(super) fn new(id: SequenceId, request: SequenceRequest, max_sequence_tokens: usize, now: Instant) -> Self {
        let SequenceRequest { tenant, token_ids, num_output_tokens, sampling, .. } = request;
        let (prompt, output) = token_ids.split_at(token_ids.len().saturating_sub(num_output_tokens));
        let mut sampler = Sampler::new(&sampling, prompt);
        output.iter().for_each(|&token_id| sampler.observe(token_id));
        Self {
            id,
            root: BlockHash::root(&tenant.name, tenant.is_isolated),
            tenant,
            num_prompt_tokens: prompt.len(),
            num_earlier_tokens: output.len(),
            num_scheduled_tokens: 0,
            num_served_tokens: 0,
            blocks: Vec::new(),
            names: Vec::new(),
            num_published: 0,
            num_cached_tokens: 0,
            was_preempted: false,
            num_steps_in_flight: 0,
            is_sampling: false,
            is_cancelled: false,
            last_step_id: None,
            sampler,
            max_tokens: prompt.len().saturating_add(sampling.max_tokens).min(max_sequence_tokens),
            stop_token_ids: sampling.stop_token_ids,
            tokens: token_ids,
            times: Times { arrived: now, first_scheduled: None, first_token: None, last_token: None },
        }
    }

    /// Tokens that are still to be computed before the next one can be sampled.
    pub(super) fn num_outstanding_tokens(&self) -> usize {
        self.tokens.len() - self.num_scheduled_tokens
    }

    /// Whether one token is all that lacks for the next one.
    pub(super) fn is_decoding(&self) -> bool {
        self.tokens.len() - self.num_scheduled_tokens <= 1
    }

    /// Whether it can be part of the next step, if it gets blocks.
    pub(super) fn is_ready(&self) -> bool {
        !self.is_sampling && !self.is_cancelled && self.num_outstanding_tokens() > 0
    }

    /// How many tokens of `range` are computed for the first time: what a preemption costs is not its tenant's.
    pub(super) fn count_new_tokens(&mut self, range: Range<usize>) -> usize {
        let num_tokens = range.end.saturating_sub(range.start.max(self.num_served_tokens));
        self.num_served_tokens = self.num_served_tokens.max(range.end);
        num_tokens
    }

    /// Notes that it was given work; says whether that is its first.
    pub(super) fn mark_scheduled(&mut self, now: Instant) -> bool {
        self.times.first_scheduled.replace(self.times.first_scheduled.unwrap_or(now)).is_none()
    }

    /// Takes the blocks over that hold its next tokens already; returns how many tokens that spares it. The last token is
    /// left to it: what follows is known only from computing it.
    pub(super) fn share(&mut self, manager: &mut BlockManager) -> usize {
        let before = self.num_scheduled_tokens;
        let block_size = manager.block_size();
        while manager.is_caching()
            && self.num_scheduled_tokens == manager.tokens_in(self.blocks.len())
            && self.num_scheduled_tokens + block_size < self.tokens.len()
        {
            let Some(block) = manager.share(self.name(self.blocks.len(), block_size)) else { break };
            self.blocks.push(block);
            self.num_published = self.blocks.len();
            self.num_scheduled_tokens += block_size;
        }
        let num_spared = self.num_scheduled_tokens - before;
        // Its own blocks, found again after a preemption, are no gain.
        let num_cached = if self.was_preempted { 0 } else { num_spared };
        self.num_cached_tokens += num_cached;
        num_cached
    }

    /// How many of its first blocks are there and referenced: they cost no free block.
    pub(super) fn num_shareable_for_nothing(&mut self, manager: &BlockManager) -> usize {
        if !manager.is_caching() {
            return 0;
        }
        let num_full = self.tokens.len().saturating_sub(1) / manager.block_size();
        let found = (0..num_full).map_while(|index| manager.find(self.name(index, manager.block_size())));
        found.filter(|is_free| !is_free).count()
    }

    /// Lets others find its full blocks. One that ends with the last token is not counted: as long as no token follows,
    /// the last may have to be computed once more.
    pub(super) fn publish(&mut self, manager: &mut BlockManager) {
        let num_final = self.num_scheduled_tokens.min(self.tokens.len().saturating_sub(1));
        let num_full = if manager.is_caching() { num_final / manager.block_size() } else { 0 };
        for index in self.num_published..num_full {
            let name = self.name(index, manager.block_size());
            if let Some(&block) = self.blocks.get(index) {
                manager.publish(block, name);
            }
        }
        self.num_published = self.num_published.max(num_full);
    }

    /// Gives its blocks back, for others to find.
    pub(super) fn release(&mut self, manager: &mut BlockManager) {
        self.publish(manager);
        manager.release(&mut self.blocks);
        self.num_published = 0;
        self.num_scheduled_tokens = 0;
        self.was_preempted = true;
    }

    /// Lets nobody find its blocks: the model made no sense of them.
    pub(super) fn distrust(&mut self, manager: &mut BlockManager) {
        manager.unpublish(&self.blocks);
        self.num_published = usize::MAX;
    }

    fn name(&mut self, index: usize, block_size: usize) -> BlockHash {
        while self.names.len() <= index {
            let parent = self.names.last().copied().unwrap_or(self.root);
            let first = self.names.len() * block_size;
            self.names.push(parent.child(&self.tokens[first..first + block_size]));
        }
        self.names[index]
    }

    /// Takes a sampled token into the output.
    pub(super) fn push(&mut self, token_id: u32, now: Instant) {
        self.times.first_token.get_or_insert(now);
        self.times.last_token = Some(now);
        self.sampler.observe(token_id);
        self.tokens.push(token_id);
    }

    /// Whether it has yielded one token here.
    pub(super) fn has_one_token(&self) -> bool {
        self.tokens.len() == self.num_prompt_tokens + self.num_earlier_tokens + 1
    }

    /// Counts and times up to `now`.
    pub(super) fn stats(&self, now: Instant) -> SequenceStats {
        let times = &self.times;
        let ms = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1000.0;
        SequenceStats {
            prompt_tokens: self.num_prompt_tokens,
            completion_tokens: self.tokens.len() - self.num_prompt_tokens,
            cached_tokens: self.num_cached_tokens.min(self.num_prompt_tokens),
            queue_ms: ms(times.arrived, times.first_scheduled.unwrap_or(now)),
            ttft_ms: ms(times.arrived, times.first_token.unwrap_or(now)),
            decode_ms: match (times.first_token, times.last_token) {
                (Some(first), Some(last)) => ms(first, last),
                _ => 0.0,
            },
        }
    }
}
