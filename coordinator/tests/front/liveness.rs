//! Leases, lost workers, new plans, and the end of the coordinator.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use lockstep_proto::{status::Class, v1};
use tonic::Code;

use crate::stub::{Coordinator, PATIENCE, StubWorker, cluster, collect, config, eventually, request};

/// A slow stream that has brought its first token.
async fn running_stream(coordinator: &Coordinator) -> tonic::Streaming<v1::GenerateResponse> {
    let mut stream = coordinator.inference().await.generate(request(400)).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    stream
}

/// Settings under which a stream ends with its replica unless another is ready.
fn impatient(policy: &str, min_workers: usize) -> lockstep_coordinator::CoordinatorConfig {
    lockstep_coordinator::CoordinatorConfig { failover_timeout: Duration::ZERO, ..config(policy, min_workers) }
}

fn slow_down(workers: &[StubWorker]) {
    for worker in workers {
        *worker.state.token_delay.lock().unwrap() = Duration::from_millis(20);
    }
}

#[tokio::test]
async fn dead_worker_ends_streams_with_a_reason_and_a_new_one_is_planned_for() {
    let (coordinator, mut workers) = cluster(2, impatient("tensor=2", 2)).await;
    slow_down(&workers);
    let first_epoch = coordinator.status().await.models[0].plan_epoch;
    let stream = running_stream(&coordinator).await;
    let begin = Instant::now();
    // Not the leader: the stream's own connection stays whole, only the registry knows.
    drop(workers.pop());
    let status = collect(stream).await.unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    assert_eq!((status.code(), Class::of(&status)), (Code::Unavailable, Class::WorkerLost), "{status:?}");
    assert!(status.message().contains("a worker was lost"), "{status:?}");

    coordinator.wait_ready(false).await;
    let refused = coordinator.inference().await.generate(request(1)).await.unwrap_err();
    assert_eq!((refused.code(), Class::of(&refused)), (Code::FailedPrecondition, Class::NotReady));
    assert!(refused.message().contains("a worker was lost"), "{refused:?}");

    workers.push(StubWorker::start("w2", coordinator.grpc).await);
    coordinator.wait_ready(true).await;
    let model = coordinator.status().await.models.remove(0);
    assert!(model.plan_epoch > first_epoch && model.problem.is_empty(), "{model:?}");
    assert_eq!(workers[0].state.unloads.lock().unwrap().len(), 1);
    *workers[0].state.token_delay.lock().unwrap() = Duration::ZERO;
    let stream = coordinator.inference().await.generate(request(3)).await.unwrap();
    assert_eq!(collect(stream.into_inner()).await.unwrap().text, "hel");
}

#[tokio::test]
async fn survivors_are_planned_for_however_few_and_a_new_start_is_waited_with() {
    let (coordinator, mut workers) = cluster(2, config("replicas=1", 2)).await;
    let leader = coordinator.status().await.models[0].replicas[0].ranks[0].worker_id.clone();
    drop(workers.remove(leader.strip_prefix('w').unwrap().parse().unwrap()));
    let is_left = |replica: &v1::ReplicaStatus| {
        replica.state() == v1::ReplicaState::Ready && replica.ranks.iter().all(|rank| rank.worker_id != leader)
    };
    coordinator.replicas("a plan on the worker that is left", |replicas| replicas.iter().any(is_left)).await;
    // When all are gone the first that comes is not to get a plan for itself.
    workers.clear();
    coordinator.becomes("no worker is left", |status| status.workers.is_empty()).await;
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let _first = StubWorker::start("w2", coordinator.grpc).await;
    coordinator.wait_problem("waits for workers: 1 of 2").await;
    let _second = StubWorker::start("w3", coordinator.grpc).await;
    coordinator.wait_ready(true).await;
}

#[tokio::test]
async fn silent_worker_loses_its_lease() {
    let lease = Duration::from_secs(2);
    let settings = lockstep_coordinator::CoordinatorConfig { lease, ..impatient("tensor=1", 1) };
    let (coordinator, workers) = cluster(1, settings).await;
    slow_down(&workers);
    let stream = running_stream(&coordinator).await;
    let begin = Instant::now();
    *workers[0].state.is_beating.lock().unwrap() = false;
    let status = collect(stream).await.unwrap_err();
    assert!((lease / 2..2 * lease).contains(&begin.elapsed()), "{:?}", begin.elapsed());
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(coordinator.status().await.workers.is_empty());
}

#[tokio::test]
async fn reported_problem_breaks_the_replica_and_it_is_loaded_again() {
    let (coordinator, workers) = cluster(1, impatient("tensor=1", 1)).await;
    slow_down(&workers);
    let stream = running_stream(&coordinator).await;
    *workers[0].state.problem.lock().unwrap() = "rank 1: connection reset".into();
    let status = collect(stream).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    // What a worker says, which may name addresses, is for operators.
    assert!(status.message().contains("a worker failed") && !status.message().contains("rank 1"), "{status:?}");
    let problem = coordinator.status().await.models.remove(0).problem;
    assert!(problem.contains("worker w0: rank 1: connection reset"), "{problem}");
    *workers[0].state.problem.lock().unwrap() = String::new();
    coordinator.wait_ready(true).await;
    let epochs: Vec<u64> = workers[0].state.loads.lock().unwrap().iter().map(|load| load.plan_epoch).collect();
    assert!(epochs.len() >= 2 && epochs.is_sorted_by(|one, next| one < next), "{epochs:?}");
}

#[tokio::test]
async fn a_worker_gets_no_part_before_it_has_freed_the_last() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    let state = &workers[0].state;
    eventually("a heartbeat that lists the part", || !state.held.lock().unwrap().is_empty()).await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    *state.refuses_unloads.lock().unwrap() = true;
    *state.problem.lock().unwrap() = "rank 0: it broke".into();
    coordinator.wait_ready(false).await;
    *state.problem.lock().unwrap() = String::new();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(state.loads.lock().unwrap().len(), 1);
    coordinator.wait_problem("waits for devices: none is free").await;
    *state.refuses_unloads.lock().unwrap() = false;
    eventually("loading it again", || state.loads.lock().unwrap().len() == 2).await;
    coordinator.wait_ready(true).await;
}

#[tokio::test]
async fn a_model_that_fails_soon_is_not_reloaded_in_a_tight_loop() {
    let (_coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    *workers[0].state.problem.lock().unwrap() = "step 0: it always fails".into();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let num_loads = workers[0].state.loads.lock().unwrap().len();
    assert!((2..=3).contains(&num_loads), "{num_loads} loads in 2.5 s");
}

#[tokio::test]
async fn a_part_that_vanishes_breaks_its_replica_alone() {
    let (coordinator, workers) = cluster(2, config("tensor=1,replicas=2", 2)).await;
    let loads = |index: usize| workers[index].state.loads.lock().unwrap().len();
    workers[1].state.held.lock().unwrap().clear();
    eventually("loading it again", || loads(1) == 2).await;
    coordinator.wait_ready(true).await;
    assert_eq!(loads(0), 1);
    assert!(workers[0].state.unloads.lock().unwrap().is_empty());
    let epochs: Vec<u64> = workers.iter().map(|w| w.state.held.lock().unwrap()[0].plan_epoch).collect();
    assert!(epochs[0] < epochs[1], "{epochs:?}");
}

#[tokio::test]
async fn a_worker_that_knows_nothing_of_its_replica_breaks_it_at_the_first_request() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    workers[0].state.held.lock().unwrap().clear();
    // The request waits until it is loaded again.
    let stream = coordinator.inference().await.generate(request(3)).await.unwrap();
    assert_eq!(collect(stream.into_inner()).await.unwrap().text, "hel");
    assert_eq!(workers[0].state.loads.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn second_worker_with_a_live_id_is_refused() {
    let (coordinator, _workers) = cluster(1, config("tensor=1", 1)).await;
    let second = StubWorker::start("w0", coordinator.grpc).await;
    let status = second.registration.await.unwrap();
    assert_eq!(status.code(), Code::AlreadyExists, "{status:?}");
    assert!(status.message().contains("\"w0\""), "{status:?}");
    assert_eq!(coordinator.status().await.workers.len(), 1);
}

#[tokio::test]
async fn load_goes_to_the_idle_replica() {
    let (coordinator, workers) = cluster(2, config("tensor=1,replicas=2", 2)).await;
    slow_down(&workers);
    let mut client = coordinator.inference().await;
    let _streams = (client.generate(request(400)).await.unwrap(), client.generate(request(400)).await.unwrap());
    let running: Vec<usize> =
        workers.iter().map(|w| w.state.num_running.load(std::sync::atomic::Ordering::SeqCst)).collect();
    assert_eq!(running, [1, 1]);
}

#[tokio::test]
async fn shutdown_drains_what_runs_and_admits_nothing() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    *workers[0].state.token_delay.lock().unwrap() = Duration::from_millis(10);
    let mut client = coordinator.inference().await;
    let stream = client.generate(request(200)).await.unwrap().into_inner();
    coordinator.shutdown.cancel();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let refused = client.generate(request(1)).await.unwrap_err();
    assert_eq!((refused.code(), Class::of(&refused)), (Code::Unavailable, Class::ShuttingDown), "{refused:?}");
    let got = collect(stream).await.unwrap();
    assert_eq!(got.token_ids.len(), 200);
    assert!(got.finish.is_some());
    drop(client);
    tokio::time::timeout(PATIENCE, coordinator.ended).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn drain_ends_at_its_limit() {
    let mut settings = config("tensor=1", 1);
    settings.drain_timeout = Duration::from_millis(300);
    let (coordinator, workers) = cluster(1, settings).await;
    slow_down(&workers);
    let stream = running_stream(&coordinator).await;
    coordinator.shutdown.cancel();
    let status = collect(stream).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    tokio::time::timeout(PATIENCE, coordinator.ended).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn port_in_use_is_said() {
    let coordinator = Coordinator::start(config("tensor=1", 1)).await;
    let settings = lockstep_coordinator::CoordinatorConfig { grpc_listen: coordinator.grpc, ..config("tensor=1", 1) };
    let error = lockstep_coordinator::run(settings, Default::default(), |_, _| {}).await.unwrap_err();
    assert!(error.to_string().contains(&coordinator.grpc.to_string()), "{error}");
}

#[tokio::test]
async fn a_worker_that_is_lost_while_it_describes_is_not_waited_for() {
    let coordinator = Coordinator::start(config("tensor=1", 1)).await;
    let silent = StubWorker::start("w0", coordinator.grpc).await;
    *silent.state.describes_never.lock().unwrap() = true;
    eventually("it is asked", || silent.state.num_described.load(Ordering::SeqCst) == 1).await;
    let _other = StubWorker::start("w1", coordinator.grpc).await;
    // It is lost to the registry alone: the connection on which it was asked stays, as that of a host without power.
    silent.registration.abort();
    coordinator.wait_ready(true).await;
}
