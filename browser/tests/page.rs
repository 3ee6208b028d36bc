//! The page `/browser` in a headless Chromium: what its GPU, there software, computes of a real model is what the processor
//! computes.
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

use std::process::Command;

use lockstep_browser::Session;
use lockstep_executor::{ExecutorError, Logits};
use lockstep_kernels::{Device, cpu::CpuDevice};
use lockstep_model::{ChatMessage, ChatTemplate, Checkpoint, Tokenizer};
use lockstep_tests::{Cluster, Layout, environment, process::finish};

/// With its template more tokens than the kernels for few take.
const MESSAGE: &str = "What is the capital of France?";
/// Tokens after it whose logits are compared.
const NUM_TOKENS: usize = 3;
/// Fewer than those take.
const PROMPT: &str = "The capital of France is";
/// Tokens after it that the page must write as the processor does.
const ANSWER_TOKENS: usize = 4;
/// Root mean square of the differences of a step's logits, relative to their deviation. Both devices round activations to
/// 8 bits for each block of 32; sums that round differently flip some of these, which grows from layer to layer: devices,
/// and ways to cut the prompt, parted by 0.03 to 0.24. Logits of something else part by 1.4.
const TOLERANCE: f64 = 0.35;

/// What the processor computes.
struct Reference {
    session: Session<CpuDevice>,
    rows: Vec<Vec<f32>>,
    /// The most probable token after each row.
    tokens: Vec<u32>,
}

impl Reference {
    fn new(checkpoint: &Checkpoint) -> Self {
        let session = Session::load(CpuDevice::new(2).unwrap(), checkpoint, 64, &|_, _| {}).unwrap();
        Self { session, rows: Vec::new(), tokens: Vec::new() }
    }

    /// Computes the prompt, and so many tokens after it.
    fn run(mut self, prompt: Vec<u32>, num_tokens: usize) -> Self {
        let mut step = prompt;
        for _ in 0..num_tokens {
            let row = |device: &mut CpuDevice, logits: Logits<'_, CpuDevice>| {
                device.with_host(1, logits.values, |values| Ok::<_, ExecutorError>(values.to_vec()))
            };
            let row = self.session.advance(&step, row).unwrap();
            let best = row.iter().enumerate().max_by(|one, other| one.1.total_cmp(other.1)).unwrap().0 as u32;
            self.rows.push(row);
            self.tokens.push(best);
            step = vec![best];
        }
        self
    }
}

/// Tokens of a chat's first message, as the page makes them.
fn chat_tokens(checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Vec<u32> {
    let template = ChatTemplate::new(checkpoint.chat_template().unwrap(), "", "").unwrap();
    let message = ChatMessage { role: "user".to_owned(), content: MESSAGE.to_owned() };
    tokenizer.encode(&template.render(&[message]).unwrap(), false).unwrap()
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
    let checkpoint = Checkpoint::open(&model).unwrap();
    let tokenizer = checkpoint.tokenizer().unwrap();
    let Reference { rows, tokens, .. } =
        Reference::new(&checkpoint).run(chat_tokens(&checkpoint, &tokenizer), NUM_TOKENS + 1);
    let answer = Reference::new(&checkpoint).run(tokenizer.encode(PROMPT, true).unwrap(), ANSWER_TOKENS).tokens;
    let answer = tokenizer.decode(&answer).unwrap();
    let argument = format!("--browser-dir={}", environment::page().unwrap().display());
    let cluster = Cluster::start_with_arguments(Layout::new(1, 1), &model, &[&argument]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("logits");
    let mut python = Command::new(environment::python().unwrap());
    python.arg(environment::repository().join("tests/python/browser_page.py"));
    python.arg(format!("http://{}", cluster.http())).arg(environment::browser().unwrap()).arg(MESSAGE);
    let tokens: Vec<String> = tokens[..NUM_TOKENS].iter().map(u32::to_string).collect();
    python.arg(tokens.join(",")).arg(&file).args([PROMPT, &answer]);
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
