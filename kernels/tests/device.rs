//! Whole forward steps of the CPU device against the oracles.
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod blocks;
mod steps;

use lockstep_formats::Dtype;
use lockstep_kernels::cpu::CpuDevice;
use steps::{EIGHT_BIT_TOLERANCE, compare};

#[test]
fn steps_agree_with_the_oracles() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        compare(CpuDevice::new(2).unwrap(), usize::MAX, false, dtype, |_| EIGHT_BIT_TOLERANCE);
    }
}

#[test]
fn steps_of_ranks_that_meet_on_the_host_agree_with_the_oracles() {
    compare(CpuDevice::new(2).unwrap(), usize::MAX, true, Dtype::F16, |_| EIGHT_BIT_TOLERANCE);
}
