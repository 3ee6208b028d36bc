//! Sums over the GPUs of this machine, in microseconds an operation inside a recorded graph; and the sum, the residual
//! and the norm of a layer in one kernel beside two.
//! Run: `cargo bench -p lockstep-kernels --features cuda --bench cuda_all_reduce` on a machine with two or more GPUs;
//! without any it fails, with one it says that nothing was measured.

#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a benchmark reports")]

#[path = "../tests/group/mod.rs"]
mod group;

use std::sync::Arc;

use group::Member;
use lockstep_kernels::{
    KernelError,
    cuda::{
        Activations, DeviceBuffer, Forms, Graph, probe,
        rms_norm::{RmsNorm, RmsNormCall, RowShape},
    },
};

const NUM_OPERATIONS: usize = 64;
const REPEATS: usize = 15;

/// Microseconds of an operation on this rank: the median over replays of a graph of many.
fn measure(member: &Member<'_>, launch: impl Fn() -> Result<(), KernelError>) -> f32 {
    launch().unwrap();
    let graph = Graph::record(&member.gpu, || (0..NUM_OPERATIONS).try_for_each(|_| launch())).unwrap();
    graph.replay().unwrap();
    let mut times: Vec<f32> = (0..REPEATS)
        .map(|_| {
            member.gpu.synchronize().unwrap();
            member.meeting.wait();
            // The first replay brings the ranks together, the second one is measured.
            graph.replay().unwrap();
            member.gpu.elapsed_ms(|| graph.replay()).unwrap()
        })
        .collect();
    times.sort_by(f32::total_cmp);
    times[REPEATS / 2] * 1e3 / NUM_OPERATIONS as f32
}

fn sums(member: &Member<'_>) {
    let ranks = &member.ranks;
    for kibibytes in [8_usize, 16, 32, 64, 128, 256, 512, 1024, 2048] {
        let len = kibibytes << 8;
        let values = DeviceBuffer::zeroed(&member.gpu, len * 4).unwrap();
        if len <= ranks.max_len() {
            let microseconds = measure(member, || ranks.all_reduce(len, &values));
            member.print(&format!("sum of {}: {kibibytes} KiB: {microseconds:.2} us", ranks.world_size()));
        }
    }
}

fn norms(member: &Member<'_>) {
    let (ranks, rms_norm) = (&member.ranks, RmsNorm::new(&member.gpu));
    for (width, num_tokens) in [(4096, 1), (8192, 1), (4096, 8), (8192, 4), (8192, 8), (4096, 16)] {
        let zeroed = |len: usize| Arc::new(DeviceBuffer::zeroed(&member.gpu, len * 4).unwrap());
        let forms = Forms { tiles: num_tokens <= 2, halves: None, values: true };
        let (input, weight) = (zeroed(num_tokens * width), zeroed(width));
        let output = Activations::zeroed(&member.gpu, num_tokens, width, forms).unwrap();
        let norm = RmsNormCall { num_tokens, input, weight, epsilon: 1e-5, output };
        let norm_alone = measure(member, || rms_norm.launch(&norm));
        let separate = measure(member, || {
            ranks.all_reduce(num_tokens * width, &norm.input)?;
            rms_norm.launch(&norm)
        });
        let mut line = format!(
            "sum and norm of {}: {num_tokens} x {width}: {separate:.2} us separate (norm alone {norm_alone:.2})",
            ranks.world_size()
        );
        for cluster in [1, 2, 4, 8] {
            let shape = RowShape::new(&member.gpu, width, cluster).unwrap();
            let fused = measure(member, || ranks.all_reduce_norm_in(shape, &norm));
            let alone = measure(member, || rms_norm.launch_in(shape, &norm));
            line += &format!(", {fused:.2} us in clusters of {cluster} (norm alone {alone:.2})");
        }
        member.print(&line);
    }
}

fn main() {
    let num_gpus = probe::num_devices().unwrap();
    if num_gpus < 2 {
        println!("not measured: it takes two GPUs, {num_gpus} is here");
    }
    for world_size in [2, 4, 8].into_iter().filter(|world_size| *world_size <= num_gpus) {
        group::run(world_size, |member| {
            sums(&member);
            norms(&member);
        });
    }
}
