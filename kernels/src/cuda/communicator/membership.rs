//! Whether a rank's group of GPUs is open or aborted, and the looks after it.
//! For: [`CudaCommunicator`](super::CudaCommunicator), the waits of its [`Gpu`], and a thread that looks while the driver
//! blocks the rank's.
//! Invariant: whoever looks knows the membership alone, so the communicator is closed by the rank's thread, after its
//! recordings.

use std::{
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::nccl::Nccl;
use crate::{
    KernelError,
    cuda::{Gpu, memory::PinnedFlag},
    group::Group,
};

/// Between two looks after a group while nobody waits for it, or the driver blocks who does.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);
/// Longest wait for NCCL to let go of a communicator.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// A rank's part in a group.
pub(in crate::cuda) struct Membership {
    gpu: Arc<Gpu>,
    group: Group,
    state: Mutex<State>,
    /// Ends the waits of one-shot sums, where the group has them.
    one_shot: OnceLock<Arc<PinnedFlag>>,
    closing: Mutex<Option<JoinHandle<()>>>,
}

enum State {
    Open(Nccl),
    Aborted(String),
}

impl Membership {
    pub(super) fn new(gpu: &Arc<Gpu>, group: &Group, nccl: Nccl) -> Arc<Self> {
        let (state, one_shot, closing) = (Mutex::new(State::Open(nccl)), OnceLock::new(), Mutex::default());
        Arc::new(Self { gpu: Arc::clone(gpu), group: group.clone(), state, one_shot, closing })
    }

    pub(super) fn group(&self) -> &Group {
        &self.group
    }

    /// From here on its waits are looked after; `one_shot` is raised when it is aborted.
    pub(super) fn look_after(self: &Arc<Self>, one_shot: Option<Arc<PinnedFlag>>) {
        if let Some(flag) = one_shot {
            // Called once: there is no other flag.
            let _ = self.one_shot.set(flag);
        }
        self.gpu.register(self);
        let watched = Arc::downgrade(self);
        let watch = thread::Builder::new().name("nccl-watch".to_owned()).spawn(move || Self::watch(&watched));
        if let Err(error) = watch {
            tracing::error!(%error, "no thread to watch a communicator of GPUs: it is looked after in waits alone");
        }
    }

    fn watch(watched: &Weak<Self>) {
        while let Some(membership) = watched.upgrade() {
            membership.look(Duration::ZERO);
            drop(membership);
            thread::sleep(WATCH_INTERVAL);
        }
    }

    /// Asks NCCL for something, unless the group was aborted.
    pub(super) fn with_nccl(&self, ask: impl FnOnce(&Nccl) -> Result<(), String>) -> Result<(), KernelError> {
        match &*self.lock() {
            State::Open(nccl) => ask(nccl).map_err(|what| self.gpu.error(what)),
            State::Aborted(_) => Ok(()),
        }
    }

    /// Waits until NCCL's host threads are done with what was asked for.
    pub(super) fn wait_ready(&self, timeout: Duration) -> Result<(), KernelError> {
        let start = Instant::now();
        loop {
            let state = match &*self.lock() {
                State::Open(nccl) => nccl.is_ready(),
                State::Aborted(_) => Ok(true),
            };
            match state {
                Ok(true) => return self.check(),
                Ok(false) => self.look_within(start.elapsed(), timeout),
                Err(what) => self.abort(&what),
            }
            thread::yield_now();
        }
    }

    /// Aborts if the group has ended, NCCL has failed, or the others were waited for too long.
    pub(in crate::cuda) fn look(&self, waited: Duration) {
        self.look_within(waited, self.group.timeout);
    }

    fn look_within(&self, waited: Duration, timeout: Duration) {
        let failed = match &*self.lock() {
            State::Open(nccl) => nccl.is_ready().err(),
            State::Aborted(_) => return,
        };
        let is_late = || (waited >= timeout).then(|| format!("other GPUs did not come within {timeout:?}"));
        if let Some(reason) = failed.or_else(&*self.group.end_reason).or_else(is_late) {
            self.abort(&reason);
        }
    }

    /// Ends the GPU's waiting for others; what it computes from then on is garbage.
    pub(in crate::cuda) fn abort(&self, reason: &str) {
        if let Some(nccl) = self.end(reason) {
            tracing::info!(reason, rank = self.group.rank, "communicator of GPUs aborted");
            self.one_shot.get().into_iter().for_each(|flag| flag.raise());
            self.let_go(nccl);
        }
    }

    /// Refuses to go on after an abort.
    pub(in crate::cuda) fn check(&self) -> Result<(), KernelError> {
        match self.abort_reason() {
            None => Ok(()),
            Some(reason) => Err(self.gpu.error(format!("its communicator was aborted: {reason}"))),
        }
    }

    /// Why it was aborted, if it was.
    pub(in crate::cuda) fn abort_reason(&self) -> Option<String> {
        match &*self.lock() {
            State::Open(_) => None,
            State::Aborted(reason) => Some(reason.clone()),
        }
    }

    /// Leaves the group. A process that ends while NCCL lets go would crash, so this waits for it.
    pub(super) fn close(&self) {
        if let Some(nccl) = self.end("it was closed") {
            self.let_go(nccl);
        }
        let Some(closing) = self.closing.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
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

    /// NCCL's side, if it was still open. The first reason stays.
    fn end(&self, reason: &str) -> Option<Nccl> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Aborted(reason.to_owned())) {
            State::Open(nccl) => Some(nccl),
            aborted @ State::Aborted(_) => {
                *state = aborted;
                None
            }
        }
    }

    /// Aborts on a thread of its own: the call waits for graphs that the rank still holds.
    fn let_go(&self, nccl: Nccl) {
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
