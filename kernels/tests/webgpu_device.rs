//! Whole forward steps of the WebGPU device against the oracles, and what a step costs.
#![cfg(feature = "webgpu")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod adapter;
mod blocks;
mod steps;

use lockstep_formats::Dtype;
use lockstep_kernels::{
    kernel_cache::KernelCache,
    webgpu::gpu::{GpuOptions, Matrices},
};
use steps::{EIGHT_BIT_TOLERANCE, LAYERS, MAX_TOKENS, Model, batch, compare};

fn exact() -> GpuOptions {
    GpuOptions { matrices: Matrices::None, ..GpuOptions::default() }
}

#[test]
fn steps_agree_with_the_oracles() {
    // Without both as in a browser.
    for (dtype, has_both) in [(Dtype::F32, true), (Dtype::F16, true), (Dtype::Bf16, true), (Dtype::F16, false)] {
        let device = adapter::open_with(GpuOptions { use_subgroups: has_both, use_immediates: has_both, ..exact() });
        compare(device, usize::MAX, false, dtype, |_| EIGHT_BIT_TOLERANCE);
    }
}

#[test]
fn steps_of_ranks_that_meet_on_the_host_agree_with_the_oracles() {
    compare(adapter::open_with(exact()), usize::MAX, true, Dtype::F16, |_| EIGHT_BIT_TOLERANCE);
}

/// One submission, and nothing read back but the candidates: of a decode step seven dispatches a layer (norm, QKV, attention
/// with rotation and store, its output, norm, gate and up with their blocks, down), and the embedding, the sampled rows, their norm,
/// the head and the sampler.
/// A long step is two, so that the GPU begins while the host describes the rest.
#[test]
fn a_decode_step_is_one_submission_or_two() {
    for (head_start, num_submissions) in [(GpuOptions::default().head_start, 1), (8, 2)] {
        let device = adapter::open_with(GpuOptions { head_start, ..exact() });
        let mut model = Model::new(device, false, Dtype::F16);
        let tables: Vec<Vec<u32>> = vec![(0..10).collect()];
        model.step(&batch(&[((0..9).collect(), 0)], &tables));
        model.step(&batch(&[(vec![5], 9)], &tables));
        let before = model.device.commands().counts();
        model.step(&batch(&[(vec![6], 10)], &tables));
        let after = model.device.commands().counts();
        assert_eq!((after.0 - before.0, after.1 - before.1), (num_submissions, (7 * LAYERS + 5) as u64));
    }
}

/// What changes from step to step is in the inputs alone: a step whose lists were encoded before it came gives what the same
/// step gave when it was new, be it begun early, and after a step that failed.
#[test]
fn a_prepared_step_gives_the_bits_of_a_new_one() {
    let tables: Vec<Vec<u32>> = vec![(0..10).collect()];
    let run = |order: &[u32], use_immediates: bool, head_start: usize| {
        let device = adapter::open_with(GpuOptions { use_immediates, head_start, ..exact() });
        let mut model = Model::new(device, false, Dtype::F16);
        model.step(&batch(&[((0..9).collect(), 0)], &tables));
        let mut last = Vec::new();
        for (index, token) in order.iter().enumerate() {
            if index == 3 {
                // After all layers it asks for a row that there is not.
                let mut failing = batch(&[(vec![1], 9)], &tables);
                failing.sampled_rows = vec![MAX_TOKENS as u32];
                model.run(&failing, false).unwrap_err();
            }
            last = model.step(&batch(&[(vec![*token], 9)], &tables));
        }
        last
    };
    let expected = run(&[3], true, usize::MAX);
    for (use_immediates, head_start) in [(true, usize::MAX), (false, usize::MAX), (true, 8), (false, 8)] {
        let got = run(&[5, 6, 7, 8, 9, 3], use_immediates, head_start);
        assert_eq!(got, expected, "immediates {use_immediates}, head start {head_start}");
    }
}

/// Pipelines are kept on disk where the adapter lets them be, by several starts at the same time; what is damaged there is
/// made again.
#[test]
fn pipelines_are_kept_whatever_happens_to_their_file() {
    let folder = tempfile::tempdir().unwrap();
    let step = || {
        let device = adapter::open_with(exact());
        device.gpu().use_cache(KernelCache::new(Some(folder.path().to_owned())));
        let mut model = Model::new(device, false, Dtype::F16);
        let tables: Vec<Vec<u32>> = vec![(0..10).collect()];
        model.run(&batch(&[((0..9).collect(), 0)], &tables), true).unwrap();
        model.step(&batch(&[((0..9).collect(), 0)], &tables))
    };
    let files = || -> Vec<_> { std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect() };
    let first = step();
    let kept = files();
    assert!(kept.len() == 1 && kept[0].extension().unwrap() == "pipelines", "{kept:?}");
    std::thread::scope(|scope| {
        let both = [0; 2].map(|_| scope.spawn(step));
        for thread in both {
            assert_eq!(thread.join().unwrap(), first);
        }
    });
    std::fs::write(&kept[0], b"damaged").unwrap();
    assert_eq!(step(), first);
    assert_eq!(files(), kept);
    assert!(std::fs::metadata(&kept[0]).unwrap().len() > 32);
}

#[test]
fn a_rehearsal_computes_nothing() {
    let mut model = Model::new(adapter::open_with(exact()), false, Dtype::F16);
    let tables: Vec<Vec<u32>> = vec![(0..10).collect()];
    let before = model.device.commands().counts();
    model.run(&batch(&[((0..9).collect(), 0)], &tables), true).unwrap();
    assert_eq!(model.device.commands().counts(), before);
    assert!(model.hidden_rows(9).iter().all(|value| *value == 0.0));
}
