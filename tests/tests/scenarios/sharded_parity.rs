//! Every cut of the model gives the same greedy tokens as the whole model.

use lockstep_proto::v1::generate_request::Input;
use lockstep_tests::{
    Cluster, Layout, Output,
    client::{check_same, greedy},
};

use crate::prompts::PROMPTS;

/// Nats below which two layouts may choose differently: sums that are taken in f64 in another order round differently
/// now and then.
const ROUNDING: f32 = 0.02;
const MAX_TOKENS: u32 = 40;

async fn outputs(layout: Layout) -> Vec<Output> {
    let cluster = Cluster::start(layout).unwrap();
    let client = cluster.client().await.unwrap();
    let mut outputs = Vec::new();
    for prompt in PROMPTS {
        outputs.push(client.generate(greedy(Input::Prompt(prompt.into()), MAX_TOKENS)).await.unwrap());
    }
    outputs
}

#[tokio::test(flavor = "multi_thread")]
async fn every_layout_gives_the_tokens_of_one_rank() {
    let whole = outputs(Layout::new(1, 1)).await;
    let mut problems = Vec::new();
    for (tensor, pipeline) in [(2, 1), (3, 1), (1, 2), (2, 2)] {
        let cut = outputs(Layout::new(tensor, pipeline)).await;
        for ((prompt, whole), cut) in PROMPTS.iter().zip(&whole).zip(&cut) {
            if let Err(problem) = check_same(whole, cut, ROUNDING) {
                problems.push(format!("TP {tensor} x PP {pipeline}, {prompt:?}: {problem}"));
            }
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
}
