//! Which replica serves a request: the one on which it is expected to be done soonest.
//! For: the first placement of a request and every later one. The cost of a replica is what it has outstanding and what
//! it has not computed of the prompt, in tokens; the least cost wins. (NVIDIA Dynamo's router adds blocks to prefill and
//! blocks that decode in this way; SGLang's turns from the best match to the shortest queue when queues differ too much.)
//! Invariant: affinity starves nobody. A match outweighs at most as many outstanding tokens as it spares, so no replica
//! that is chosen has more outstanding than the idlest one and the prompt's match together; and whoever has as many
//! requests as its steps take is chosen only if all have. What else is equal goes in turn.

use std::sync::{Arc, atomic::Ordering};

use lockstep_proto::{
    prefix::{BlockHash, block_hashes},
    v1::{self, RunSequenceRequest},
};

use crate::served::{Replica, ReplicaLoad, ServedModel};

/// What a request means for a replica.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    token_ids: &'a [u32],
    root: BlockHash,
    /// Tokens that it may yet yield.
    num_new_tokens: u64,
}

impl<'a> Work<'a> {
    /// The work that is left of a request.
    pub fn of(request: &'a RunSequenceRequest) -> Self {
        let max_tokens = request.sampling.as_ref().map_or(0, v1::SamplingParams::max_tokens);
        Self {
            token_ids: &request.token_ids,
            root: BlockHash::root(&request.tenant, request.is_isolated),
            num_new_tokens: max_tokens.saturating_sub(request.num_output_tokens).into(),
        }
    }

    /// The blocks in which an engine may find the prompt; the last token is always computed.
    fn blocks(&self, block_size: usize) -> Vec<u64> {
        let findable = self.token_ids.split_last().map_or(self.token_ids, |(_, findable)| findable);
        block_hashes(self.root, findable, block_size).map(BlockHash::short).collect()
    }
}

/// The best of the ready replicas that `accepts` takes, charged with the work.
pub fn choose(model: &ServedModel, work: Work<'_>, accepts: impl Fn(&Replica) -> bool) -> Option<ReplicaLoad> {
    let ready = model.replicas.iter().filter(|replica| replica.is_ready() && accepts(replica));
    let candidates: Vec<&Arc<Replica>> = ready.collect();
    let (block_size, max_num_sequences) =
        model.plan.as_ref().map_or((usize::MAX, usize::MAX), |plan| (plan.block_size, plan.max_num_sequences));
    // A choice of one needs no reason, and its leader reports by itself what it holds.
    let is_open = candidates.len() > 1 && candidates.iter().any(|replica| replica.prefixes.is_known());
    let blocks = if is_open { work.blocks(block_size) } else { Vec::new() };
    let uncached = |replica: &Replica| {
        work.token_ids.len().saturating_sub(replica.prefixes.num_held(&blocks).saturating_mul(block_size)) as u64
    };
    let (replica, num_uncached) =
        candidates.into_iter().map(|replica| (replica, uncached(replica))).min_by_key(|(replica, num_uncached)| {
            let room = max_num_sequences.saturating_mul(replica.plan.stages.len());
            let is_full = replica.num_requests() >= room as u64;
            let cost = replica.outstanding_tokens() + num_uncached;
            (is_full, cost, replica.charged_tokens.load(Ordering::Relaxed))
        })?;
    replica.prefixes.expect(&blocks);
    Some(ReplicaLoad::new(Arc::clone(replica), num_uncached, work.num_new_tokens))
}
