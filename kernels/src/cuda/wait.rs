//! Waiting for a GPU whose work may wait for other GPUs.
//! Invariant: no wait outlasts the groups that the GPU is in: it looks after their ends and time-outs, and a communicator
//! that is aborted frees the GPU.

use std::{
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use cudarc::driver::sys::{CUresult, cuStreamQuery};

use super::{CudaCommunicator, Gpu};
use crate::KernelError;

/// Between two looks after the groups.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// Steps that take longer than this are waited for with pauses: a few dozen microseconds more do not matter.
const SPIN: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_micros(50);
/// Longest that a GPU may take to stop after an abort.
const GRACE: Duration = Duration::from_secs(10);

impl Gpu {
    /// Makes waits look after `communicator` for as long as it lives.
    pub(super) fn register(&self, communicator: &Arc<CudaCommunicator>) {
        let mut communicators = self.communicators.lock().unwrap_or_else(PoisonError::into_inner);
        communicators.retain(|known| known.strong_count() > 0);
        communicators.push(Arc::downgrade(communicator));
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// [`KernelError::Device`] with what went wrong in work that was started before, or if a communicator was aborted,
    /// so that the work's result is garbage.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        self.drain()?;
        self.registered().iter().try_for_each(|communicator| communicator.check())
    }

    /// Waits until all work is done, whatever its results are worth.
    ///
    /// # Errors
    /// [`KernelError::Device`] with what went wrong in work that was started before.
    pub(super) fn drain(&self) -> Result<(), KernelError> {
        let communicators = self.registered();
        if communicators.is_empty() {
            return self.stream().synchronize().map_err(self.failed("cuStreamSynchronize"));
        }
        self.drain_looking_after(&communicators.iter().map(|communicator| &**communicator).collect::<Vec<_>>())
    }

    /// Waits until all work is done, some of it that of `communicators`.
    ///
    /// # Errors
    /// As [`drain`](Self::drain).
    pub(super) fn drain_looking_after(&self, communicators: &[&CudaCommunicator]) -> Result<(), KernelError> {
        self.bind()?;
        let start = Instant::now();
        let mut next_look = LOOK_INTERVAL;
        let mut aborted_at = None;
        loop {
            // SAFETY: the stream lives and belongs to this GPU.
            match unsafe { cuStreamQuery(self.stream().cu_stream()) } {
                CUresult::CUDA_ERROR_NOT_READY => {}
                code => return code.result().map_err(self.failed("cuStreamQuery")),
            }
            let waited = start.elapsed();
            if waited >= next_look {
                next_look = waited + LOOK_INTERVAL;
                communicators.iter().for_each(|communicator| communicator.look(waited));
                if let Some(reason) = communicators.iter().find_map(|communicator| communicator.abort_reason()) {
                    communicators.iter().for_each(|communicator| communicator.abort(&reason));
                    if *aborted_at.get_or_insert(waited) + GRACE < waited {
                        return Err(self.error(format!("it still works {GRACE:?} after an abort: {reason}")));
                    }
                }
            }
            if waited < SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn registered(&self) -> Vec<Arc<CudaCommunicator>> {
        let communicators = self.communicators.lock().unwrap_or_else(PoisonError::into_inner);
        communicators.iter().filter_map(std::sync::Weak::upgrade).collect()
    }
}
