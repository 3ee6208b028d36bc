//! The whole model, served by one worker, chooses as two other implementations do when all are fed the same tokens:
//! prompts and llama.cpp's greedy continuation of them.
//! Two correct implementations of quantized arithmetic agree on at least 95.5 % of the steps and part only where the
//! best two tokens lie close together. llama.cpp rounds activations as we do, in its own blocks; candle multiplies the
//! same weights in f32, so that it stands for the exact answer.

use std::{
    fs::File,
    io::{BufReader, Cursor},
    process::Command,
};

use candle_core::{
    Device, Tensor,
    quantized::{
        GgmlDType, QTensor,
        gguf_file::{self, Content},
    },
};
use candle_transformers::models::quantized_llama::ModelWeights;
use lockstep_tests::{
    Client, Cluster, Layout,
    client::{gap, greedy, tokens},
    environment,
    process::finish,
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

/// Compares step by step; a parting counts with the larger of the two gaps.
fn check_agreement(name: &str, ours: &[Choice], theirs: &[Choice]) {
    assert_eq!(ours.len(), theirs.len());
    let partings: Vec<usize> = (0..ours.len()).filter(|&step| ours[step].token_id != theirs[step].token_id).collect();
    let agreement = 1.0 - partings.len() as f64 / ours.len() as f64;
    let largest = partings.iter().map(|&step| ours[step].gap.max(theirs[step].gap)).fold(0.0, f32::max);
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
async fn llama_cpp_choices(prompts: &[Vec<u32>]) -> Vec<Vec<Choice>> {
    let mut python = Command::new(environment::python().unwrap());
    python.arg(environment::repository().join("tests/python/llama_cpp.py"));
    let task = json!({ "model": environment::model().unwrap(), "prompts": prompts, "steps": STEPS });
    let ended = finish(python, task.to_string().as_bytes()).await.unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let choices: Vec<Vec<(u32, f32)>> = serde_json::from_slice(&ended.stdout).unwrap();
    let choice = |(token_id, gap)| Choice { token_id, gap };
    choices.into_iter().map(|steps| steps.into_iter().map(choice).collect()).collect()
}

/// The model's file with every tensor dequantized; candle rounds the activations that meet quantized weights.
fn dequantized_file() -> Cursor<Vec<u8>> {
    let mut file = BufReader::new(File::open(environment::model().unwrap()).unwrap());
    let content = Content::read(&mut file).unwrap();
    let tensors: Vec<(&String, QTensor)> = content
        .tensor_infos
        .keys()
        .map(|name| {
            let values = content.tensor(&mut file, name, &Device::Cpu).unwrap().dequantize(&Device::Cpu).unwrap();
            (name, QTensor::quantize(&values, GgmlDType::F32).unwrap())
        })
        .collect();
    let metadata: Vec<_> = content.metadata.iter().map(|(name, value)| (name.as_str(), value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut dequantized = Cursor::new(Vec::new());
    gguf_file::write(&mut dequantized, &metadata, &tensors).unwrap();
    dequantized.set_position(0);
    dequantized
}

fn candle_choices(passages: &[Passage]) -> Vec<Choice> {
    let mut file = dequantized_file();
    let content = Content::read(&mut file).unwrap();
    let device = Device::Cpu;
    let mut model = ModelWeights::from_gguf(content, &mut file, &device).unwrap();
    drop(file);
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
    let llama_cpp = llama_cpp_choices(&prompts).await;
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
    check_agreement("llama.cpp", &ours, &llama_cpp.concat());
    check_agreement("candle in f32", &ours, &candle_choices(&passages));
}
