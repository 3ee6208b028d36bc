//! A random Llama as transformers writes it, served and compared with what transformers computes in float32, fed the same
//! tokens. Ours may err as much as transformers does when it computes in 16 bits, which rounds more than we do: its
//! residual stream too. Ignored unless asked for, as torch is large; `tests/gpu.sh` runs it.

use std::{collections::HashMap, process::Command};

use lockstep_proto::v1::{GenerateRequest, TokenLogprobs};
use lockstep_tests::{
    Client, Cluster, Layout,
    client::{greedy, tokens},
    environment,
    process::finish,
};
use serde::Deserialize;
use tempfile::TempDir;

/// Writes the model and what transformers makes of it; it travels with the test to machines without the repository.
const SCRIPT: &str = include_str!("../../python/hf_llama.py");
/// Log-probabilities of a step.
const TOP: u32 = 20;

/// What `tests/python/hf_llama.py` prints.
#[derive(Deserialize)]
struct Reference {
    passages: Vec<Passage>,
    rounding: Rounding,
    device: String,
    transformers: String,
}

#[derive(Deserialize)]
struct Passage {
    ids: Vec<u32>,
    num_prompt_tokens: usize,
    top: Vec<Vec<(u32, f64)>>,
}

/// Differences of log-probabilities.
#[derive(Debug, Deserialize)]
struct Rounding {
    mean: f64,
    max: f64,
}

impl Rounding {
    fn of(differences: &[f64]) -> Self {
        let max = differences.iter().copied().fold(0.0, f64::max);
        Self { mean: differences.iter().sum::<f64>() / differences.len() as f64, max }
    }
}

async fn reference(folder: &TempDir, type_name: &str) -> Reference {
    let mut python = Command::new(environment::torch_python());
    python.arg("-").arg(folder.path()).arg(type_name);
    let ended = finish(python, SCRIPT.as_bytes()).await.unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    serde_json::from_slice(&ended.stdout).unwrap()
}

fn request(ids: &[u32], max_tokens: usize) -> GenerateRequest {
    let mut request = greedy(tokens(ids), max_tokens as u32);
    if let Some(sampling) = &mut request.sampling {
        sampling.logprobs = TOP;
    }
    request
}

/// Differences of the log-probabilities that both give.
fn differences(ours: &TokenLogprobs, theirs: &[(u32, f64)]) -> Vec<f64> {
    let ours: HashMap<u32, f64> = ours.top.iter().map(|top| (top.token_id, f64::from(top.logprob))).collect();
    theirs.iter().filter_map(|(token_id, logprob)| Some((ours.get(token_id)? - logprob).abs())).collect()
}

/// Each prefix of the continuation as a prompt, then the continuation token by token until the first other choice.
async fn compare(client: &Client, passages: &[Passage]) -> [Vec<f64>; 2] {
    let [mut prompts, mut decoded] = [const { Vec::new() }; 2];
    for Passage { ids, num_prompt_tokens, top } in passages {
        for (length, theirs) in (*num_prompt_tokens..ids.len()).zip(top) {
            let output = client.generate(request(&ids[..length], 1)).await.unwrap();
            prompts.extend(differences(&output.logprobs[0], theirs));
        }
        let output = client.generate(request(&ids[..*num_prompt_tokens], top.len())).await.unwrap();
        for (index, (ours, theirs)) in output.logprobs.iter().zip(top).enumerate() {
            decoded.extend(differences(ours, theirs));
            if output.token_ids[index] != ids[num_prompt_tokens + index] {
                break;
            }
        }
    }
    [prompts, decoded]
}

async fn check(layout: Layout, type_name: &str) {
    let folder = TempDir::new().unwrap();
    let reference = reference(&folder, type_name).await;
    let cluster = Cluster::start_with(layout, folder.path()).unwrap();
    let compared = compare(&cluster.client().await.unwrap(), &reference.passages).await;
    let theirs = &reference.rounding;
    println!(
        "{type_name}, transformers {} on {}: its own rounding {:.4} nats, at most {:.3}",
        reference.transformers, reference.device, theirs.mean, theirs.max
    );
    for (name, differences) in ["prefixes", "decoded"].into_iter().zip(compared) {
        let ours = Rounding::of(&differences);
        println!(
            "{name}: {} log-probabilities differ by {:.4} nats, at most {:.3}",
            differences.len(),
            ours.mean,
            ours.max
        );
        assert!(differences.len() > 1000, "{name}: only {} log-probabilities", differences.len());
        assert!(ours.mean <= theirs.mean && ours.max <= theirs.max, "{name}: {ours:?}, {theirs:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs torch and transformers"]
async fn the_processor_computes_as_transformers_does() {
    check(Layout::new(1, 1), "float32").await;
    check(Layout::new(2, 1), "bfloat16").await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a CUDA GPU, torch and transformers"]
async fn one_gpu_computes_as_transformers_does() {
    check(Layout::on_gpus(1, 1), "float32").await;
    check(Layout::on_gpus(1, 1), "bfloat16").await;
}
