//! Workers on the WebGPU device, here on Vulkan in software, alone and beside workers on the processor.

use lockstep_proto::v1::generate_request::Input;
use lockstep_tests::{
    Cluster, Layout, Output,
    client::{check_same, greedy},
};

use crate::prompts::PROMPTS;

/// Nats below which two kinds of devices may choose differently: their sums round differently.
const ROUNDING: f32 = 0.05;
const MAX_TOKENS: u32 = 12;
/// A prompt that takes few tokens, and one that takes more than the kernels for few.
const NUM_PROMPTS: usize = 2;

async fn outputs(layout: Layout) -> Vec<Output> {
    let cluster = Cluster::start(layout).unwrap();
    let client = cluster.client().await.unwrap();
    let mut outputs = Vec::new();
    for prompt in &PROMPTS[..NUM_PROMPTS] {
        outputs.push(client.generate(greedy(Input::Prompt((*prompt).into()), MAX_TOKENS)).await.unwrap());
    }
    outputs
}

/// Alone; sharing each layer unevenly with the processor (nine heads, of three groups, are no even number); and sharing the
/// layers with it, as many as each is fast.
#[tokio::test(flavor = "multi_thread")]
async fn every_layout_gives_the_tokens_of_the_processor() {
    let whole = outputs(Layout::new(1, 1)).await;
    let mut problems = Vec::new();
    for (devices, tensor, pipeline) in [("vulkan:0", 1, 1), ("cpu,vulkan:0", 2, 1), ("vulkan:0,cpu", 1, 2)] {
        let cut = outputs(Layout::on(devices, tensor, pipeline)).await;
        for ((prompt, whole), cut) in PROMPTS.iter().zip(&whole).zip(&cut) {
            if let Err(problem) = check_same(whole, cut, ROUNDING) {
                problems.push(format!("{devices} TP {tensor} x PP {pipeline}, {prompt:?}: {problem}"));
            }
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
}
