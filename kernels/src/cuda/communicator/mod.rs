//! GPUs of several ranks, which sum and hand over rows among themselves: recorded and replayed with the step, without a
//! way through the hosts. NCCL moves the bytes, within a process, a host or a network; but short sums between GPUs that can
//! write to each other's memory go through [`OneShot`], in a third of the time.
//! For: [`CudaDevice`](super::CudaDevice).
//! Invariant: no wait outlasts the group: [`Gpu::drain`] and [`CudaCommunicator::launch`] look whether it has ended, or
//! took longer than its time-out, and a thread of the communicator does while the driver blocks the rank's. Then the
//! communicator is aborted, which frees the GPU from waiting, and every later use is an error that says why.

mod nccl;
mod offer;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use self::nccl::{ID_BYTES, Nccl};
use super::{DeviceBuffer, Gpu, OneShot, rms_norm::RmsNormCall};
use crate::{
    KernelError,
    group::{Collective, Exchange, Group, NO_OFFER},
};

/// Between two looks after a group while nobody waits for it, or the driver blocks who does.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);
/// Longest wait for NCCL to let go of a communicator.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// This rank's side of a group of GPUs.
pub struct CudaCommunicator {
    gpu: Arc<Gpu>,
    group: Group,
    state: Mutex<State>,
    /// For short sums, where the GPUs can; aborted with the rest.
    one_shot: Option<OneShot>,
    closing: Mutex<Option<JoinHandle<()>>>,
}

enum State {
    Open(Nccl),
    Aborted(String),
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
                Ok(Some(communicator.share()))
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
        let group = Group { timeout: group.timeout / 2, ..group.clone() };
        let (state, closing) = (Mutex::new(State::Open(nccl)), Mutex::default());
        let mut communicator = Self { gpu: Arc::clone(gpu), group, state, one_shot: None, closing };
        communicator.wait_ready()?;
        communicator.group.timeout *= 2;
        Ok(communicator)
    }

    /// From here on its waits are looked after.
    fn share(self) -> Arc<Self> {
        let communicator = Arc::new(self);
        communicator.gpu.register(&communicator);
        let watched = Arc::downgrade(&communicator);
        let watch = thread::Builder::new().name("nccl-watch".to_owned()).spawn(move || Self::watch(&watched));
        if let Err(error) = watch {
            tracing::error!(%error, "no thread to watch a communicator of GPUs: it is looked after in waits alone");
        }
        communicator
    }

    fn watch(watched: &Weak<Self>) {
        while let Some(communicator) = watched.upgrade() {
            communicator.look(Duration::ZERO);
            drop(communicator);
            thread::sleep(WATCH_INTERVAL);
        }
    }

    /// This rank's place.
    pub fn rank(&self) -> usize {
        self.group.rank
    }

    /// Starts a call, or records it.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if the buffer is too small, [`KernelError::OutOfRange`] for a peer that is not there,
    /// [`KernelError::Device`] if the communicator is or gets aborted.
    pub fn launch(call: &CollectiveCall) -> Result<(), KernelError> {
        let CollectiveCall { communicator, collective, len, values, is_half } = call;
        let (operation, Self { gpu, group, .. }) = ("collective", &**communicator);
        let element_bytes = if *is_half { size_of::<u16>() } else { size_of::<f32>() };
        values.expect_bytes(operation, "bytes of the values", len * element_bytes)?;
        if let Collective::Send { peer } | Collective::Receive { peer } = *collective
            && peer >= group.world_size
        {
            let limit = group.world_size;
            return Err(KernelError::OutOfRange { operation, what: "peer", got: peer, limit });
        }
        gpu.bind()?;
        communicator.check()?;
        if let Some(one_shot) = call.one_shot() {
            return one_shot.all_reduce(*len, values);
        }
        if gpu.is_rehearsing() {
            return Ok(());
        }
        if let State::Open(nccl) = &*communicator.lock() {
            // SAFETY: the length was checked; the call shares the buffer, and lives as long as its recording.
            unsafe { nccl.enqueue(gpu, *collective, values.pointer(), *len, *is_half) }
                .map_err(|what| gpu.error(what))?;
        }
        communicator.wait_ready()
    }

    /// Starts a sum of [those](CollectiveCall::takes_norm) which the norm of its result goes with.
    ///
    /// # Errors
    /// As [`launch`](Self::launch) and [`OneShot::all_reduce_norm`].
    pub(super) fn launch_with_norm(call: &CollectiveCall, norm: &RmsNormCall) -> Result<(), KernelError> {
        call.communicator.check()?;
        match call.one_shot() {
            Some(one_shot) => one_shot.all_reduce_norm(norm),
            None => Err(call.communicator.gpu.error("a sum that NCCL makes has no norm".to_owned())),
        }
    }

    /// Waits until NCCL's host threads are done with what was asked for.
    fn wait_ready(&self) -> Result<(), KernelError> {
        let start = Instant::now();
        loop {
            let state = match &*self.lock() {
                State::Open(nccl) => nccl.is_ready(),
                State::Aborted(_) => Ok(true),
            };
            match state {
                Ok(true) => return self.check(),
                Ok(false) => self.look(start.elapsed()),
                Err(what) => self.abort(&what),
            }
            thread::yield_now();
        }
    }

    /// Aborts if the group has ended, NCCL has failed, or the others were waited for too long.
    pub(super) fn look(&self, waited: Duration) {
        let failed = match &*self.lock() {
            State::Open(nccl) => nccl.is_ready().err(),
            State::Aborted(_) => return,
        };
        let timeout = self.group.timeout;
        let is_late = || (waited >= timeout).then(|| format!("other GPUs did not come within {timeout:?}"));
        if let Some(reason) = failed.or_else(&*self.group.end_reason).or_else(is_late) {
            self.abort(&reason);
        }
    }

    /// Ends the GPU's waiting for others; what it computes from then on is garbage.
    pub(super) fn abort(&self, reason: &str) {
        let state = std::mem::replace(&mut *self.lock(), State::Aborted(reason.to_owned()));
        match state {
            State::Open(nccl) => {
                tracing::info!(reason, rank = self.group.rank, "communicator of GPUs aborted");
                self.one_shot.iter().for_each(OneShot::abort);
                self.close(nccl);
            }
            // The first reason stays.
            aborted @ State::Aborted(_) => *self.lock() = aborted,
        }
    }

    /// Refuses to go on after an abort.
    pub(super) fn check(&self) -> Result<(), KernelError> {
        match self.abort_reason() {
            None => Ok(()),
            Some(reason) => Err(self.gpu.error(format!("its communicator was aborted: {reason}"))),
        }
    }

    /// Why it was aborted, if it was.
    pub(super) fn abort_reason(&self) -> Option<String> {
        match &*self.lock() {
            State::Open(_) => None,
            State::Aborted(reason) => Some(reason.clone()),
        }
    }

    /// Aborts on a thread of its own: the call waits for graphs that the rank still holds.
    fn close(&self, nccl: Nccl) {
        let gpu = Arc::clone(&self.gpu);
        let close = move || {
            let aborted = gpu.bind().and_then(|()| nccl.abort().map_err(|what| gpu.error(what)));
            if let Err(error) = aborted {
                tracing::error!(%error, "a communicator of GPUs could not be closed");
            }
        };
        match thread::Builder::new().name("nccl-close".to_owned()).spawn(close) {
            Ok(closing) => *self.closing.lock().unwrap_or_else(PoisonError::into_inner) = Some(closing),
            Err(error) => tracing::error!(%error, "no thread to close a communicator of GPUs"),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for CudaCommunicator {
    /// A process that ends while NCCL lets go would crash, so this waits for it.
    fn drop(&mut self) {
        // What others still wait for is sent first. An error was reported to whoever launched the work.
        let _ = self.gpu.drain_looking_after(&[self]);
        if let State::Open(nccl) = std::mem::replace(&mut *self.lock(), State::Aborted("it was closed".to_owned())) {
            self.close(nccl);
        }
        let Some(closing) = self.closing.get_mut().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let start = Instant::now();
        while !closing.is_finished() {
            if start.elapsed() > CLOSE_TIMEOUT {
                tracing::error!("NCCL does not let go of a communicator: it is left open");
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        // A panic there was reported by the panic hook.
        let _ = closing.join();
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
        write!(formatter, "CudaCommunicator(rank {} of {})", self.group.rank, self.group.world_size)
    }
}
