//! The whole model, served by one worker, chooses as two other implementations do when all are fed the same tokens:
//! prompts and llama.cpp's greedy continuation of them.
//! Two correct implementations of quantized arithmetic agree on at least 95.5 % of the steps and part only where the
//! best two tokens lie close together.

use std::{
    fs::File,
    io::{BufReader, Write},
    process::{Command, Stdio},
};

use candle_core::{Device, Tensor, quantized::gguf_file::Content};
use candle_transformers::models::quantized_llama::ModelWeights;
use lockstep_tests::{
    Client, Cluster, Layout,
    client::{gap, greedy, tokens},
    environment,
};
use serde_json::json;

use crate::prompts::PROMPTS;

/// Steps of each prompt.
const STEPS: usize = 50;
/// Least share of steps that agree.
const AGREEMENT: f64 = 0.955;
/// No parting where the best two lie so many nats apart.
const LARGEST_GAP: f32 = 0.6;

/// The greedy choice after a prefix, and how far the second best is behind it, nats.
#[derive(Clone, Copy, Debug)]
struct Choice {
    token_id: u32,
    gap: f32,
}

/// Compares step by step; a parting counts with the larger of the two gaps, unless the `witness` chose as we did:
/// then the peer parts from another implementation too, and the gap says nothing of us.
fn check_agreement(name: &str, ours: &[Choice], theirs: &[Choice], witness: Option<&[Choice]>) {
    assert_eq!(ours.len(), theirs.len());
    let partings: Vec<usize> = (0..ours.len()).filter(|&step| ours[step].token_id != theirs[step].token_id).collect();
    let agreement = 1.0 - partings.len() as f64 / ours.len() as f64;
    let largest = partings
        .iter()
        .filter(|&&step| witness.is_none_or(|witness| witness[step].token_id != ours[step].token_id))
        .map(|&step| ours[step].gap.max(theirs[step].gap))
        .fold(0.0, f32::max);
    println!("{name}: {:.1} % of {} steps agree, largest gap at a parting {largest:.3}", agreement * 100.0, ours.len());
    assert!(agreement >= AGREEMENT, "{name}: only {:.1} % of {} steps agree", agreement * 100.0, ours.len());
    assert!(largest < LARGEST_GAP, "{name}: parts at a gap of {largest} nats");
}

/// A prompt with its continuation; the choices of the last [`STEPS`] prefixes are compared.
struct Passage {
    ids: Vec<u32>,
    num_prompt_tokens: usize,
}

impl Passage {
    /// Lengths of the prefixes after which a choice is compared.
    fn lengths(&self) -> std::ops::Range<usize> {
        self.num_prompt_tokens..self.ids.len()
    }
}

/// Every prefix as a request of its own, those of a passage at once.
async fn our_choices(client: &Client, passages: &[Passage]) -> Vec<Choice> {
    let mut choices = Vec::new();
    for passage in passages {
        let steps: Vec<_> = passage
            .lengths()
            .map(|length| {
                let (client, request) = (client.clone(), greedy(tokens(&passage.ids[..length]), 1));
                tokio::spawn(async move { client.generate(request).await })
            })
            .collect();
        for step in steps {
            let output = step.await.unwrap().unwrap();
            choices.push(Choice { token_id: output.token_ids[0], gap: gap(&output.logprobs[0]) });
        }
    }
    choices
}

/// Greedy choices of each prompt's continuation.
fn llama_cpp_choices(prompts: &[Vec<u32>]) -> Vec<Vec<Choice>> {
    let script = environment::repository().join("tests/python/llama_cpp.py");
    let mut python = Command::new(environment::python().unwrap())
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let task = json!({ "model": environment::model().unwrap(), "prompts": prompts, "steps": STEPS });
    python.stdin.take().unwrap().write_all(task.to_string().as_bytes()).unwrap();
    let ended = python.wait_with_output().unwrap();
    assert!(ended.status.success(), "llama.cpp failed");
    let choices: Vec<Vec<(u32, f32)>> = serde_json::from_slice(&ended.stdout).unwrap();
    let choice = |(token_id, gap)| Choice { token_id, gap };
    choices.into_iter().map(|steps| steps.into_iter().map(choice).collect()).collect()
}

fn candle_choices(passages: &[Passage]) -> Vec<Choice> {
    let mut file = BufReader::new(File::open(environment::model().unwrap()).unwrap());
    let content = Content::read(&mut file).unwrap();
    let device = Device::Cpu;
    let mut model = ModelWeights::from_gguf(content, &mut file, &device).unwrap();
    let mut choices = Vec::new();
    for passage in passages {
        let mut done = 0;
        for length in passage.lengths() {
            let input = Tensor::new(&passage.ids[done..length], &device).unwrap().unsqueeze(0).unwrap();
            let logits: Vec<f32> = model.forward(&input, done).unwrap().squeeze(0).unwrap().to_vec1().unwrap();
            done = length;
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            order.select_nth_unstable_by(1, |a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            // The two largest are in front, the second of them at index 1.
            let (best, second) = (order[0], order[1]);
            choices.push(Choice { token_id: best, gap: logits[best as usize] - logits[second as usize] });
        }
    }
    choices
}

#[tokio::test(flavor = "multi_thread")]
async fn whole_model_agrees_with_llama_cpp_and_candle() {
    let cluster = Cluster::start(Layout { tensor: 1, pipeline: 1, threads: 2 }).unwrap();
    let client = cluster.client().await.unwrap();
    let mut prompts = Vec::new();
    for prompt in PROMPTS {
        prompts.push(client.tokenize(prompt).await.unwrap());
    }
    let llama_cpp = llama_cpp_choices(&prompts);
    let passages: Vec<Passage> = prompts
        .into_iter()
        .zip(&llama_cpp)
        .map(|(mut ids, choices)| {
            let num_prompt_tokens = ids.len();
            ids.extend(choices.iter().map(|choice| choice.token_id));
            Passage { ids, num_prompt_tokens }
        })
        .collect();
    let ours = our_choices(&client, &passages).await;
    assert_eq!(ours.len(), 500);
    drop(cluster);
    let llama_cpp = llama_cpp.concat();
    check_agreement("llama.cpp", &ours, &llama_cpp, None);
    check_agreement("candle", &ours, &candle_choices(&passages), Some(&llama_cpp));
}
