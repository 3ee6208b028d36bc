//! The whole model, served by one worker, chooses as two other implementations do when all are fed the same tokens:
//! prompts and llama.cpp's greedy continuation of them.
//! llama.cpp rounds activations as we do, in its own blocks; candle multiplies the same weights in f32, so that it stands
//! for the exact answer.

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
    Cluster, Layout,
    agreement::{self, Choice, Passage},
    environment,
    process::finish,
};
use serde_json::json;

use crate::prompts::PROMPTS;

/// Steps of each prompt.
const STEPS: usize = 50;
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
    let cluster = Cluster::start(Layout { threads: 2, ..Layout::new(1, 1) }).unwrap();
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
    let ours = agreement::choices(&client, &passages).await.unwrap();
    assert_eq!(ours.len(), 500);
    drop(cluster);
    agreement::check("llama.cpp", &ours, &llama_cpp.concat()).unwrap();
    agreement::check("candle in f32", &ours, &candle_choices(&passages)).unwrap();
}
