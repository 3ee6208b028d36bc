//! Workers on the WebGPU device, here on Vulkan in software, alone and beside workers on the processor.

use lockstep_proto::v1::generate_request::Input;
use lockstep_tests::{
    Cluster, Layout, Output,
    client::{EIGHT_BITS, check_same, gap, greedy},
};

use crate::prompts::PROMPTS;

const MAX_TOKENS: u32 = 12;
/// Prompts whose continuation the model is sure of: here nothing but the processor's own tokens will do.
const SURE: [&str; 2] =
    ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,", "The letters of the alphabet are: A, B, C, D, E, F, G,"];
/// How far the best two tokens lie apart at each of those, nats: more than roundings to 8 bits can turn round.
const MARGIN: f32 = 3.0 * EIGHT_BITS;
/// Nats by which the log-probabilities of those may differ: five times what was seen at most.
const CLOSE: f32 = 0.1;
/// A prompt of few tokens, for which there are other kernels, and whose continuation is open.
const OPEN: &str = PROMPTS[0];

async fn outputs(layout: Layout) -> Vec<Output> {
    let cluster = Cluster::start(layout).unwrap();
    let client = cluster.client().await.unwrap();
    let mut outputs = Vec::new();
    for prompt in SURE.into_iter().chain([OPEN]) {
        outputs.push(client.generate(greedy(Input::Prompt(prompt.into()), MAX_TOKENS)).await.unwrap());
    }
    outputs
}

/// The largest difference of the chosen tokens' log-probabilities, nats.
fn distance(one: &Output, other: &Output) -> f32 {
    let chosen =
        |output: &Output| output.logprobs.iter().map(|it| it.chosen.clone().unwrap().logprob).collect::<Vec<_>>();
    let differences = chosen(one).into_iter().zip(chosen(other)).map(|(one, other)| (one - other).abs());
    differences.fold(0.0, f32::max)
}

/// Alone; sharing each layer unevenly with the processor (nine heads, of three groups, are no even number); and sharing the
/// layers with it, as many as each is fast.
#[tokio::test(flavor = "multi_thread")]
async fn every_layout_gives_the_tokens_of_the_processor() {
    let whole = outputs(Layout::new(1, 1)).await;
    for (prompt, output) in SURE.iter().zip(&whole) {
        let margin = output.logprobs.iter().map(gap).fold(f32::INFINITY, f32::min);
        assert!(margin > MARGIN, "the processor is not sure of {prompt:?}: {margin} nats, {:?}", output.text);
    }
    let mut problems = Vec::new();
    for (devices, tensor, pipeline) in [("vulkan:0", 1, 1), ("cpu,vulkan:0", 2, 1), ("vulkan:0,cpu", 1, 2)] {
        let cut = outputs(Layout::on(devices, tensor, pipeline)).await;
        let name = format!("{devices} TP {tensor} x PP {pipeline}");
        for (whole, cut) in whole.iter().zip(&cut).take(SURE.len()) {
            let distance = distance(whole, cut);
            println!("{name}: log-probabilities differ by {distance} nats at most");
            if whole.token_ids != cut.token_ids || distance > CLOSE {
                problems.push(format!("{name}: {:?} instead of {:?}, {distance} nats", cut.text, whole.text));
            }
        }
        if let Err(problem) = check_same(&whole[SURE.len()], &cut[SURE.len()], EIGHT_BITS) {
            problems.push(format!("{name}, {OPEN:?}: {problem}"));
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
}
