//! Waiting for a GPU whose work may wait for other GPUs.
//! Invariant: no wait outlasts the groups that the GPU is in: it looks after their ends and time-outs, and a communicator
//! that is aborted frees the GPU.

use std::{
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use cudarc::driver::sys::{CUresult, cuStreamQuery};

use super::{Gpu, communicator::Membership};
use crate::KernelError;

/// Between two looks after the groups.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// Steps that take longer than this are waited for with pauses: a few dozen microseconds more do not matter.
const SPIN: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_micros(50);
/// Longest that a GPU may take to stop after an abort.
const GRACE: Duration = Duration::from_secs(10);

impl Gpu {
    /// Makes waits look after `membership` for as long as it lives.
    pub(super) fn register(&self, membership: &Arc<Membership>) {
        let mut memberships = self.memberships.lock().unwrap_or_else(PoisonError::into_inner);
        memberships.push(Arc::downgrade(membership));
    }

    /// Ends that.
    pub(super) fn unregister(&self, membership: &Arc<Membership>) {
        let gone = Arc::downgrade(membership);
        let mut memberships = self.memberships.lock().unwrap_or_else(PoisonError::into_inner);
        memberships.retain(|known| !known.ptr_eq(&gone));
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// [`KernelError::Device`] with what went wrong in work that was started before, or if a communicator was aborted,
    /// so that the work's result is garbage.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        self.drain()?;
        self.registered().iter().try_for_each(|membership| membership.check())
    }

    /// Waits until all work is done, whatever its results are worth.
    ///
    /// # Errors
    /// [`KernelError::Device`] with what went wrong in work that was started before.
    pub(super) fn drain(&self) -> Result<(), KernelError> {
        let memberships = self.registered();
        if memberships.is_empty() {
            return self.stream().synchronize().map_err(self.failed("cuStreamSynchronize"));
        }
        self.drain_looking_after(&memberships)
    }

    /// Waits until all work is done, some of it that of groups.
    ///
    /// # Errors
    /// As [`drain`](Self::drain).
    pub(super) fn drain_looking_after(&self, memberships: &[Arc<Membership>]) -> Result<(), KernelError> {
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
                memberships.iter().for_each(|membership| membership.look(waited));
                if let Some(reason) = memberships.iter().find_map(|membership| membership.abort_reason()) {
                    memberships.iter().for_each(|membership| membership.abort(&reason));
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

    fn registered(&self) -> Vec<Arc<Membership>> {
        let memberships = self.memberships.lock().unwrap_or_else(PoisonError::into_inner);
        memberships.iter().filter_map(std::sync::Weak::upgrade).collect()
    }
}
