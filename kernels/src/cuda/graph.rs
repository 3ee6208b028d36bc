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
    recorded: CUgraph,
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
        gpu.bind()?;
        let cu_stream = gpu.stream().cu_stream();
        // Other threads may allocate while this one records.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives and belongs to this GPU alone.
        unsafe { stream::begin_capture(cu_stream, mode) }.map_err(gpu.failed("cuStreamBeginCapture"))?;
        let outcome = body();
        // SAFETY: as above. A recording is ended whatever came of `body`.
        let recorded = unsafe { stream::end_capture(cu_stream) }.map_err(gpu.failed("cuStreamEndCapture"));
        let mut graph = Self { gpu: Arc::clone(gpu), recorded: std::ptr::null_mut(), executable: std::ptr::null_mut() };
        graph.recorded = match (outcome, recorded) {
            (Ok(()), recorded) => recorded?,
            (Err(error), recorded) => {
                // Dropped with `graph`.
                graph.recorded = recorded.unwrap_or(std::ptr::null_mut());
                return Err(error);
            }
        };
        if graph.recorded.is_null() {
            return Err(gpu.error("cuStreamEndCapture gave no graph".to_owned()).into());
        }
        // SAFETY: a graph that was just recorded.
        graph.executable = unsafe { graph::instantiate(graph.recorded, CUgraphInstantiate_flags(0)) }
            .map_err(gpu.failed("cuGraphInstantiate"))?;
        // SAFETY: just instantiated.
        unsafe { graph::upload(graph.executable, cu_stream) }.map_err(gpu.failed("cuGraphUpload"))?;
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
            if !self.executable.is_null() {
                // SAFETY: instantiated in `record`, destroyed once, not executing.
                unsafe { graph::exec_destroy(self.executable) }.map_err(self.gpu.failed("cuGraphExecDestroy"))?;
            }
            if !self.recorded.is_null() {
                // SAFETY: recorded in `record`, destroyed once.
                unsafe { graph::destroy(self.recorded) }.map_err(self.gpu.failed("cuGraphDestroy"))?;
            }
            Ok(())
        });
        if let Err(error) = destroyed {
            tracing::error!(%error, "a recorded graph could not be destroyed");
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

    fn record_event(&self) -> Result<CudaEvent, KernelError> {
        self.bind()?;
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        self.stream().record_event(flags).map_err(self.failed("cuEventRecord"))
    }
}
