//! The GPU of tests that need one. Such tests are ignored by default; asked for, they fail where there is no GPU.

use std::{env, sync::Arc};

use bytemuck::{AnyBitPattern, NoUninit};
use lockstep_kernels::cuda::{DeviceBuffer, Gpu, KernelCache};

/// The first GPU. `LOCKSTEP_TEST_KERNEL_CACHE` may name a folder that keeps compiled kernels from test to test.
pub fn open() -> Arc<Gpu> {
    Gpu::open(0, KernelCache::new(env::var_os("LOCKSTEP_TEST_KERNEL_CACHE").map(Into::into))).unwrap()
}

/// All cases; every third if `LOCKSTEP_TEST_FEW` is set: under compute-sanitizer each takes a hundred times as long.
#[allow(dead_code, reason = "not every test has many cases")]
pub fn cases<T>(all: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    all.into_iter().step_by(if env::var_os("LOCKSTEP_TEST_FEW").is_some() { 3 } else { 1 })
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
