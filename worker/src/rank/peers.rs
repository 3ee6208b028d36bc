//! The other ranks that a rank meets inside a step: its tensor-parallel group, the stage before and the stage after.
//! Invariant: `hidden` is the same on every rank of a group, so one rank of the stage before serves each rank of the
//! next: rank `j` of a stage hears from rank `j mod n` of the `n` ranks before it. Where all devices of a group can meet
//! they do, within the step; else the hosts exchange what the devices hold. All ranks of a group decide alike.

use lockstep_executor::{Peers, RankShape};
use lockstep_kernels::{
    Device,
    group::{Collective as DeviceCollective, Sum},
};
use lockstep_sharding::ReplicaPlan;

use super::Traffic;
use crate::{
    WorkerError,
    collective::{Collective, Purpose, RankLinks, TcpCollective},
};

/// Place of the earlier stage's rank in a pair that joins two stages.
const EARLIER: usize = 0;
/// Place of the later stage's rank.
const LATER: usize = 1;

/// A sum, as traces call it.
const ALL_REDUCE: &str = "all_reduce";

/// Ranks that meet, and where.
enum Party<D: Device> {
    Hosts(TcpCollective),
    Devices(D::Communicator),
}

impl<D: Device> Party<D> {
    fn meet(links: &RankLinks, ranks: &[usize], purpose: Purpose, device: &mut D) -> Result<Self, WorkerError> {
        let mut hosts = links.collective(ranks, purpose)?;
        let group = links.device_group(&hosts);
        let communicator = device.join::<WorkerError>(&group, &mut |bytes| hosts.all_gather(bytes))?;
        let place = if communicator.is_some() { "their devices" } else { "their hosts" };
        tracing::info!(?ranks, ?purpose, "ranks meet through {place}");
        Ok(match communicator {
            Some(communicator) => Self::Devices(communicator),
            None => Self::Hosts(hosts),
        })
    }
}

/// The parties of one rank.
pub struct RankPeers<D: Device> {
    group: Option<Party<D>>,
    previous: Option<Party<D>>,
    next: Vec<Party<D>>,
    hidden_size: usize,
    traffic: Traffic,
    /// Hosts exchange nothing: the rank prepares alone.
    are_silent: bool,
}

impl<D: Device> RankPeers<D> {
    /// Connects a rank with everybody whom it meets.
    ///
    /// # Errors
    /// [`WorkerError::Link`] naming the rank that did not appear, [`WorkerError::Kernel`] if devices fail to meet.
    pub fn connect(
        links: &RankLinks,
        plan: &ReplicaPlan,
        shape: &RankShape,
        device: &mut D,
    ) -> Result<Self, WorkerError> {
        let ranks_of = |stage: usize| -> Vec<usize> {
            plan.stages.get(stage).map(|stage| stage.ranks.iter().map(|rank| rank.rank).collect()).unwrap_or_default()
        };
        let own = ranks_of(shape.pipeline_stage);
        let mut meet = |ranks: &[usize], purpose| Party::meet(links, ranks, purpose, device);
        let group = (own.len() > 1).then(|| meet(&own, Purpose::TensorParallel)).transpose()?;
        let before = shape.pipeline_stage.checked_sub(1).map(ranks_of).unwrap_or_default();
        let previous = before
            .get(shape.tensor_parallel_rank % before.len().max(1))
            .map(|earlier| meet(&[*earlier, shape.rank], Purpose::Pipeline))
            .transpose()?;
        // Stages meet from the first to the last: nobody waits for a rank that waits for it.
        let next = ranks_of(shape.pipeline_stage + 1)
            .into_iter()
            .enumerate()
            .filter(|(position, _)| position % own.len() == shape.tensor_parallel_rank)
            .map(|(_, later)| meet(&[shape.rank, later], Purpose::Pipeline))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            group,
            previous,
            next,
            hidden_size: shape.hidden_size,
            traffic: Traffic::default(),
            are_silent: false,
        })
    }

    /// Keeps every exchange between hosts until [`Self::take_traffic`].
    pub fn keep_calls(&mut self) {
        self.traffic.calls = Some(Vec::new());
    }

    /// What was exchanged since this was last asked.
    pub fn take_traffic(&mut self) -> Traffic {
        std::mem::take(&mut self.traffic)
    }
}

impl<D: Device> Peers<D> for RankPeers<D> {
    type Error = WorkerError;

    fn silence(&mut self, are_silent: bool) {
        self.are_silent = are_silent;
    }

    fn with_sum<T>(
        &mut self,
        num_tokens: usize,
        body: impl FnOnce(Sum<'_, D::Communicator, WorkerError>) -> Result<T, WorkerError>,
    ) -> Result<T, WorkerError> {
        let traffic = &mut self.traffic;
        match &mut self.group {
            None => body(Sum::Own),
            Some(Party::Hosts(_)) if self.are_silent => body(Sum::Hosts(&mut |_| Ok(()))),
            Some(Party::Hosts(hosts)) => body(Sum::Hosts(&mut |shares| {
                traffic.over_hosts(ALL_REDUCE, shares, |shares| hosts.all_reduce_sum(shares))
            })),
            Some(Party::Devices(communicator)) => {
                traffic.over_devices(num_tokens, self.hidden_size);
                body(Sum::Devices(communicator))
            }
        }
    }

    fn all_reduce(&mut self, device: &mut D, num_tokens: usize, tensor: &mut D::Tensor) -> Result<(), WorkerError> {
        let traffic = &mut self.traffic;
        match &mut self.group {
            None => Ok(()),
            Some(Party::Hosts(_)) if self.are_silent => Ok(()),
            Some(Party::Hosts(hosts)) => device.with_host(num_tokens, tensor, |values| {
                traffic.over_hosts(ALL_REDUCE, values, |values| hosts.all_reduce_sum(values))
            }),
            Some(Party::Devices(communicator)) => {
                traffic.over_devices(num_tokens, self.hidden_size);
                Ok(device.collective(num_tokens, tensor, DeviceCollective::AllReduce, communicator)?)
            }
        }
    }

    fn receive_on_host(
        &mut self,
        device: &mut D,
        num_tokens: usize,
        hidden: &mut D::Tensor,
    ) -> Result<(), WorkerError> {
        let traffic = &mut self.traffic;
        match &mut self.previous {
            Some(Party::Hosts(hosts)) if !self.are_silent => device.with_host(num_tokens, hidden, |hidden| {
                traffic.over_hosts("receive", hidden, |hidden| hosts.receive(EARLIER, hidden))
            }),
            _ => Ok(()),
        }
    }

    fn receive_on_device(
        &mut self,
        device: &mut D,
        num_tokens: usize,
        hidden: &mut D::Tensor,
    ) -> Result<(), WorkerError> {
        match &self.previous {
            Some(Party::Devices(communicator)) => {
                self.traffic.over_devices(num_tokens, self.hidden_size);
                Ok(device.collective(num_tokens, hidden, DeviceCollective::Receive { peer: EARLIER }, communicator)?)
            }
            _ => Ok(()),
        }
    }

    fn send_on_device(&mut self, device: &mut D, num_tokens: usize, hidden: &mut D::Tensor) -> Result<(), WorkerError> {
        for next in &self.next {
            if let Party::Devices(communicator) = next {
                self.traffic.over_devices(num_tokens, self.hidden_size);
                device.collective(num_tokens, hidden, DeviceCollective::Send { peer: LATER }, communicator)?;
            }
        }
        Ok(())
    }

    fn send_on_host(&mut self, device: &mut D, num_tokens: usize, hidden: &mut D::Tensor) -> Result<(), WorkerError> {
        let hosts = self.next.iter_mut().filter_map(|next| match next {
            Party::Hosts(hosts) => Some(hosts),
            Party::Devices(_) => None,
        });
        let mut hosts = hosts.peekable();
        if hosts.peek().is_none() || self.are_silent {
            return Ok(());
        }
        let traffic = &mut self.traffic;
        device.with_host(num_tokens, hidden, |hidden| {
            hosts.try_for_each(|hosts| traffic.over_hosts("send", hidden, |hidden| hosts.send(LATER, hidden)))
        })
    }
}
