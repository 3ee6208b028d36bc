//! The page `/browser` in a headless Chromium: what its GPU, there software, computes of a real model is what the processor
//! computes.
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

use std::{path::Path, process::Command};

use lockstep_browser::Session;
use lockstep_executor::{ExecutorError, Logits};
use lockstep_kernels::{Device, cpu::CpuDevice};
use lockstep_model::Checkpoint;
use lockstep_tests::{Cluster, Layout, environment, process::finish};

/// Few tokens: SwiftShader takes seconds for each, and a minute for a tile of many on a machine that is busy.
const TEXT: &str = "The capital of France is";
/// Tokens after it.
const NUM_TOKENS: usize = 4;
/// Root mean square of the differences of a step's logits, relative to their deviation. Both devices round activations to
/// 8 bits for each block of 32; sums that round differently flip some of these, which grows from layer to layer: devices,
/// and ways to cut the prompt, parted by 0.03 to 0.24. Logits of something else part by 1.4.
const TOLERANCE: f64 = 0.35;

/// Logits of the processor after the text, and after each of the tokens that they make most probable but the last; these
/// tokens, and their text.
fn expected(model: &Path) -> (Vec<Vec<f32>>, Vec<u32>, String) {
    let checkpoint = Checkpoint::open(model).unwrap();
    let tokenizer = checkpoint.tokenizer().unwrap();
    let mut session = Session::load(CpuDevice::new(2).unwrap(), &checkpoint, 64, &|_, _| {}).unwrap();
    let mut step = tokenizer.encode(TEXT, true).unwrap();
    let (mut rows, mut tokens) = (Vec::new(), Vec::new());
    for _ in 0..NUM_TOKENS {
        let row = |device: &mut CpuDevice, logits: Logits<'_, CpuDevice>| {
            device.with_host(1, logits.values, |values| Ok::<_, ExecutorError>(values.to_vec()))
        };
        let row = session.advance(&step, row).unwrap();
        let best = row.iter().enumerate().max_by(|one, other| one.1.total_cmp(other.1)).unwrap().0 as u32;
        rows.push(row);
        tokens.push(best);
        step = vec![best];
    }
    let text = tokenizer.decode(&tokens).unwrap();
    (rows, tokens, text)
}

/// Root mean square of the differences, relative to the deviation of the first row.
fn difference(expected: &[f32], got: &[f32]) -> f64 {
    let mean = expected.iter().map(|value| f64::from(*value)).sum::<f64>() / expected.len() as f64;
    let sum = |term: &dyn Fn(f64, f64) -> f64| {
        expected.iter().zip(got).map(|(want, got)| term(f64::from(*want), f64::from(*got)).powi(2)).sum::<f64>()
    };
    (sum(&|want, got| want - got) / sum(&|want, _| want - mean)).sqrt()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_computes_what_the_processor_does() {
    let model = environment::model().unwrap();
    let (rows, tokens, answer) = expected(&model);
    let argument = format!("--browser-dir={}", environment::page().unwrap().display());
    let cluster = Cluster::start_with_arguments(Layout::new(1, 1), &model, &[&argument]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("logits");
    let mut python = Command::new(environment::python().unwrap());
    python.arg(environment::repository().join("tests/python/browser_page.py"));
    python.arg(format!("http://{}", cluster.http())).arg(environment::browser().unwrap()).arg(TEXT);
    let tokens: Vec<String> = tokens[..NUM_TOKENS - 1].iter().map(u32::to_string).collect();
    python.arg(tokens.join(",")).arg(&file).arg(answer);
    let ended = finish(python, &[]).await.unwrap();
    let (seen, errors) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    println!("{seen}");
    assert!(ended.status.success(), "{seen}{errors}");
    let bytes = std::fs::read(&file).unwrap();
    let got: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|bits| f32::from_le_bytes(*bits)).collect();
    assert_eq!(got.len(), rows.iter().map(Vec::len).sum::<usize>());
    for (row, got) in rows.iter().zip(got.chunks_exact(rows[0].len())) {
        let difference = difference(row, got);
        println!("logits part by {difference:.3} deviations");
        assert!(difference <= TOLERANCE, "{difference}");
    }
}
