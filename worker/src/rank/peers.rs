//! The other ranks that a rank meets inside a step: its tensor-parallel group, the stage before and the stage after.
//! Invariant: `hidden` is the same on every rank of a group, so one rank of the stage before serves each rank of the
//! next: rank `j` of a stage hears from rank `j mod n` of the `n` ranks before it.

use lockstep_sharding::ReplicaPlan;

use super::RankShape;
use crate::{
    WorkerError,
    collective::{Collective, Element, Purpose, RankLinks, TcpCollective},
};

/// Place of the earlier stage's rank in a pair that joins two stages.
const EARLIER: usize = 0;
/// Place of the later stage's rank.
const LATER: usize = 1;

/// Links of one rank.
pub struct RankPeers {
    group: TcpCollective,
    previous: Option<TcpCollective>,
    next: Vec<TcpCollective>,
}

impl RankPeers {
    /// Connects a rank with everybody whom it meets.
    ///
    /// # Errors
    /// [`WorkerError::Link`] naming the rank that did not appear.
    pub fn connect(links: &RankLinks, plan: &ReplicaPlan, shape: &RankShape) -> Result<Self, WorkerError> {
        let ranks_of = |stage: usize| -> Vec<usize> {
            plan.stages.get(stage).map(|stage| stage.ranks.iter().map(|rank| rank.rank).collect()).unwrap_or_default()
        };
        let own = ranks_of(shape.pipeline_stage);
        let group =
            if own.len() > 1 { links.collective(&own, Purpose::TensorParallel)? } else { TcpCollective::solo() };
        let before = shape.pipeline_stage.checked_sub(1).map(ranks_of).unwrap_or_default();
        let previous = before
            .get(shape.tensor_parallel_rank % before.len().max(1))
            .map(|earlier| links.collective(&[*earlier, shape.rank], Purpose::Pipeline))
            .transpose()?;
        let next = ranks_of(shape.pipeline_stage + 1)
            .into_iter()
            .enumerate()
            .filter(|(position, _)| position % own.len() == shape.tensor_parallel_rank)
            .map(|(_, later)| links.collective(&[shape.rank, later], Purpose::Pipeline))
            .collect::<Result<_, _>>()?;
        Ok(Self { group, previous, next })
    }

    /// Sums `values` over the tensor-parallel group: the same bits on every rank.
    ///
    /// # Errors
    /// [`WorkerError::Link`] naming the rank that did not come in time.
    pub fn all_reduce_sum<T: Element>(&mut self, values: &mut [T]) -> Result<(), WorkerError> {
        self.group.all_reduce_sum(values)
    }

    /// Takes the hidden rows of the stage before.
    ///
    /// # Errors
    /// [`WorkerError::Link`].
    pub fn receive(&mut self, values: &mut [f32]) -> Result<(), WorkerError> {
        match &mut self.previous {
            Some(previous) => previous.receive(EARLIER, values),
            None => Err(WorkerError::Mismatch("the first stage has no stage before it".to_owned())),
        }
    }

    /// Hands the hidden rows to the stage after.
    ///
    /// # Errors
    /// [`WorkerError::Link`].
    pub fn send(&mut self, values: &[f32]) -> Result<(), WorkerError> {
        self.next.iter_mut().try_for_each(|next| next.send(LATER, values))
    }
}
