//! The GPU of tests that need one. Such tests are ignored by default; asked for, they fail where there is no GPU.

use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use lockstep_kernels::cuda::{DeviceBuffer, Gpu, KernelCache};

/// The first GPU.
pub fn open() -> Arc<Gpu> {
    Gpu::open(0, KernelCache::default()).unwrap()
}

/// A copy of `values` on the GPU.
pub fn upload<T: NoUninit>(gpu: &Arc<Gpu>, values: &[T]) -> DeviceBuffer {
    DeviceBuffer::from_slice(gpu, values).unwrap()
}

/// The first `len` values of a buffer.
pub fn download<T: NoUninit + AnyBitPattern>(buffer: &DeviceBuffer, len: usize) -> Vec<T> {
    let mut values = vec![T::zeroed(); len];
    buffer.read(0, &mut values).unwrap();
    values
}
