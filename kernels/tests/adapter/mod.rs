//! The adapter of tests: the first one of Vulkan, in CI a software one. A test that finds none fails.

#[allow(dead_code, reason = "not every test needs tensor cores")]
pub mod matrices;

use lockstep_kernels::{
    Device, KernelError,
    webgpu::{AdapterId, Backend, WebGpuDevice, WebGpuTensor, gpu::GpuOptions},
};

/// The adapter with what the options allow.
pub fn open_with(options: GpuOptions) -> WebGpuDevice {
    WebGpuDevice::with_options(AdapterId { backend: Backend::Vulkan, ordinal: 0 }, options).unwrap()
}

/// The adapter with all that it has, and as a browser gives it: without subgroups and immediates.
#[allow(dead_code, reason = "not every test needs both")]
pub fn open_both() -> [WebGpuDevice; 2] {
    [true, false].map(|has| open_with(GpuOptions { use_subgroups: has, use_immediates: has, ..GpuOptions::default() }))
}

/// A tensor of these rows.
#[allow(dead_code, reason = "not every test needs tensors")]
pub fn tensor(device: &mut WebGpuDevice, width: usize, values: &[f32]) -> WebGpuTensor {
    let mut tensor = device.tensor(values.len() / width, width).unwrap();
    let fill = |rows: &mut [f32]| {
        rows.copy_from_slice(values);
        Ok::<_, KernelError>(())
    };
    device.with_host(values.len() / width, &mut tensor, fill).unwrap();
    tensor
}

/// Its first rows.
#[allow(dead_code, reason = "not every test needs tensors")]
pub fn rows(device: &mut WebGpuDevice, num_tokens: usize, tensor: &mut WebGpuTensor) -> Vec<f32> {
    device.with_host(num_tokens, tensor, |rows| Ok::<_, KernelError>(rows.to_vec())).unwrap()
}
