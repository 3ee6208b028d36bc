//! The whole model on GPUs, as users run it. Ignored unless asked for; then they fail where there is no GPU.
//! `tests/gpu.sh` runs them on a machine that has some.

use lockstep_proto::v1::generate_request::Input;
use lockstep_tests::{
    Client, Cluster, Layout, Output,
    agreement::{self, Choice, LARGEST_GAP, Passage},
    client::{check_same, gap, greedy},
};

use crate::prompts::PROMPTS;

/// Greedy tokens of each prompt.
const STEPS: u32 = 50;
/// Nats below which GPUs that share the layers may choose differently than one alone: their sums round differently.
const ROUNDING: f32 = 0.05;

async fn greedy_outputs(client: &Client) -> Vec<Output> {
    let mut outputs = Vec::new();
    for prompt in PROMPTS {
        outputs.push(client.generate(greedy(Input::Prompt(prompt.into()), STEPS)).await.unwrap());
    }
    outputs
}

/// What a cluster answered, as choices, and the same tokens as passages for another.
async fn reference(client: &Client, outputs: &[Output]) -> (Vec<Choice>, Vec<Passage>) {
    let (mut choices, mut passages) = (Vec::new(), Vec::new());
    for (prompt, output) in PROMPTS.iter().zip(outputs) {
        let mut ids = client.tokenize(prompt).await.unwrap();
        let num_prompt_tokens = ids.len();
        ids.extend(&output.token_ids);
        passages.push(Passage { ids, num_prompt_tokens });
        let steps = output.token_ids.iter().zip(&output.logprobs);
        choices.extend(steps.map(|(token_id, logprobs)| Choice { token_id: *token_id, gap: gap(logprobs) }));
    }
    (choices, passages)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a CUDA GPU"]
async fn one_gpu_chooses_as_the_processor_does() {
    let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (on_cpu, (theirs, passages)) = {
        let cluster = Cluster::start(Layout { threads: num_cores, ..Layout::new(1, 1) }).unwrap();
        let client = cluster.client().await.unwrap();
        let outputs = greedy_outputs(&client).await;
        let reference = reference(&client, &outputs).await;
        (outputs, reference)
    };
    let cluster = Cluster::start(Layout::on_gpus(1, 1)).unwrap();
    let client = cluster.client().await.unwrap();
    let ours = agreement::choices(&client, &passages).await.unwrap();
    assert_eq!(ours.len(), 500);
    agreement::check("a GPU, every prefix as a prompt", &ours, &theirs).unwrap();
    // Decode steps see their own tokens, so they are comparable up to the first parting.
    for ((prompt, on_cpu), on_gpu) in PROMPTS.iter().zip(&on_cpu).zip(greedy_outputs(&client).await) {
        check_same(on_cpu, &on_gpu, LARGEST_GAP).unwrap_or_else(|problem| panic!("{prompt:?}: {problem}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a CUDA GPU"]
async fn a_sequence_alone_and_in_a_batch_part_only_where_the_best_two_are_close() {
    let cluster = Cluster::start(Layout::on_gpus(1, 1)).unwrap();
    let client = cluster.client().await.unwrap();
    let alone = greedy_outputs(&client).await;
    let together: Vec<_> = PROMPTS
        .iter()
        .map(|prompt| {
            let (client, request) = (client.clone(), greedy(Input::Prompt((*prompt).into()), STEPS));
            tokio::spawn(async move { client.generate(request).await })
        })
        .collect();
    for ((prompt, alone), together) in PROMPTS.iter().zip(&alone).zip(together) {
        let together = together.await.unwrap().unwrap();
        // Batches round activations to 16 bits, few tokens to 8.
        check_same(alone, &together, LARGEST_GAP).unwrap_or_else(|problem| panic!("{prompt:?}: {problem}"));
    }
}

/// Every cut of the model against one GPU.
async fn check_cut(tensor: usize, pipeline: usize) {
    let whole = {
        let cluster = Cluster::start(Layout::on_gpus(1, 1)).unwrap();
        greedy_outputs(&cluster.client().await.unwrap()).await
    };
    let cluster = Cluster::start(Layout::on_gpus(tensor, pipeline)).unwrap();
    let cut = greedy_outputs(&cluster.client().await.unwrap()).await;
    for ((prompt, whole), cut) in PROMPTS.iter().zip(&whole).zip(&cut) {
        check_same(whole, cut, ROUNDING).unwrap_or_else(|problem| panic!("{prompt:?}: {problem}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs 2 CUDA GPUs"]
async fn two_gpus_give_the_tokens_of_one() {
    check_cut(2, 1).await;
    check_cut(1, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs 4 CUDA GPUs"]
async fn four_gpus_give_the_tokens_of_one() {
    check_cut(4, 1).await;
}
