//! The GPU of tests that need one. Such tests are ignored by default; asked for, they fail where there is no GPU.

use std::{env, sync::Arc, thread};

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

/// Runs `test` with every case, each in a thread of its own (`case 0`, …) and on a stream of its own: most of the time
/// goes to compiling kernels.
#[allow(dead_code, reason = "not every test has many cases")]
pub fn side_by_side<T: Send>(cases: impl IntoIterator<Item = T>, test: impl Fn(&Arc<Gpu>, T) + Sync) {
    let test = &test;
    thread::scope(|scope| {
        for (index, case) in cases.into_iter().enumerate() {
            let builder = thread::Builder::new().name(format!("case {index}"));
            builder.spawn_scoped(scope, move || test(&open(), case)).unwrap();
        }
    });
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
