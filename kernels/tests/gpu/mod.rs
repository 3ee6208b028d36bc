//! The GPU of tests that need one. Such tests are ignored by default; asked for, they fail where there is no GPU.

use std::{env, sync::Arc, thread};

use bytemuck::{AnyBitPattern, NoUninit};
use lockstep_kernels::cuda::{DeviceBuffer, Gpu, KernelCache};

/// `LOCKSTEP_TEST_KERNEL_CACHE` may name a folder that keeps compiled kernels from test to test.
pub fn cache() -> KernelCache {
    KernelCache::new(env::var_os("LOCKSTEP_TEST_KERNEL_CACHE").map(Into::into))
}

/// The first GPU.
#[allow(dead_code, reason = "not every test asks for less than a device")]
pub fn open() -> Arc<Gpu> {
    Gpu::open(0, cache()).unwrap()
}

/// Whether tests are to be small, because compute-sanitizer makes each take a hundred times as long.
#[allow(dead_code, reason = "not every test has many cases")]
pub fn is_few() -> bool {
    env::var_os("LOCKSTEP_TEST_FEW").is_some()
}

/// All cases; every third if `LOCKSTEP_TEST_FEW` is set.
#[allow(dead_code, reason = "not every test has many cases")]
pub fn cases<T>(all: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    all.into_iter().step_by(if is_few() { 3 } else { 1 })
}

/// Runs `test` with every case, each in a thread of its own (`case 0`, …) and on a stream of its own: most of the time
/// goes to compiling kernels. compute-sanitizer loses track of more than a few streams.
#[allow(dead_code, reason = "not every test has many cases")]
pub fn side_by_side<T: Send>(cases: impl IntoIterator<Item = T>, test: impl Fn(&Arc<Gpu>, T) + Sync) {
    let (test, at_a_time) = (&test, if is_few() { 4 } else { usize::MAX });
    let mut cases = cases.into_iter().enumerate().peekable();
    while cases.peek().is_some() {
        thread::scope(|scope| {
            for (index, case) in cases.by_ref().take(at_a_time) {
                let builder = thread::Builder::new().name(format!("case {index}"));
                builder.spawn_scoped(scope, move || test(&open(), case)).unwrap();
            }
        });
    }
}

/// A copy of `values` on the GPU.
#[allow(dead_code, reason = "not every test has memory of its own")]
pub fn upload<T: NoUninit>(gpu: &Arc<Gpu>, values: &[T]) -> DeviceBuffer {
    DeviceBuffer::from_slice(gpu, values).unwrap()
}

/// The first `len` values of a buffer.
#[allow(dead_code, reason = "not every test has memory of its own")]
pub fn download<T: NoUninit + AnyBitPattern>(buffer: &DeviceBuffer, len: usize) -> Vec<T> {
    let mut values = vec![T::zeroed(); len];
    buffer.read(0, &mut values).unwrap();
    values
}
