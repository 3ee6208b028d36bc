//! Steps that are described but not computed, to learn which kernels their like will need; these are then compiled, or
//! read from the cache, side by side.
//! For: [`CudaDevice::prepare`](crate::Device::prepare), so that no request waits for a compiler.
//! Invariant: while a GPU rehearses, nothing is launched on it but copies, and a kernel that it gives out never can be.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use rayon::prelude::*;

use super::{Gpu, sources::Source};
use crate::KernelError;

/// What is to be loaded: a source and the options that it is compiled with.
pub(super) type Module = (&'static Source, Vec<String>);

/// Whether a GPU rehearses, and what was wanted so far.
#[derive(Default)]
pub(super) struct Rehearsal {
    is_on: AtomicBool,
    wanted: Mutex<Vec<Module>>,
}

impl Rehearsal {
    /// Notes a wish during a rehearsal; says whether there is one.
    pub fn note(&self, source: &'static Source, options: &[String]) -> bool {
        let is_on = self.is_on.load(Ordering::Relaxed);
        if is_on {
            // The list is whole at any time.
            let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
            if !wanted.iter().any(|known| known.0.name == source.name && known.1 == options) {
                wanted.push((source, options.to_vec()));
            }
        }
        is_on
    }
}

/// A rehearsal, ended at the latest when dropped.
struct Running<'a>(&'a Rehearsal);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.is_on.store(false, Ordering::Relaxed);
    }
}

impl Gpu {
    /// Whether launches are left out.
    pub(super) fn is_rehearsing(&self) -> bool {
        self.rehearsal.is_on.load(Ordering::Relaxed)
    }

    /// Runs `body` without launching anything, then loads all kernels that it wanted.
    pub(super) fn rehearse<E: From<KernelError>>(
        self: &Arc<Self>,
        body: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let start = Instant::now();
        self.rehearsal.is_on.store(true, Ordering::Relaxed);
        let running = Running(&self.rehearsal);
        let rehearsed = body();
        drop(running);
        let wanted = std::mem::take(&mut *self.rehearsal.wanted.lock().unwrap_or_else(PoisonError::into_inner));
        rehearsed?;
        // Without a cache this takes its time.
        tracing::info!(ordinal = self.ordinal(), num_modules = wanted.len(), "loading kernels");
        wanted.par_iter().try_for_each(|(source, options)| self.load(source, options).map(drop))?;
        let elapsed_ms = start.elapsed().as_millis() as u64;
        tracing::info!(ordinal = self.ordinal(), num_modules = wanted.len(), elapsed_ms, "kernels are ready");
        Ok(())
    }
}
