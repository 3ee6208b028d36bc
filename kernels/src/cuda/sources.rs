//! The device code, embedded: every `kernels/cuda/*.cu` and the headers that they share.
//! For: the compiler, and the test that compiles all of it for all architectures without a GPU.
//! Invariant: sources include nothing but these headers, so a machine needs no CUDA headers to run them.

use super::{
    add, attention, convert, gather_rows,
    matmul::{batch, dense, embed, matvec, plain, products},
    one_shot, rms_norm, rope_and_store, sample,
};

/// One `.cu` file. An operation's launcher holds its source.
#[derive(Debug)]
pub struct Source {
    /// File name in `kernels/cuda`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Options (`-DNAME=VALUE …`) with which CI compiles it, a line a variant: all that launchers use, or typical ones.
    pub variants: &'static [&'static str],
}

/// Every source. A test compares the list with the folder.
pub const SOURCES: &[&Source] = &[
    &add::SOURCE,
    &one_shot::all_reduce::SOURCE,
    &attention::decode::SOURCE,
    &attention::prefill::HOPPER_SOURCE,
    &attention::prefill::SOURCE,
    &batch::HOPPER_SOURCE,
    &batch::SOURCE,
    &convert::SOURCE,
    &dense::SOURCE,
    &embed::SOURCE,
    &gather_rows::SOURCE,
    &matvec::SOURCE,
    &plain::SOURCE,
    &products::SOURCE,
    &rms_norm::SOURCE,
    &rope_and_store::SOURCE,
    &sample::SOURCE,
];

/// Shared headers, by the name that sources include.
pub const HEADERS: &[(&str, &str)] = &[
    ("activations.cuh", include_str!("../../cuda/include/activations.cuh")),
    ("attention.cuh", include_str!("../../cuda/include/attention.cuh")),
    ("batch.cuh", include_str!("../../cuda/include/batch.cuh")),
    ("cluster.cuh", include_str!("../../cuda/include/cluster.cuh")),
    ("decode_sums.cuh", include_str!("../../cuda/include/decode_sums.cuh")),
    ("decode_work.cuh", include_str!("../../cuda/include/decode_work.cuh")),
    ("gumbel.cuh", include_str!("../../cuda/include/gumbel.cuh")),
    ("half_mma.cuh", include_str!("../../cuda/include/half_mma.cuh")),
    ("kv_cache.cuh", include_str!("../../cuda/include/kv_cache.cuh")),
    ("launch.cuh", include_str!("../../cuda/include/launch.cuh")),
    ("layer.cuh", include_str!("../../cuda/include/layer.cuh")),
    ("norm.cuh", include_str!("../../cuda/include/norm.cuh")),
    ("one_shot.cuh", include_str!("../../cuda/include/one_shot.cuh")),
    ("ordered.cuh", include_str!("../../cuda/include/ordered.cuh")),
    ("plain.cuh", include_str!("../../cuda/include/plain.cuh")),
    ("prefill_work.cuh", include_str!("../../cuda/include/prefill_work.cuh")),
    ("reduce.cuh", include_str!("../../cuda/include/reduce.cuh")),
    ("rope.cuh", include_str!("../../cuda/include/rope.cuh")),
    ("tensor_core.cuh", include_str!("../../cuda/include/tensor_core.cuh")),
    ("weights.cuh", include_str!("../../cuda/include/weights.cuh")),
    ("wgmma.cuh", include_str!("../../cuda/include/wgmma.cuh")),
];
