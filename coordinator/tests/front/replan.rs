//! Plans that take the place of others while those serve: for workers that came, and around a path that is cut.

use std::time::{Duration, Instant};

use lockstep_coordinator::CoordinatorConfig;
use lockstep_proto::v1;

use crate::stub::{Coordinator, StubWorker, cluster, collect, config, eventually, request};

fn growing(policy: &str, min_workers: usize) -> CoordinatorConfig {
    CoordinatorConfig { replan_delay: Some(Duration::from_millis(300)), ..config(policy, min_workers) }
}

/// Workers of the ready replicas, by replica.
fn members(replicas: &[v1::ReplicaStatus]) -> Vec<Vec<String>> {
    let ready = replicas.iter().filter(|replica| replica.state() == v1::ReplicaState::Ready);
    ready.map(|replica| replica.ranks.iter().map(|rank| rank.worker_id.clone()).collect()).collect()
}

/// The same, once it is as wanted.
async fn until(coordinator: &Coordinator, what: &str, holds: impl Fn(&[Vec<String>]) -> bool) -> Vec<Vec<String>> {
    members(&coordinator.replicas(what, |replicas| holds(&members(replicas))).await)
}

#[tokio::test]
async fn a_model_waits_for_its_workers_but_not_for_ever() {
    let timeout = Some(Duration::from_millis(500));
    let begin = Instant::now();
    let patient = CoordinatorConfig { min_workers_timeout: timeout, ..config("auto", 2) };
    let (coordinator, _workers) = cluster(1, patient).await;
    until(&coordinator, "a plan for one worker", |members| members == [["w0"]]).await;
    assert!(begin.elapsed() >= Duration::from_millis(500), "{:?}", begin.elapsed());
}

#[tokio::test]
async fn a_worker_that_stays_gets_a_replica_more() {
    let (coordinator, workers) = cluster(1, growing("tensor=1", 1)).await;
    let begin = Instant::now();
    let more = StubWorker::start("w1", coordinator.grpc).await;
    until(&coordinator, "a second replica", |members| members.len() == 2).await;
    assert!(begin.elapsed() >= Duration::from_millis(300), "{:?}", begin.elapsed());
    // And that is all.
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert_eq!([&workers[0], &more].map(|worker| worker.state.loads.lock().unwrap().len()), [1, 1]);
}

#[tokio::test]
async fn a_much_better_plan_takes_over_without_a_gap() {
    let (coordinator, workers) = cluster(1, growing("auto,replicas=1", 1)).await;
    *workers[0].state.token_delay.lock().unwrap() = Duration::from_millis(20);
    let stream = coordinator.inference().await.generate(request(100)).await.unwrap().into_inner();
    let fast = StubWorker::start_fast("w1", coordinator.grpc).await;
    until(&coordinator, "the fast worker", |members| members == [["w1"]]).await;
    let got = collect(stream).await.unwrap();
    assert_eq!(got.token_ids.len(), 100);
    eventually("freeing the slow worker", || workers[0].state.held.lock().unwrap().is_empty()).await;
    assert!(fast.state.last_sequence.lock().unwrap().is_none(), "the stream stayed where it was");
    // It does not go back and forth.
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert_eq!([&workers[0], &fast].map(|worker| worker.state.loads.lock().unwrap().len()), [1, 1]);
}

#[tokio::test]
async fn workers_that_cannot_reach_each_other_are_kept_apart() {
    let (coordinator, workers) = cluster(3, config("tensor=2,replicas=1", 3)).await;
    let first = until(&coordinator, "a pair", |members| members.len() == 1).await.remove(0);
    let index = |id: &str| id[1..].parse::<usize>().unwrap();
    let leader = &workers[index(&first[0])].state;
    // The other rank notices that its leader is gone, and says less.
    *leader.unreachable.lock().unwrap() = first[1].clone();
    *leader.problem.lock().unwrap() = "rank 1: sent nothing".into();
    *workers[index(&first[1])].state.problem.lock().unwrap() = "rank 0: closed the connection".into();
    eventually("freeing the parts", || leader.held.lock().unwrap().is_empty()).await;
    workers.iter().for_each(|worker| worker.state.problem.lock().unwrap().clear());
    let next = until(&coordinator, "another pair", |members| members.len() == 1).await.remove(0);
    assert!(!first.iter().all(|id| next.contains(id)), "{first:?}, then {next:?}");
    let stream = coordinator.inference().await.generate(request(5)).await.unwrap();
    assert_eq!(collect(stream.into_inner()).await.unwrap().text, "hello");
}
