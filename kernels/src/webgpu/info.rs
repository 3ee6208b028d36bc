//! What a GPU is and what it sustains, for reports and for planning.
//! For: whoever chooses devices and plans with them.
//! Invariant: measuring takes some milliseconds on a GPU, and what it needs is freed again.

use std::{sync::Arc, time::Instant};

use lockstep_formats::GgmlType;
use wgpu::{Adapter, Backend, DeviceType};

use super::{Gpu, WebGpuDevice, adapter};
use crate::{
    Device, KernelError,
    cpu::available_memory_bytes,
    device::DeviceInfo,
    ops::{Epilogue, HostMatrix},
};

/// Memory that is left to the driver and to scratch.
const RESERVED_BYTES: u64 = 1 << 30;
/// Shape of the layer that is multiplied to measure, and of a smaller one for adapters that compute on the processor.
const PROBE: [(usize, usize); 2] = [(16384, 8192), (1024, 1024)];
/// Tokens of the measurement of arithmetic.
const PROBE_TOKENS: usize = 64;

/// Memory that an adapter may use: its own, or for those that share the machine's, what is free there.
pub(super) fn memory_bytes(adapter: &Adapter) -> u64 {
    let shared = available_memory_bytes();
    match adapter.get_info().device_type {
        DeviceType::DiscreteGpu => own_memory_bytes(adapter).unwrap_or(shared),
        // Apple's GPUs may use three quarters of the memory that they share.
        DeviceType::IntegratedGpu => shared / 4 * 3,
        // What it is given is written at once, unlike what the processor's own device reserves.
        DeviceType::Cpu => shared / 8,
        _ => shared,
    }
}

/// Memory of the adapter itself, as far as its interface tells.
fn own_memory_bytes(adapter: &Adapter) -> Option<u64> {
    match adapter.get_info().backend {
        Backend::Vulkan => vulkan_memory_bytes(adapter),
        _ => None,
    }
}

#[cfg(not(target_vendor = "apple"))]
fn vulkan_memory_bytes(adapter: &Adapter) -> Option<u64> {
    // SAFETY: what is borrowed of the adapter is only read.
    let adapter = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let instance = adapter.shared_instance().raw_instance();
    // SAFETY: the physical device is one of this instance, which the adapter keeps alive.
    let properties = unsafe { instance.get_physical_device_memory_properties(adapter.raw_physical_device()) };
    let heaps = properties.memory_heaps.iter().take(properties.memory_heap_count as usize);
    // Bit 0: memory of the device itself.
    heaps.filter(|heap| heap.flags.as_raw() & 1 != 0).map(|heap| heap.size).max()
}

#[cfg(target_vendor = "apple")]
fn vulkan_memory_bytes(_: &Adapter) -> Option<u64> {
    None
}

impl WebGpuDevice {
    /// Asks the system what the GPU is, and measures what it sustains.
    ///
    /// # Errors
    /// [`KernelError::Device`] if it fails.
    pub fn measure(&mut self) -> Result<DeviceInfo, KernelError> {
        let gpu: &Arc<Gpu> = self.gpu();
        let is_software = adapter::is_software(&gpu.adapter);
        let memory_bytes = memory_bytes(&gpu.adapter);
        let is_alone = gpu.adapter.get_info().device_type == DeviceType::DiscreteGpu;
        let abilities = adapter::abilities(&gpu.adapter);
        let memory_bytes = if is_software { memory_bytes } else { memory_bytes.saturating_sub(RESERVED_BYTES) };
        let (rows, columns) = PROBE[usize::from(is_software)];
        let ggml_type = GgmlType::Q8_0;
        let num_bytes = rows * ggml_type.bytes_of(columns).unwrap_or(0);
        let matrix = HostMatrix { ggml_type, rows, columns, bytes: vec![0; num_bytes] };
        let weight = self.linear(vec![matrix])?;
        let input = self.tensor(PROBE_TOKENS, columns)?;
        let mut output = self.tensor(PROBE_TOKENS, rows)?;
        let mut seconds = |num_tokens: usize| -> Result<f64, KernelError> {
            let mut best = f64::INFINITY;
            for _ in 0..3 {
                let start = Instant::now();
                self.matmul(num_tokens, &weight, &input, Epilogue::Store, &mut output)?;
                self.with_host(1, &mut output, |_| Ok::<_, KernelError>(()))?;
                best = best.min(start.elapsed().as_secs_f64());
            }
            Ok(best)
        };
        let (one, many) = (seconds(1)?, seconds(PROBE_TOKENS)?);
        let operations = (2 * rows * columns * PROBE_TOKENS) as f64;
        Ok(DeviceInfo {
            name: self.name().to_owned(),
            memory_bytes,
            host_memory_bytes: (!is_alone).then(available_memory_bytes),
            memory_bytes_per_second: num_bytes as f64 / one,
            operations_per_second: operations / many,
            peer_link: None,
            abilities,
        })
    }
}
