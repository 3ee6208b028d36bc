//! Who gets blocks when there are too few of them, and who gives.
//! For: the scheduler. Invariant: the sequence that arrived first of all that run gives to nobody and takes from all.
//! Not here: free blocks and their contents (the block manager).

use std::collections::{BTreeMap, BTreeSet};

use super::{Room, Scheduler};
use crate::engine::{SequenceId, Tenant, block_manager::BlockManager, sequence::Sequence};

/// Who asks for blocks that others hold.
pub(super) struct Claim {
    tenant: Tenant,
    /// The sequence, if it runs.
    id: Option<SequenceId>,
    pub(super) num_blocks: usize,
}

impl Scheduler {
    /// The free blocks that the tenant's first waiting sequence would take for its tokens.
    pub(super) fn claim_of_first(&mut self, tenant: &str) -> Option<Claim> {
        let first = self.waiting.first_mut(tenant)?;
        let num_blocks = missing_blocks(&self.blocks, first) - first.num_shareable_for_nothing(&self.blocks);
        Some(Claim { tenant: first.tenant.clone(), id: None, num_blocks })
    }

    /// What the running sequences still need for their tokens, with a reserve of one block for each of them to grow into:
    /// a sequence that is admitted too early is soon preempted.
    pub(super) fn promised_blocks(&self) -> usize {
        let live = self.running.values().filter(|sequence| !sequence.is_cancelled);
        live.map(|sequence| missing_blocks(&self.blocks, sequence)).sum::<usize>() + self.running.len()
    }

    /// Frees blocks for the first prompts of tenants that hold less than others do.
    pub(super) fn reclaim(&mut self) {
        let mut claimed = 0;
        for tenant in self.waiting.in_turn(&BTreeSet::new()) {
            if !self.may_start(&tenant) {
                continue;
            }
            while let Some(claim) = self.claim_of_first(&tenant) {
                if self.promised_blocks() + claimed + claim.num_blocks <= self.blocks.num_free() {
                    claimed += claim.num_blocks;
                    break;
                }
                if !self.preempt_for(&claim) {
                    if self.has_less_than_its_share(&tenant) {
                        return;
                    }
                    break;
                }
            }
        }
    }

    /// Finds blocks for up to `wanted` more tokens of a running sequence, at least for one.
    pub(super) fn make_room(&mut self, id: SequenceId, wanted: usize) -> Room {
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
            let claim = Claim { tenant: sequence.tenant.clone(), id: Some(id), num_blocks: 1 };
            if !self.preempt_for(&claim) {
                return Room::Wait;
            }
        }
    }

    /// Sends a running sequence back to the queue for the sake of a claim; its tokens so far are computed again later. The
    /// answer is no if there is none to send, or if a step in flight uses its blocks.
    fn preempt_for(&mut self, claim: &Claim) -> bool {
        let victim = self.victim(claim).filter(|victim| victim.num_steps_in_flight == 0).map(|victim| victim.id);
        let Some(sequence) = victim.and_then(|id| self.remove(id)) else {
            return false;
        };
        let num_tokens = sequence.tokens.len();
        tracing::debug!(sequence_id = sequence.id, tenant = &*sequence.tenant.name, num_tokens, "preempted");
        self.waiting.push(sequence);
        self.num_preemptions += 1;
        true
    }

    /// Whose blocks a claim may take: the last arrival of the tenant that holds the most blocks for its weight, if that
    /// is more than the claimant's tenant would hold, but not a tenant's first sequence; of the claimant's own tenant a
    /// later arrival. To the first of all that run everybody gives.
    fn victim(&self, claim: &Claim) -> Option<&Sequence> {
        let mut held: BTreeMap<&str, (usize, SequenceId)> = BTreeMap::new();
        for sequence in self.running.values() {
            held.entry(&sequence.tenant.name).or_insert((0, sequence.id)).0 += sequence.blocks.len();
        }
        let level = |tenant: &Tenant, more: usize| {
            let num_blocks = held.get(&*tenant.name).map_or(0, |(num_blocks, _)| *num_blocks);
            (num_blocks + more) as f64 / f64::from(tenant.weight)
        };
        let is_first_of_all = claim.id.is_some() && claim.id == self.running.keys().next().copied();
        let own = level(&claim.tenant, claim.num_blocks);
        let gives = |sequence: &&Sequence| {
            if is_first_of_all || sequence.tenant.name == claim.tenant.name {
                return claim.id.is_some_and(|id| id < sequence.id);
            }
            let is_first = held.get(&*sequence.tenant.name).is_some_and(|(_, first)| *first == sequence.id);
            !is_first && level(&sequence.tenant, 0) > own
        };
        let order = |sequence: &&Sequence| (level(&sequence.tenant, 0), sequence.id);
        self.running.values().filter(gives).max_by(|left, right| {
            let ((left, left_id), (right, right_id)) = (order(left), order(right));
            left.total_cmp(&right).then(left_id.cmp(&right_id))
        })
    }
}

/// Blocks that a sequence lacks for its tokens.
fn missing_blocks(blocks: &BlockManager, sequence: &Sequence) -> usize {
    blocks.blocks_for(sequence.tokens.len()).saturating_sub(sequence.blocks.len())
}
