//! Which replica a request is given to: the holder of its prefix, unless that has too much to do.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use lockstep_proto::{
    prefix::{BlockHash, block_hashes},
    v1::{self, generate_request::Input},
};

use crate::stub::{Coordinator, StubWorker, cluster, collect, config, eventually, request};

/// Tokens in a block of the plan.
const BLOCK_SIZE: usize = 32;

/// A cluster of replicas whose leaders are followed.
async fn replicas(count: usize, max_num_sequences: usize) -> (Coordinator, Vec<StubWorker>) {
    let mut settings = config(&format!("tensor=1,replicas={count}"), count);
    settings.model.as_mut().unwrap().plan_options.max_num_sequences = max_num_sequences;
    let (coordinator, workers) = cluster(count, settings).await;
    let is_ready = || workers.iter().all(|worker| worker.state.loads.lock().unwrap().len() == 1);
    eventually("every load", is_ready).await;
    let is_followed = || workers.iter().all(|worker| worker.state.prefix_changes.receiver_count() == 1);
    eventually("a follower of every leader", is_followed).await;
    (coordinator, workers)
}

/// 200 tokens, of which every one is `token`.
fn prompt(token: u32, max_tokens: u32) -> v1::GenerateRequest {
    let ids = vec![token; 200];
    v1::GenerateRequest { input: Some(Input::TokenIds(v1::TokenIds { ids })), ..request(max_tokens) }
}

fn blocks(token: u32) -> Vec<u64> {
    let root = BlockHash::root("", false);
    block_hashes(root, &vec![token; 200], BLOCK_SIZE).map(BlockHash::short).collect()
}

/// The worker that was given a sequence since this was last asked.
fn taker(workers: &[StubWorker]) -> usize {
    let is_taker = |worker: &StubWorker| worker.state.last_sequence.lock().unwrap().take().is_some();
    let takers: Vec<usize> =
        workers.iter().enumerate().filter(|(_, worker)| is_taker(worker)).map(|(index, _)| index).collect();
    assert_eq!(takers.len(), 1, "workers {takers:?} were given a sequence");
    takers[0]
}

/// Runs a request to its end and says where.
async fn run(coordinator: &Coordinator, workers: &[StubWorker], request: v1::GenerateRequest) -> usize {
    collect(coordinator.inference().await.generate(request).await.unwrap().into_inner()).await.unwrap();
    taker(workers)
}

/// Starts a request, waits for its first token and says where it runs.
async fn start(
    coordinator: &Coordinator,
    workers: &[StubWorker],
    request: v1::GenerateRequest,
) -> (usize, tonic::Streaming<v1::GenerateResponse>) {
    let mut stream = coordinator.inference().await.generate(request).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    (taker(workers), stream)
}

#[tokio::test]
async fn prompts_go_where_they_were_and_new_ones_in_turn() {
    let (coordinator, workers) = replicas(2, 64).await;
    let [first, second] =
        [run(&coordinator, &workers, prompt(1, 2)).await, run(&coordinator, &workers, prompt(2, 2)).await];
    assert_ne!(first, second, "of idle replicas without the prefix each has its turn");
    for _ in 0..3 {
        assert_eq!(run(&coordinator, &workers, prompt(1, 2)).await, first);
    }
    assert_eq!(run(&coordinator, &workers, prompt(2, 2)).await, second);
}

#[tokio::test]
async fn reports_of_leaders_are_believed() {
    let (coordinator, workers) = replicas(2, 64).await;
    let holder = run(&coordinator, &workers, prompt(1, 2)).await;
    let report = |worker: usize, added: Vec<u64>, evicted: Vec<u64>| {
        workers[worker].state.prefix_changes.send(v1::PrefixChanges { added, evicted }).unwrap();
    };
    report(holder, Vec::new(), blocks(1));
    report(1 - holder, blocks(1)[..2].to_vec(), Vec::new());
    // Reports take a moment; what is routed meanwhile is expected where it was given to, until it is evicted there.
    let end = Instant::now() + Duration::from_secs(10);
    while run(&coordinator, &workers, prompt(1, 2)).await == holder {
        assert!(Instant::now() < end, "the report was not believed");
        report(holder, Vec::new(), blocks(1));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_prefix_outweighs_no_more_than_it_spares() {
    let (coordinator, workers) = replicas(2, 64).await;
    let holder = run(&coordinator, &workers, prompt(1, 2)).await;
    for worker in &workers {
        *worker.state.halts_at.lock().unwrap() = 1;
    }
    // Six blocks are held. With one token here each stream has 99 outstanding and 8 of the prompt to compute; so the
    // third costs 206 at the holder and 200 elsewhere.
    let mut streams = Vec::new();
    for expected in [holder, holder, 1 - holder] {
        let (taker, stream) = start(&coordinator, &workers, prompt(1, 100)).await;
        assert_eq!(taker, expected);
        streams.push(stream);
    }
    for _ in 0..5 {
        streams.push(start(&coordinator, &workers, prompt(1, 100)).await.1);
    }
    let running = workers.iter().map(|worker| worker.state.num_running.load(Ordering::SeqCst)).collect::<Vec<_>>();
    assert_eq!(running, [4, 4], "both hold the prefix by then");
}

#[tokio::test]
async fn who_is_full_is_asked_last() {
    let (coordinator, workers) = replicas(2, 2).await;
    let holder = run(&coordinator, &workers, prompt(1, 2)).await;
    for worker in &workers {
        *worker.state.halts_at.lock().unwrap() = 1;
    }
    let mut streams = Vec::new();
    for expected in [holder, holder, 1 - holder, 1 - holder] {
        let (taker, stream) = start(&coordinator, &workers, prompt(1, 10)).await;
        assert_eq!(taker, expected);
        streams.push(stream);
    }
}

#[tokio::test]
async fn a_request_that_moves_goes_to_a_holder_too() {
    let (coordinator, mut workers) = replicas(3, 64).await;
    for worker in &workers {
        *worker.state.halts_at.lock().unwrap() = 1;
    }
    let (taken, stream) = start(&coordinator, &workers, prompt(1, 3)).await;
    let holder = if taken == 2 { 1 } else { 2 };
    let report = v1::PrefixChanges { added: blocks(1), evicted: Vec::new() };
    workers[holder].state.prefix_changes.send(report).unwrap();
    for worker in &workers {
        *worker.state.halts_at.lock().unwrap() = usize::MAX;
    }
    // The halted stream weighs less than the prompt: others go there until the report is known, and to the holder then.
    let end = Instant::now() + Duration::from_secs(10);
    while run(&coordinator, &workers, prompt(1, 2)).await == taken {
        assert!(Instant::now() < end, "the report was not believed");
    }
    let lost = workers.remove(taken);
    drop(lost);
    assert_eq!(collect(stream).await.unwrap().token_ids.len(), 2);
    assert_eq!(taker(&workers), if taken < holder { holder - 1 } else { holder });
}

#[tokio::test]
async fn cached_tokens_are_told_when_a_stop_text_ends_the_stream_too() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    *workers[0].state.cached_tokens.lock().unwrap() = 1;
    let mut until_stop = request(30);
    until_stop.sampling.as_mut().unwrap().stop = vec!["world".into()];
    for request in [until_stop, request(3)] {
        let stream = coordinator.inference().await.generate(request).await.unwrap().into_inner();
        assert_eq!(collect(stream).await.unwrap().finish.unwrap().usage.unwrap().cached_tokens, 1);
    }
}
