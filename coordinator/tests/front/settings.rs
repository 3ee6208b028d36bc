//! Coordinators that are started with other settings over the same etcd, as an upgrade does.

use std::time::Duration;

use lockstep_coordinator::CoordinatorConfig;
use lockstep_proto::v1;
use lockstep_tests::Etcd;

use crate::{
    etcd::{Registered, hello, model, shared},
    stub::{Coordinator, MODEL, SLOW_SOURCE, SLOWLY, collect, eventually, request},
};

async fn workers<const N: usize>(etcd: &Etcd) -> [Registered; N] {
    let mut workers = Vec::new();
    for index in 0..N {
        workers.push(Registered::start(&format!("w{index}"), etcd).await);
    }
    workers.try_into().unwrap_or_else(|_| panic!("as many as were started"))
}

/// Waits until the model has one ready replica of so many ranks and nothing else.
async fn ranks(coordinator: &Coordinator, num_ranks: usize) -> v1::ModelStatus {
    for _ in 0..500 {
        if let Some(model) = model(coordinator).await
            && let [replica] = &model.replicas[..]
            && replica.state() == v1::ReplicaState::Ready
            && replica.ranks.len() == num_ranks
        {
            return model;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("no replica of {num_ranks} ranks: {:?}", model(coordinator).await);
}

#[tokio::test]
async fn a_new_policy_takes_over_beside_what_serves() {
    let etcd = Etcd::start(1).unwrap();
    let workers = workers::<3>(&etcd).await;
    let old = || shared(&etcd, "a", "tensor=1,replicas=1", 1);
    let first = Coordinator::start(old()).await;
    first.wait_ready(true).await;
    let runner = workers.iter().find(|worker| worker.num_loads() == 1).unwrap();
    runner.slow_down();
    let stream = first.inference().await.generate(request(100)).await.unwrap().into_inner();
    let new = CoordinatorConfig { settings_revision: 1, ..shared(&etcd, "b", "tensor=2,replicas=1", 3) };
    let second = Coordinator::start(new).await;
    let successor = async || workers.iter().filter(|worker| worker.num_loads() == 1).count() == 3;
    while !successor().await {
        assert_eq!(hello(&first).await, "hello");
    }
    // The stream stays where it was, to its end.
    let got = collect(stream).await.unwrap();
    assert_eq!(got.token_ids.len(), 100);
    let is_successor = |worker: &&Registered| !std::ptr::eq(*worker, runner);
    let resumed =
        workers.iter().filter(is_successor).filter_map(|it| it.stub.state.last_sequence.lock().unwrap().clone());
    assert_eq!(resumed.map(|sequence| sequence.num_output_tokens).max().unwrap_or(0), 0);
    let epoch = ranks(&first, 2).await.plan_epoch;
    ranks(&second, 2).await;
    assert_eq!((hello(&first).await, hello(&second).await), ("hello".into(), "hello".into()));

    // One with the old settings comes back, and one that differs in nothing that calls for another cut.
    first.shutdown.cancel();
    first.ended.await.unwrap().unwrap();
    let first = Coordinator::start(old()).await;
    let third =
        Coordinator::start(CoordinatorConfig { settings_revision: 2, ..shared(&etcd, "c", "tensor=2,replicas=1", 2) })
            .await;
    third.wait_ready(true).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!((ranks(&first, 2).await.plan_epoch, ranks(&third, 2).await.plan_epoch), (epoch, epoch));
    assert!(workers.iter().all(|worker| worker.num_loads() == 1));
}

#[tokio::test]
async fn streams_wait_for_a_policy_that_needs_their_devices() {
    let etcd = Etcd::start(1).unwrap();
    let workers = workers::<2>(&etcd).await;
    let first = Coordinator::start(shared(&etcd, "a", "tensor=1,replicas=2", 2)).await;
    first.wait_ready(true).await;
    workers.iter().for_each(Registered::slow_down);
    let mut stream = first.inference().await.generate(request(100)).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    let second = Coordinator::start(shared(&etcd, "b", "tensor=2", 2)).await;
    ranks(&second, 2).await;
    let got = collect(stream).await.unwrap();
    let script = "hello world ".repeat(9);
    assert!(script[..100].ends_with(&got.text) && got.text.len() >= 98, "{got:?}");
    assert_eq!(hello(&first).await, "hello");
    // What cannot be had does not end what serves.
    let third = Coordinator::start(shared(&etcd, "c", "tensor=2,replicas=2", 2)).await;
    let shows = third.wait_problem("waits for devices");
    let asks = async {
        loop {
            assert_eq!((hello(&first).await, hello(&third).await), ("hello".into(), "hello".into()));
        }
    };
    tokio::select! { () = shows => {}, () = asks => {} }
    assert_eq!((hello(&first).await, hello(&third).await), ("hello".into(), "hello".into()));
}

#[tokio::test]
async fn another_model_takes_the_place_of_the_last_settings() {
    let etcd = Etcd::start(1).unwrap();
    let [worker] = workers::<1>(&etcd).await;
    let settings = |id: &str, name: &str, source: &str| {
        let mut settings = CoordinatorConfig { drain_timeout: Duration::ZERO, ..shared(&etcd, id, "tensor=1", 1) };
        let model = settings.model.as_mut().unwrap();
        (model.name, model.source) = (name.to_owned(), source.to_owned());
        settings
    };
    let first = Coordinator::start(settings("a", MODEL, SLOW_SOURCE)).await;
    first.wait_ready(true).await;
    let sources = || worker.stub.state.loads.lock().unwrap().iter().map(|load| load.source.clone()).collect::<Vec<_>>();
    // Another file under the name, then another name.
    let second = Coordinator::start(settings("b", MODEL, "/models/new.gguf")).await;
    eventually("the new file", || sources().last().is_some_and(|source| source == "/models/new.gguf")).await;
    second.wait_ready(true).await;
    // What was asked of the old file is answered late, and is no word of the new one.
    tokio::time::sleep(SLOWLY).await;
    assert_eq!(hello(&second).await, "hello");
    assert_eq!(worker.stub.state.last_sequence.lock().unwrap().as_ref().unwrap().eos_token_ids, [0]);
    let third = Coordinator::start(settings("c", "other", "/models/other.gguf")).await;
    eventually("the other model", || sources().last().is_some_and(|source| source == "/models/other.gguf")).await;
    for coordinator in [&first, &second, &third] {
        let mut names = Vec::new();
        for _ in 0..500 {
            let models =
                coordinator.inference().await.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner();
            names = models.models.into_iter().map(|model| model.name).collect();
            if names == ["other"] {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(names, ["other"]);
        coordinator.wait_ready(true).await;
        assert_eq!(hello(coordinator).await, "hello");
    }
    assert_eq!(worker.stub.state.held.lock().unwrap().len(), 1);
}
