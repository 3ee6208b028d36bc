//! GPUs of several ranks, which sum and hand over rows among themselves: recorded and replayed with the step, without a
//! way through the hosts. NCCL moves the bytes, within a process, a host or a network; but short sums between GPUs that can
//! write to each other's memory go through [`OneShot`], in a third of the time.
//! For: [`CudaDevice`](super::CudaDevice).
//! Invariant: no wait outlasts the group: [`Gpu::drain`] and [`CudaCommunicator::launch`] look whether it has ended, or
//! took longer than its time-out, and a thread of the communicator does while the driver blocks the rank's. Then the
//! communicator is aborted, which frees the GPU from waiting, and every later use is an error that says why.
//!
//! - [`membership`]: whether the group is open, and who looks after it.
//! - [`nccl`]: NCCL's calls. [`offer`]: what ranks tell each other before they meet.

mod membership;
mod nccl;
mod offer;

use std::sync::Arc;

pub(super) use self::membership::Membership;
use self::nccl::{ID_BYTES, Nccl};
use super::{DeviceBuffer, Gpu, OneShot, rms_norm::RmsNormCall};
use crate::{
    KernelError,
    group::{Collective, Exchange, Group, NO_OFFER},
};

/// This rank's side of a group of GPUs. It is closed by the thread that drops it: others know its membership alone.
pub struct CudaCommunicator {
    gpu: Arc<Gpu>,
    membership: Arc<Membership>,
    /// For short sums, where the GPUs can; aborted with the rest.
    one_shot: Option<OneShot>,
}

/// What a group of GPUs does with values of this one.
#[derive(Debug, PartialEq)]
pub struct CollectiveCall {
    /// The group.
    pub communicator: Arc<CudaCommunicator>,
    /// What.
    pub collective: Collective,
    /// With the first so many values
    pub len: usize,
    /// of this buffer.
    pub values: Arc<DeviceBuffer>,
    /// Whether they are f16, else f32.
    pub is_half: bool,
}

impl CollectiveCall {
    /// Who makes it, if not NCCL: all ranks come to the same answer.
    fn one_shot(&self) -> Option<&OneShot> {
        let is_sum = self.collective == Collective::AllReduce && !self.is_half;
        self.communicator.one_shot.as_ref().filter(|one_shot| is_sum && self.len <= one_shot.max_len())
    }

    /// Whether `norm` of its result can be made in the same launch.
    pub(super) fn takes_norm(&self, norm: &RmsNormCall) -> bool {
        let is_of_sums = norm.input == self.values && norm.num_tokens * norm.output.columns == self.len;
        is_of_sums && self.one_shot().is_some_and(|one_shot| one_shot.takes_norm(norm))
    }
}

impl CudaCommunicator {
    /// Meets the GPUs of the other ranks, if all of them can and NCCL brings them together.
    ///
    /// # Errors
    /// What `exchange` returns.
    pub fn join<E>(gpu: &Arc<Gpu>, group: &Group, exchange: Exchange<'_, E>) -> Result<Option<Arc<Self>>, E> {
        let offer = offer::make(gpu, group.rank);
        if let Err(reason) = &offer {
            tracing::warn!(reason, "this GPU cannot meet others");
        }
        let offers = exchange(&offer.unwrap_or(NO_OFFER))?;
        let id = match offer::conclude(&offers) {
            Ok(id) => id,
            Err(reason) => {
                tracing::warn!(reason, "GPUs do not meet");
                return Ok(None);
            }
        };
        let met = Self::meet(gpu, group, id);
        let all_met = exchange(&[u8::from(met.is_ok())])?.iter().all(|met| *met == [1]);
        match met {
            Ok(mut communicator) if all_met => {
                communicator.one_shot = OneShot::join(gpu, group.rank, group.world_size, exchange)?;
                communicator.membership.look_after(communicator.one_shot.as_ref().map(OneShot::abort_flag));
                Ok(Some(Arc::new(communicator)))
            }
            Ok(_) => {
                tracing::warn!("GPUs do not meet: another rank of the group failed to");
                Ok(None)
            }
            Err(error) => {
                tracing::warn!(%error, "GPUs do not meet");
                Ok(None)
            }
        }
    }

    /// Waits half of the group's time for the others: who fails says so before others lose patience with it.
    fn meet(gpu: &Arc<Gpu>, group: &Group, id: [u8; ID_BYTES]) -> Result<Self, KernelError> {
        gpu.bind()?;
        let nccl = Nccl::begin(id, group.rank, group.world_size).map_err(|what| gpu.error(what))?;
        let membership = Membership::new(gpu, group, nccl);
        // Until it is ready it is closed on drop, as afterwards.
        let communicator = Self { gpu: Arc::clone(gpu), membership, one_shot: None };
        communicator.membership.wait_ready(group.timeout / 2)?;
        Ok(communicator)
    }

    /// This rank's place.
    pub fn rank(&self) -> usize {
        self.membership.group().rank
    }

    /// Starts a call, or records it.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if the buffer is too small, [`KernelError::OutOfRange`] for a peer that is not there,
    /// [`KernelError::Device`] if the communicator is or gets aborted.
    pub fn launch(call: &CollectiveCall) -> Result<(), KernelError> {
        let CollectiveCall { communicator, collective, len, values, is_half } = call;
        let (operation, Self { gpu, membership, .. }) = ("collective", &**communicator);
        let element_bytes = if *is_half { size_of::<u16>() } else { size_of::<f32>() };
        values.expect_bytes(operation, "bytes of the values", len * element_bytes)?;
        if let Collective::Send { peer } | Collective::Receive { peer } = *collective
            && peer >= membership.group().world_size
        {
            let limit = membership.group().world_size;
            return Err(KernelError::OutOfRange { operation, what: "peer", got: peer, limit });
        }
        gpu.bind()?;
        membership.check()?;
        if let Some(one_shot) = call.one_shot() {
            return one_shot.all_reduce(*len, values);
        }
        if gpu.is_rehearsing() {
            return Ok(());
        }
        // SAFETY: the length was checked; the call shares the buffer, and lives as long as its recording.
        let enqueue = |nccl: &Nccl| unsafe { nccl.enqueue(gpu, *collective, values.pointer(), *len, *is_half) };
        membership.with_nccl(enqueue)?;
        membership.wait_ready(membership.group().timeout)
    }

    /// Starts a sum of [those](CollectiveCall::takes_norm) which the norm of its result goes with.
    ///
    /// # Errors
    /// As [`launch`](Self::launch) and [`OneShot::all_reduce_norm`].
    pub(super) fn launch_with_norm(call: &CollectiveCall, norm: &RmsNormCall) -> Result<(), KernelError> {
        call.communicator.membership.check()?;
        match call.one_shot() {
            Some(one_shot) => one_shot.all_reduce_norm(norm),
            None => Err(call.communicator.gpu.error("a sum that NCCL makes has no norm".to_owned())),
        }
    }
}

impl Drop for CudaCommunicator {
    fn drop(&mut self) {
        // What others still wait for is sent first. An error was reported to whoever launched the work.
        let _ = self.gpu.drain_looking_after(&[Arc::clone(&self.membership)]);
        self.membership.close();
        self.gpu.unregister(&self.membership);
    }
}

impl PartialEq for CudaCommunicator {
    /// Whether it is the same.
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl std::fmt::Debug for CudaCommunicator {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Group { rank, world_size, .. } = self.membership.group();
        write!(formatter, "CudaCommunicator(rank {rank} of {world_size})")
    }
}
