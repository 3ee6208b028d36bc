//! A broken replica does not end its clients' streams: they go on elsewhere, without a gap or a repeat.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use lockstep_coordinator::CoordinatorConfig;
use lockstep_proto::{status::Class, v1};
use tonic::{Code, Status, Streaming};

use crate::{
    http::{get, shows},
    stub::{Collected, Coordinator, StubWorker, cluster, collect, config, eventually, request},
};

const SCRIPT: &str = "hello world ";

/// As many replicas of one worker.
fn policy(num_workers: usize) -> CoordinatorConfig {
    config(&format!("tensor=1,replicas={num_workers}"), num_workers)
}

fn halt_all(workers: &[StubWorker], at: usize) {
    workers.iter().for_each(|worker| *worker.state.halts_at.lock().unwrap() = at);
}

/// Starts a request; the workers halt so that it is still running when this returns.
async fn start(coordinator: &Coordinator, request: v1::GenerateRequest) -> Streaming<v1::GenerateResponse> {
    coordinator.inference().await.generate(request).await.unwrap().into_inner()
}

/// The worker that runs the only sequence, taken out; the others halt no more.
fn take_runner(workers: &mut Vec<StubWorker>) -> StubWorker {
    let index = workers.iter().position(|worker| worker.state.num_running.load(Ordering::SeqCst) == 1).unwrap();
    let runner = workers.remove(index);
    halt_all(workers, usize::MAX);
    runner
}

/// Reads until `count` tokens came.
async fn read(stream: &mut Streaming<v1::GenerateResponse>, count: usize) -> Collected {
    let mut got = Collected::default();
    while got.token_ids.len() < count {
        match stream.message().await.unwrap().unwrap().event.unwrap() {
            v1::generate_response::Event::Delta(delta) => {
                got.text.push_str(&delta.text);
                got.token_ids.extend(delta.token_ids);
                got.logprobs.extend(delta.logprobs);
            }
            v1::generate_response::Event::Finish(finish) => panic!("ended early: {finish:?}"),
        }
    }
    got
}

/// What is left of a stream after `got`, both together.
async fn rest(mut got: Collected, stream: Streaming<v1::GenerateResponse>) -> Result<Collected, Status> {
    let rest = collect(stream).await?;
    got.text.push_str(&rest.text);
    got.token_ids.extend(rest.token_ids);
    got.logprobs.extend(rest.logprobs);
    Ok(Collected { finish: rest.finish, ..got })
}

fn usage(got: &Collected) -> v1::Usage {
    got.finish.as_ref().unwrap().usage.unwrap()
}

#[tokio::test]
async fn a_stream_goes_on_where_it_stopped() {
    let (coordinator, mut workers) = cluster(2, policy(2)).await;
    halt_all(&workers, 7);
    let mut wanted = request(30);
    let sampling = wanted.sampling.as_mut().unwrap();
    (sampling.logprobs, sampling.frequency_penalty, sampling.temperature) = (1, Some(0.5), Some(0.8));
    let mut stream = start(&coordinator, wanted).await;
    let got = read(&mut stream, 7).await;
    let runner = take_runner(&mut workers);
    let first = runner.state.last_sequence.lock().unwrap().clone().unwrap();
    let begin = Instant::now();
    drop(runner);
    let got = rest(got, stream).await.unwrap();
    println!("stream gap with a second replica, stub workers: {:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());

    assert_eq!(got.text, &SCRIPT.repeat(3)[..30]);
    assert_eq!(got.token_ids, got.text.bytes().map(u32::from).collect::<Vec<_>>());
    let texts: String = got.logprobs.iter().map(|it| it.chosen.as_ref().unwrap().text.as_str()).collect();
    assert_eq!(texts, got.text);
    let (finish, usage) = (got.finish.unwrap(), usage(&got));
    assert_eq!(finish.reason(), v1::FinishReason::Length);
    assert_eq!(usage, v1::Usage { prompt_tokens: 2, completion_tokens: 30, cached_tokens: 0 });
    assert_eq!(finish.timings.unwrap().queue_ms, 0.25, "what it waited for its first token");

    // The second replica knows what is output, and draws with the same seed.
    let second = workers[0].state.last_sequence.lock().unwrap().clone().unwrap();
    assert_eq!(second.token_ids, "hihello w".bytes().map(u32::from).collect::<Vec<_>>());
    assert_eq!((first.num_output_tokens, second.num_output_tokens), (0, 7));
    assert_eq!((second.sampling, second.request_id), (first.sampling, first.request_id));

    let metrics = get(&coordinator, "/metrics").await.body;
    for line in [
        "lockstep_coordinator_moved_requests_total 1",
        "lockstep_coordinator_stream_gap_seconds_count 1",
        "lockstep_coordinator_prompt_tokens_total 2",
        "lockstep_coordinator_completion_tokens_total 30",
        "lockstep_coordinator_requests_total{outcome=\"length\"} 1",
        "lockstep_coordinator_running_requests 0",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    // No load is left behind: a drained replica is freed when it runs nothing.
    let mut admin = coordinator.admin().await;
    let survivor = admin.get_cluster(v1::GetClusterRequest {}).await.unwrap().into_inner().workers.remove(0).worker_id;
    admin.drain_worker(v1::DrainWorkerRequest { worker_id: survivor }).await.unwrap();
    eventually("freeing the drained replica", || workers[0].state.unloads.lock().unwrap().len() == 1).await;
}

#[tokio::test]
async fn without_a_second_replica_a_stream_waits_for_a_new_plan() {
    let (coordinator, mut workers) = cluster(1, policy(1)).await;
    halt_all(&workers, 3);
    let mut stream = start(&coordinator, request(10)).await;
    let got = read(&mut stream, 3).await;
    drop(take_runner(&mut workers));
    coordinator.wait_ready(false).await;
    workers.push(StubWorker::start("w1", coordinator.grpc).await);
    let got = rest(got, stream).await.unwrap();
    assert_eq!((got.text.as_str(), usage(&got).completion_tokens), ("hello worl", 10));
}

#[tokio::test]
async fn a_request_without_a_token_moves_too() {
    let (coordinator, mut workers) = cluster(2, policy(2)).await;
    halt_all(&workers, 0);
    let stream = start(&coordinator, request(5)).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(take_runner(&mut workers));
    let got = collect(stream).await.unwrap();
    assert_eq!((got.text.as_str(), usage(&got).completion_tokens), ("hello", 5));
    let timings = got.finish.unwrap().timings.unwrap();
    assert!(timings.queue_ms >= 100.0 && timings.ttft_ms >= 100.0, "{timings:?}");
    let second = workers[0].state.last_sequence.lock().unwrap().clone().unwrap();
    assert_eq!((second.token_ids.len(), second.num_output_tokens), (2, 0));
}

#[tokio::test]
async fn only_the_word_of_the_end_is_lost() {
    let (coordinator, mut workers) = cluster(1, policy(1)).await;
    halt_all(&workers, 5);
    let mut stream = start(&coordinator, request(5)).await;
    let got = read(&mut stream, 5).await;
    drop(take_runner(&mut workers));
    let got = rest(got, stream).await.unwrap();
    assert_eq!(got.finish.as_ref().unwrap().reason(), v1::FinishReason::Length);
    assert_eq!((got.text.as_str(), usage(&got).completion_tokens), ("hello", 5));
}

#[tokio::test]
async fn stop_texts_are_found_across_a_break() {
    let (coordinator, mut workers) = cluster(2, policy(2)).await;
    // "hello wo|rld": the break comes when "o wo" is held back.
    halt_all(&workers, 8);
    let mut wanted = request(100);
    wanted.sampling.as_mut().unwrap().stop = vec!["o world".into()];
    let mut stream = start(&coordinator, wanted).await;
    let got = read(&mut stream, 4).await;
    // The four that are held back.
    shows(&coordinator, "lockstep_coordinator_completion_tokens_total 8\n").await;
    drop(take_runner(&mut workers));
    let got = rest(got, stream).await.unwrap();
    assert_eq!((got.text.as_str(), got.token_ids.len()), ("hell", 4));
    let finish = got.finish.unwrap();
    assert_eq!((finish.reason(), finish.usage.unwrap().completion_tokens), (v1::FinishReason::Stop, 4));
    let second = workers[0].state.last_sequence.lock().unwrap().clone().unwrap();
    assert_eq!(second.num_output_tokens, 8, "tokens that are held back were received");
}

#[tokio::test]
async fn a_request_that_breaks_its_replicas_ends() {
    let (coordinator, workers) = cluster(5, policy(5)).await;
    for worker in &workers {
        *worker.state.is_poisoned.lock().unwrap() = true;
    }
    let status = collect(start(&coordinator, request(5)).await).await.unwrap_err();
    assert_eq!((status.code(), Class::of(&status)), (Code::Internal, Class::Internal), "{status:?}");
    assert!(status.message().contains("4 replicas in a row broke"), "{status:?}");
    let asked = workers.iter().filter(|worker| worker.state.last_sequence.lock().unwrap().is_some()).count();
    assert_eq!(asked, 4);
}

#[tokio::test]
async fn a_worker_that_cannot_load_is_done_without() {
    let coordinator = Coordinator::start(config("tensor=2", 3)).await;
    let mut workers = Vec::new();
    for index in 0..3 {
        let worker = StubWorker::start(&format!("w{index}"), coordinator.grpc).await;
        *worker.state.refuses_loads.lock().unwrap() = index == 0;
        workers.push(worker);
    }
    coordinator.wait_ready(true).await;
    let held = |worker: &StubWorker| worker.state.held.lock().unwrap().len();
    assert_eq!(workers.iter().map(held).collect::<Vec<_>>(), [0, 1, 1]);
}

#[tokio::test]
async fn the_deadline_bounds_the_wait() {
    let (coordinator, mut workers) = cluster(1, policy(1)).await;
    halt_all(&workers, 3);
    let mut wanted = tonic::Request::new(request(10));
    wanted.metadata_mut().insert("grpc-timeout", "1S".parse().unwrap());
    let begin = Instant::now();
    let mut stream = coordinator.inference().await.generate(wanted).await.unwrap().into_inner();
    read(&mut stream, 3).await;
    drop(take_runner(&mut workers));
    let status = collect(stream).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert!((Duration::from_millis(900)..Duration::from_secs(4)).contains(&begin.elapsed()), "{:?}", begin.elapsed());
}

#[tokio::test]
async fn without_a_deadline_the_failover_timeout_bounds_the_wait() {
    let settings = CoordinatorConfig { failover_timeout: Duration::from_millis(400), ..policy(1) };
    let (coordinator, mut workers) = cluster(1, settings).await;
    halt_all(&workers, 3);
    let mut stream = start(&coordinator, request(10)).await;
    read(&mut stream, 3).await;
    drop(take_runner(&mut workers));
    let status = collect(stream).await.unwrap_err();
    assert_eq!((status.code(), Class::of(&status)), (Code::Unavailable, Class::WorkerLost), "{status:?}");
    for part in ["a worker was lost", "within 400ms", "0 of 1 are registered"] {
        assert!(status.message().contains(part), "{status:?}");
    }
}

#[tokio::test]
async fn replicas_that_refuse_late_keep_nobody_for_ever() {
    let settings = CoordinatorConfig { failover_timeout: Duration::from_millis(500), ..policy(3) };
    let (coordinator, mut workers) = cluster(3, settings).await;
    halt_all(&workers, 3);
    let mut stream = start(&coordinator, request(10)).await;
    read(&mut stream, 3).await;
    let runner = take_runner(&mut workers);
    let states: Vec<_> = workers.iter().map(|worker| std::sync::Arc::clone(&worker.state)).collect();
    let refusing = tokio::spawn(async move {
        loop {
            for state in &states {
                // Later than the time for which it is not asked again.
                *state.token_delay.lock().unwrap() = Duration::from_millis(350);
                *state.refusal.lock().unwrap() = Some(Class::NotReady);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(runner);
    let status = tokio::time::timeout(Duration::from_secs(5), collect(stream)).await.expect("it waits for ever");
    assert_eq!(Class::of(&status.unwrap_err()), Class::WorkerLost);
    refusing.abort();
}

#[tokio::test]
async fn a_client_that_leaves_while_waiting_frees_its_place() {
    let (coordinator, mut workers) = cluster(1, policy(1)).await;
    halt_all(&workers, 3);
    let mut stream = start(&coordinator, request(10)).await;
    read(&mut stream, 3).await;
    drop(take_runner(&mut workers));
    coordinator.wait_ready(false).await;
    shows(&coordinator, "lockstep_coordinator_running_requests 1\n").await;
    drop(stream);
    let metrics = shows(&coordinator, "lockstep_coordinator_running_requests 0\n").await;
    assert!(metrics.contains("lockstep_coordinator_requests_total{outcome=\"cancelled\"} 1"), "{metrics}");
    workers.push(StubWorker::start("w1", coordinator.grpc).await);
    coordinator.wait_ready(true).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(workers[0].state.last_sequence.lock().unwrap().is_none());
}

#[tokio::test]
async fn a_client_that_leaves_before_it_has_a_stream_is_counted() {
    let (coordinator, workers) = cluster(1, policy(1)).await;
    // Another replica is waited for.
    *workers[0].state.refusal.lock().unwrap() = Some(Class::ShuttingDown);
    let mut client = coordinator.inference().await;
    let left = tokio::time::timeout(Duration::from_millis(150), client.generate(request(5))).await;
    assert!(left.is_err(), "{left:?}");
    let metrics = shows(&coordinator, "lockstep_coordinator_requests_total{outcome=\"cancelled\"} 1\n").await;
    assert!(metrics.contains("lockstep_coordinator_running_requests 0"), "{metrics}");
}

#[tokio::test]
async fn what_a_worker_has_against_the_request_is_final_and_what_it_has_not_room_for_waits() {
    let (coordinator, mut workers) = cluster(2, policy(2)).await;
    halt_all(&workers, 3);
    let mut stream = start(&coordinator, request(10)).await;
    let got = read(&mut stream, 3).await;
    let runner = take_runner(&mut workers);
    *workers[0].state.refusal.lock().unwrap() = Some(Class::Overloaded);
    drop(runner);
    assert_eq!(rest(got, stream).await.unwrap().text, "hello worl");

    for (class, is_final) in [(Class::InvalidRequest, true), (Class::Overloaded, true), (Class::ShuttingDown, false)] {
        *workers[0].state.refusal.lock().unwrap() = Some(class);
        match coordinator.inference().await.generate(request(5)).await {
            Ok(stream) => {
                assert_eq!((collect(stream.into_inner()).await.unwrap().text.as_str(), is_final), ("hello", false))
            }
            Err(status) => assert_eq!((Class::of(&status), is_final), (class, true)),
        }
    }
}

#[tokio::test]
async fn a_full_engine_refuses_nobody_whom_another_takes() {
    let (coordinator, workers) = cluster(2, policy(2)).await;
    for worker in &workers {
        *worker.state.refusal.lock().unwrap() = Some(Class::Overloaded);
        // They take turns.
        for _ in 0..4 {
            assert_eq!(collect(start(&coordinator, request(5)).await).await.unwrap().text, "hello");
        }
        assert!(worker.state.refusal.lock().unwrap().is_none(), "it was not asked");
    }
    let metrics = get(&coordinator, "/metrics").await.body;
    assert!(metrics.contains("lockstep_coordinator_moved_requests_total 0"), "nothing had begun to run: {metrics}");
    for worker in &workers {
        *worker.state.refusal.lock().unwrap() = Some(Class::Overloaded);
    }
    let status = coordinator.inference().await.generate(request(5)).await.unwrap_err();
    assert_eq!(Class::of(&status), Class::Overloaded, "{status:?}");
}

#[tokio::test]
async fn an_unloaded_model_ends_its_streams() {
    let settings = CoordinatorConfig { drain_timeout: Duration::from_millis(200), ..policy(2) };
    let (coordinator, workers) = cluster(2, settings).await;
    halt_all(&workers, 3);
    let mut stream = start(&coordinator, request(10)).await;
    read(&mut stream, 3).await;
    let unload = v1::UnloadModelRequest { name: crate::stub::MODEL.into() };
    coordinator.admin().await.unload_model(unload).await.unwrap();
    let status = collect(stream).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(status.message().contains("unloaded"), "{status:?}");
}
