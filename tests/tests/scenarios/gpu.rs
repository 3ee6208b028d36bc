//! The whole model on GPUs, as users run it. Ignored unless asked for; then they fail where there is no GPU.
//! `tests/gpu.sh` runs them on a machine that has some.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use lockstep_proto::v1::generate_request::Input;
use lockstep_tests::{
    Client, Cluster, Layout, Output,
    agreement::{self, Choice, LARGEST_GAP, Passage},
    client::{EIGHT_BITS, check_same, gap, greedy, parting, read_to_end, tokens},
    process::PATIENCE,
};

use crate::prompts::PROMPTS;

/// Greedy tokens of each prompt.
const STEPS: u32 = 50;
/// Sequences that decode while prompts come and outputs end: four for each of two stages.
const COMPANIONS: u32 = 8;
/// Nats below which GPUs that share the layers may choose differently than one alone, in batches: their sums round
/// differently.
const ROUNDING: f32 = 0.05;
/// Longest time from the loss of a worker until the coordinator knows.
const LOSS: Duration = Duration::from_secs(2);
/// Messages of a stream that goes on: more than can have been under way when a worker was lost.
const GONE_ON: usize = 400;
/// The signal that ends a process at once.
const KILL: &str = "-9";

async fn greedy_outputs(client: &Client) -> Vec<Output> {
    let mut outputs = Vec::new();
    for prompt in PROMPTS {
        outputs.push(client.generate(greedy(Input::Prompt(prompt.into()), STEPS)).await.unwrap());
    }
    outputs
}

/// The same with all prompts at once and [`COMPANIONS`] beside them, so that every step of every stage takes and samples
/// more tokens than those few that are multiplied with 8-bit activations, whichever requests come first and end last.
async fn greedy_outputs_together(client: &Client) -> Vec<Output> {
    let mut companions = Vec::new();
    for token_id in 0..COMPANIONS {
        let mut stream = client.start(greedy(tokens(&[504, 3575, token_id]), 4000)).await.unwrap();
        stream.message().await.unwrap().unwrap();
        // Nobody's sequence goes on while he does not read.
        companions.push(tokio::spawn(read_to_end(stream)));
    }
    let requests = PROMPTS.map(|prompt| {
        let (client, request) = (client.clone(), greedy(Input::Prompt(prompt.into()), STEPS));
        tokio::spawn(async move { client.generate(request).await })
    });
    let mut outputs = Vec::new();
    for request in requests {
        outputs.push(request.await.unwrap().unwrap());
    }
    assert!(companions.iter().all(|companion| !companion.is_finished()), "a companion ended first");
    companions.iter().for_each(tokio::task::JoinHandle::abort);
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

/// Runs one on GPUs, and makes sure that they meet without the host if there are several.
async fn start(layout: Layout) -> (Cluster, Client) {
    let cluster = Cluster::start(layout).unwrap();
    let client = cluster.client().await.unwrap();
    assert!(!cluster.log().contains("GPUs do not meet"), "{}", cluster.log());
    (cluster, client)
}

/// Teacher-forced against the processor, then in decode steps.
async fn check_against_processor(tensor: usize) {
    let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (on_cpu, (theirs, passages)) = {
        let cluster = Cluster::start(Layout { threads: num_cores, ..Layout::new(1, 1) }).unwrap();
        let client = cluster.client().await.unwrap();
        let outputs = greedy_outputs(&client).await;
        let reference = reference(&client, &outputs).await;
        (outputs, reference)
    };
    let (_cluster, client) = start(Layout::on_gpus(tensor, 1)).await;
    let ours = agreement::choices(&client, &passages).await.unwrap();
    assert_eq!(ours.len(), 500);
    agreement::check(&format!("{tensor} GPUs, every prefix as a prompt"), &ours, &theirs).unwrap();
    // Decode steps see their own tokens, so they are comparable up to the first parting.
    check_all("decode steps", &on_cpu, &greedy_outputs(&client).await, LARGEST_GAP);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a CUDA GPU"]
async fn one_gpu_chooses_as_the_processor_does() {
    check_against_processor(1).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs 2 CUDA GPUs"]
async fn two_gpus_choose_as_the_processor_does() {
    check_against_processor(2).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs 4 CUDA GPUs"]
async fn four_gpus_choose_as_the_processor_does() {
    check_against_processor(4).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a CUDA GPU"]
async fn a_sequence_alone_and_in_a_batch_part_only_where_the_best_two_are_close() {
    let (_cluster, client) = start(Layout::on_gpus(1, 1)).await;
    let alone = greedy_outputs(&client).await;
    let together = greedy_outputs_together(&client).await;
    // Batches round activations to 16 bits, few tokens to 8.
    check_all("alone and together", &alone, &together, EIGHT_BITS);
}

/// Prints how far outputs agree, and fails if they part where the best two tokens lie `tolerance` nats apart.
fn check_all(name: &str, reference: &[Output], others: &[Output], tolerance: f32) {
    let partings: Vec<_> = reference.iter().zip(others).filter_map(|(one, other)| parting(one, other)).collect();
    let largest = partings.iter().map(|(_, gap)| *gap).fold(0.0, f32::max);
    let num_equal = PROMPTS.len() - partings.len();
    println!("{name}: {num_equal} of {} outputs are equal, largest gap at a parting {largest:.3}", PROMPTS.len());
    for ((prompt, one), other) in PROMPTS.iter().zip(reference).zip(others) {
        check_same(one, other, tolerance).unwrap_or_else(|problem| panic!("{name}, {prompt:?}: {problem}"));
    }
}

/// Cuts of the model against one GPU. Several sum in another order, and in f32. In batches, whose activations have 16
/// bits, that shows in close choices alone. Alone a sequence is computed with activations of 8 bits: there a last bit
/// that differs flips a rounding, which flips others a layer later, until all roundings are others: as far apart as the
/// processor is, which rounds otherwise as well.
async fn check_cuts(layouts: &[Layout]) {
    let (alone, together) = {
        let (_cluster, client) = start(Layout::on_gpus(1, 1)).await;
        (greedy_outputs(&client).await, greedy_outputs_together(&client).await)
    };
    for layout in layouts {
        let Layout { tensor, pipeline, workers, .. } = layout;
        let name = format!("{tensor} x {pipeline} GPUs of {workers} workers");
        let (_cluster, client) = start(*layout).await;
        check_all(&format!("{name}, alone"), &alone, &greedy_outputs(&client).await, EIGHT_BITS);
        check_all(&format!("{name}, together"), &together, &greedy_outputs_together(&client).await, ROUNDING);
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs 2 CUDA GPUs"]
async fn two_gpus_give_the_tokens_of_one() {
    check_cuts(&[Layout::on_gpus(2, 1), Layout::on_gpus(1, 2)]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs 2 CUDA GPUs"]
async fn two_gpus_of_two_processes_give_the_tokens_of_one() {
    check_cuts(&[Layout::on_gpus_of_workers(2, 1), Layout::on_gpus_of_workers(1, 2)]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs 4 CUDA GPUs"]
async fn four_gpus_give_the_tokens_of_one() {
    check_cuts(&[
        Layout::on_gpus(4, 1),
        Layout::on_gpus(2, 2),
        Layout::on_gpus_of_workers(4, 1),
        Layout { workers: 2, ..Layout::on_gpus(2, 2) },
    ])
    .await;
}

/// Sends `signal` to one of two workers whose GPUs work together: that is noticed soon, and the stream goes on when the
/// model is served again.
async fn lose_worker(layout: Layout, index: usize, signal: &str) {
    let (cluster, client) = start(layout).await;
    let mut stream = client.start(greedy(tokens(&[504, 3575, 282]), 4000)).await.unwrap();
    // Some steps: they are replayed by then.
    for _ in 0..8 {
        stream.message().await.unwrap().unwrap();
    }
    let pid = cluster.worker_pid(index).unwrap().to_string();
    let kill = |signal: &str| assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    let begin = Instant::now();
    kill(signal);
    while client.is_ready().await.unwrap() {
        assert!(begin.elapsed() < LOSS, "not noticed\n{}", cluster.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("{layout:?}: noticed {:?} after {signal} of worker {index}", begin.elapsed());
    if signal != KILL {
        kill(KILL);
    }
    // The lost worker is started again; the other one has given its GPU up for a new replica.
    let go_on = async {
        while !client.is_ready().await.unwrap() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        for _ in 0..GONE_ON {
            stream.message().await.unwrap().unwrap();
        }
    };
    let gone_on = tokio::time::timeout(PATIENCE, go_on).await;
    assert!(gone_on.is_ok(), "the stream does not go on\n{}", cluster.log());
    println!("the stream went on after {:?}", begin.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs 2 CUDA GPUs"]
async fn two_gpus_do_not_wait_for_a_lost_process() {
    let tensor = Layout::on_gpus_of_workers(2, 1);
    lose_worker(tensor, 1, KILL).await;
    lose_worker(tensor, 0, KILL).await;
    lose_worker(tensor, 1, "-STOP").await;
    lose_worker(Layout::on_gpus_of_workers(1, 2), 0, KILL).await;
}
