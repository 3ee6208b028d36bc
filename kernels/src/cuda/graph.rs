//! Work recorded once and replayed with one call: what a whole step launches.
//! For: decode steps, whose launches would take longer than their work; and benchmarks.
//! Invariant: a graph replays the same kernels with the same arguments, so whatever changes from step to step is in
//! device memory, and all memory that it was recorded with outlives it.

use std::sync::Arc;

use cudarc::driver::{
    CudaEvent,
    result::{graph, stream},
    sys::{CUevent_flags, CUgraph, CUgraphExec, CUgraphInstantiate_flags, CUstreamCaptureMode},
};

use super::Gpu;
use crate::KernelError;

/// Recorded work of one GPU.
pub struct Graph {
    gpu: Arc<Gpu>,
    executable: CUgraphExec,
}

// SAFETY: the driver's graph objects are bound to no thread; `&self` calls come from one thread at a time, as a
// `Graph` is not `Sync`.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `body` launches, without executing it. Memory must not be allocated meanwhile: run `body` once
    /// before, so that kernels are loaded and the pool has what it needs.
    ///
    /// # Errors
    /// What `body` returns, or [`KernelError::Device`] if it does what cannot be recorded.
    pub fn record<E: From<KernelError>>(gpu: &Arc<Gpu>, body: impl FnOnce() -> Result<(), E>) -> Result<Self, E> {
        let mut recording = Recording::begin(gpu)?;
        body()?;
        let recorded = recording.end()?;
        // SAFETY: a graph that was just recorded, and that is destroyed after this: the result needs it no more.
        let executable = unsafe { graph::instantiate(recorded, CUgraphInstantiate_flags(0)) }
            .map_err(gpu.failed("cuGraphInstantiate"))?;
        let graph = Self { gpu: Arc::clone(gpu), executable };
        // SAFETY: just instantiated.
        unsafe { graph::upload(graph.executable, gpu.stream().cu_stream()) }.map_err(gpu.failed("cuGraphUpload"))?;
        Ok(graph)
    }

    /// Executes the recorded work after all work before.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver refuses.
    pub fn replay(&self) -> Result<(), KernelError> {
        self.gpu.bind()?;
        // SAFETY: instantiated in `record`; the memory it uses lives, by the invariant.
        unsafe { graph::launch(self.executable, self.gpu.stream().cu_stream()) }
            .map_err(self.gpu.failed("cuGraphLaunch"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let destroyed = self.gpu.drain().and_then(|()| {
            // SAFETY: instantiated in `record`, destroyed once, not executing.
            unsafe { graph::exec_destroy(self.executable) }.map_err(self.gpu.failed("cuGraphExecDestroy"))
        });
        if let Err(error) = destroyed {
            tracing::error!(%error, "a recorded graph could not be destroyed");
        }
    }
}

/// A recording under way. However it is left, the stream takes work again afterwards and the driver's graph is destroyed.
struct Recording<'a> {
    gpu: &'a Gpu,
    /// What was recorded, once it is ended.
    recorded: Option<CUgraph>,
}

impl<'a> Recording<'a> {
    fn begin(gpu: &'a Gpu) -> Result<Self, KernelError> {
        gpu.bind()?;
        // Other threads may allocate while this one records.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives and belongs to this GPU alone.
        unsafe { stream::begin_capture(gpu.stream().cu_stream(), mode) }.map_err(gpu.failed("cuStreamBeginCapture"))?;
        Ok(Self { gpu, recorded: None })
    }

    fn end(&mut self) -> Result<CUgraph, KernelError> {
        // SAFETY: begun in `begin`; a failure ends it as well, so it is ended once.
        let ended = unsafe { stream::end_capture(self.gpu.stream().cu_stream()) };
        let recorded = *self.recorded.insert(ended.as_ref().copied().unwrap_or(std::ptr::null_mut()));
        ended.map_err(self.gpu.failed("cuStreamEndCapture"))?;
        if recorded.is_null() {
            return Err(self.gpu.error("cuStreamEndCapture gave no graph".to_owned()));
        }
        Ok(recorded)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        // An error that matters was returned before: what is destroyed here is of no more use.
        let recorded = self.recorded.or_else(|| self.end().ok()).unwrap_or(std::ptr::null_mut());
        if !recorded.is_null() {
            // SAFETY: recorded by this recording, destroyed once.
            let _ = unsafe { graph::destroy(recorded) };
        }
    }
}

impl Gpu {
    /// Milliseconds that the GPU takes for what `body` launches.
    ///
    /// # Errors
    /// What `body` returns, or [`KernelError::Device`] if its work fails.
    pub fn elapsed_ms<E: From<KernelError>>(&self, body: impl FnOnce() -> Result<(), E>) -> Result<f32, E> {
        let start = self.record_event()?;
        body()?;
        let end = self.record_event()?;
        Ok(start.elapsed_ms(&end).map_err(self.failed("cuEventElapsedTime"))?)
    }

    pub(super) fn record_event(&self) -> Result<CudaEvent, KernelError> {
        self.bind()?;
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        self.stream().record_event(flags).map_err(self.failed("cuEventRecord"))
    }
}
