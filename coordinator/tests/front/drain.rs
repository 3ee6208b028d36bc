//! Workers that drain or stall: who takes requests meanwhile, and what becomes of those that run.

use std::{sync::atomic::Ordering, time::Duration};

use lockstep_proto::v1;

use crate::{
    http::get,
    stub::{Collected, Coordinator, StubWorker, cluster, collect, config, eventually, request},
};

const LONG: Duration = Duration::from_secs(20);

fn drain(worker: &StubWorker, left: Duration) {
    *worker.state.drain_left.lock().unwrap() = Some(left);
}

fn num_running(worker: &StubWorker) -> usize {
    worker.state.num_running.load(Ordering::SeqCst)
}

async fn generate(coordinator: &Coordinator, num_tokens: u32) -> Collected {
    collect(coordinator.inference().await.generate(request(num_tokens)).await.unwrap().into_inner()).await.unwrap()
}

/// A stream of `num_tokens` tokens, 20 ms each.
async fn slow_stream(
    coordinator: &Coordinator,
    worker: &StubWorker,
    num_tokens: u32,
) -> tonic::Streaming<v1::GenerateResponse> {
    *worker.state.token_delay.lock().unwrap() = Duration::from_millis(20);
    let stream = coordinator.inference().await.generate(request(num_tokens)).await.unwrap().into_inner();
    eventually("the start of the stream", || num_running(worker) == 1).await;
    *worker.state.token_delay.lock().unwrap() = Duration::ZERO;
    stream
}

async fn is_ready_on(coordinator: &Coordinator, worker_id: &str) -> bool {
    let replicas = coordinator.status().await.models.into_iter().flat_map(|model| model.replicas);
    replicas.into_iter().any(|it| it.state() == v1::ReplicaState::Ready && it.ranks[0].worker_id == worker_id)
}

#[tokio::test]
async fn the_last_replica_serves_until_its_successor_does() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    let stream = slow_stream(&coordinator, &workers[0], 150).await;
    let spare = StubWorker::start("w1", coordinator.grpc).await;
    *spare.state.load_delay.lock().unwrap() = Duration::from_millis(500);
    drain(&workers[0], LONG);
    // None is refused meanwhile.
    while !is_ready_on(&coordinator, "w1").await {
        let replicas = coordinator.status().await.models.remove(0).replicas;
        let numbers: std::collections::BTreeSet<u32> = replicas.iter().map(|it| it.replica).collect();
        assert_eq!(numbers.len(), replicas.len(), "the successor has a number of its own: {replicas:?}");
        assert_eq!(generate(&coordinator, 5).await.text, "hello");
    }
    assert_eq!(collect(stream).await.unwrap().token_ids.len(), 150);
    eventually("freeing the part", || workers[0].state.held.lock().unwrap().is_empty()).await;
    assert_eq!(generate(&coordinator, 5).await.text, "hello");
    assert!(spare.state.last_sequence.lock().unwrap().is_some());
    assert_eq!(spare.state.loads.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn what_runs_at_the_deadline_moves() {
    let (coordinator, workers) = cluster(2, config("tensor=1,replicas=2", 2)).await;
    workers.iter().for_each(|worker| *worker.state.halts_at.lock().unwrap() = 3);
    let stream = coordinator.inference().await.generate(request(10)).await.unwrap().into_inner();
    eventually("the start of the stream", || workers.iter().any(|worker| num_running(worker) == 1)).await;
    let (runner, other) =
        if num_running(&workers[0]) == 1 { (&workers[0], &workers[1]) } else { (&workers[1], &workers[0]) };
    *other.state.halts_at.lock().unwrap() = usize::MAX;
    drain(runner, LONG);
    let is_draining = |cluster: &v1::GetClusterResponse| {
        let replicas = cluster.models.iter().flat_map(|model| &model.replicas);
        replicas.filter(|replica| replica.state() == v1::ReplicaState::Draining).count() == 1
    };
    let shown = coordinator.becomes("one drains", is_draining).await;
    let worker = shown.workers.iter().find(|worker| worker.draining).unwrap();
    assert_eq!(worker.num_requests, 1, "{shown:?}");
    assert!((10e3..=20e3).contains(&worker.drain_left_ms), "{worker:?}");
    // It gets none, though it is the one with less to do.
    for _ in 0..3 {
        assert_eq!(generate(&coordinator, 5).await.text, "hello");
    }
    assert_eq!(num_running(runner), 1);
    drain(runner, Duration::ZERO);
    assert_eq!(collect(stream).await.unwrap().text, "hello worl");
    eventually("freeing the part", || runner.state.held.lock().unwrap().is_empty()).await;
    let moved = other.state.last_sequence.lock().unwrap().clone().unwrap();
    assert_eq!(moved.num_output_tokens, 3);
}

#[tokio::test]
async fn a_stalled_replica_is_unready_until_its_steps_go_on() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    let stream = slow_stream(&coordinator, &workers[0], 50).await;
    *workers[0].state.stall.lock().unwrap() = "a step should have come back 1.0 s ago".into();
    coordinator.wait_ready(false).await;
    let readiness = get(&coordinator, "/readyz").await;
    assert!(readiness.status == 503 && readiness.body.contains("do not answer"), "{readiness:?}");
    let replica = coordinator.status().await.models.remove(0).replicas.remove(0);
    assert_eq!(replica.state(), v1::ReplicaState::Stalled);
    assert!(replica.problem.contains("1.0 s ago"), "{replica:?}");
    let refused = coordinator.inference().await.generate(request(1)).await.unwrap_err();
    assert!(refused.message().contains("do not answer"), "{refused:?}");

    *workers[0].state.stall.lock().unwrap() = String::new();
    coordinator.wait_ready(true).await;
    assert_eq!(get(&coordinator, "/readyz").await.status, 200);
    // What ran stayed where it was.
    assert_eq!(collect(stream).await.unwrap().token_ids.len(), 50);
    assert_eq!(workers[0].state.loads.lock().unwrap().len(), 1);
}
