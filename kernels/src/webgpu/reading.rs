//! [`Reading`]: values on their way back from a GPU.
//! For: [`Commands`](super::commands::Commands), which waits for them, and pages, which await them: a browser's GPU answers
//! only while nobody waits.
//! Invariant: the buffer that the values come in is used again once they were read, and not before.

use std::sync::{Arc, Mutex, PoisonError};

use futures_channel::oneshot;
use wgpu::{Buffer, BufferAsyncError, BufferDescriptor, BufferUsages, MapMode};

use super::gpu::Gpu;
use crate::KernelError;

/// A buffer to be used again, if there is one.
pub(super) type Spare = Arc<Mutex<Option<Buffer>>>;

/// What the GPU copies to the host.
#[derive(Debug)]
pub struct Reading {
    gpu: Arc<Gpu>,
    spare: Spare,
    buffer: Buffer,
    num_bytes: u64,
    mapped: oneshot::Receiver<Result<(), BufferAsyncError>>,
}

impl Reading {
    /// A buffer that takes so many bytes: the spare one, if it is large enough.
    pub(super) fn target(gpu: &Gpu, spare: &Spare, num_bytes: u64) -> Buffer {
        match spare.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(buffer) if buffer.size() >= num_bytes => buffer,
            _ => gpu.device.create_buffer(&BufferDescriptor {
                label: Some("read back"),
                size: num_bytes.next_power_of_two(),
                usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
                mapped_at_creation: false,
            }),
        }
    }

    /// The first bytes of a buffer, to which a copy was submitted.
    pub(super) fn new(gpu: &Arc<Gpu>, spare: &Spare, buffer: Buffer, num_bytes: u64) -> Self {
        let (sender, mapped) = oneshot::channel();
        // Whoever wanted the values may be gone.
        buffer.slice(..num_bytes).map_async(MapMode::Read, move |outcome| drop(sender.send(outcome)));
        Self { gpu: Arc::clone(gpu), spare: Arc::clone(spare), buffer, num_bytes, mapped }
    }

    /// The values, after a wait for the GPU.
    pub(super) fn arrived<T: bytemuck::Pod>(mut self) -> Result<Vec<T>, KernelError> {
        let mapped = self.mapped.try_recv().ok().flatten();
        self.values(mapped)
    }

    /// The values, as soon as the GPU has them.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the GPU fails.
    pub async fn arrive<T: bytemuck::Pod>(mut self) -> Result<Vec<T>, KernelError> {
        let mapped = (&mut self.mapped).await.ok();
        self.gpu.check()?;
        self.values(mapped)
    }

    fn values<T: bytemuck::Pod>(self, mapped: Option<Result<(), BufferAsyncError>>) -> Result<Vec<T>, KernelError> {
        match mapped {
            Some(Ok(())) => {}
            Some(Err(error)) => return Err(self.gpu.error(error.to_string())),
            None => return Err(self.gpu.error("the GPU's answer did not arrive")),
        }
        let view = self.buffer.slice(..self.num_bytes).get_mapped_range();
        let view = view.map_err(|error| self.gpu.error(error.to_string()))?;
        let values = bytemuck::pod_collect_to_vec(&view);
        drop(view);
        self.buffer.unmap();
        *self.spare.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.buffer);
        Ok(values)
    }
}
