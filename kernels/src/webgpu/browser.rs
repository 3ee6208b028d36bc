//! The GPU that a browser gives to a page or to its workers.
//! For: pages that compute.
//! Invariant: nothing here waits: what takes time is awaited.

use wgpu::{Backends, Instance, InstanceDescriptor, PowerPreference, RequestAdapterOptions};

use super::{Gpu, WebGpuDevice, gpu::GpuOptions};
use crate::KernelError;

impl WebGpuDevice {
    /// Opens the browser's adapter.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the browser has none, or it does not open.
    pub async fn open_in_browser() -> Result<Self, KernelError> {
        let instance = Instance::new(InstanceDescriptor {
            backends: Backends::BROWSER_WEBGPU,
            ..InstanceDescriptor::new_without_display_handle()
        });
        let wanted = RequestAdapterOptions { power_preference: PowerPreference::HighPerformance, ..Default::default() };
        let adapter = instance.request_adapter(&wanted).await;
        let adapter =
            adapter.map_err(|error| KernelError::Device { device: "webgpu".to_owned(), what: error.to_string() })?;
        Self::of(&Gpu::open(adapter, "webgpu", GpuOptions::default()).await?)
    }
}
