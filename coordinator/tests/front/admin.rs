//! Admin, health, reflection and HTTP.

use lockstep_proto::v1;
use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use crate::{
    http::get,
    stub::{BAD_SOURCE, Coordinator, HTTP_ADDRESS, StubWorker, cluster, config, eventually, request},
};

async fn load(
    coordinator: &Coordinator,
    name: &str,
    source: &str,
    policy: &str,
) -> Result<Vec<v1::LoadModelProgress>, tonic::Status> {
    let request = v1::LoadModelRequest { name: name.into(), source: source.into(), policy: policy.into() };
    let mut stream = coordinator.admin().await.load_model(request).await?.into_inner();
    let mut progress = Vec::new();
    while let Some(message) = stream.message().await? {
        progress.push(message);
    }
    Ok(progress)
}

#[tokio::test]
async fn loads_and_unloads_models() {
    let mut settings = config("tensor=1", 1);
    settings.model = None;
    let coordinator = Coordinator::start(settings).await;
    let worker = StubWorker::start("w0", coordinator.grpc).await;
    assert!(get(&coordinator, "/readyz").await.body.contains("no model is loaded"));

    let progress = load(&coordinator, "", "/models/some.gguf", "").await.unwrap();
    let last = progress.last().unwrap();
    assert!(last.ready && last.loaded_bytes == 100 && last.total_bytes == 100, "{progress:?}");
    let wanted = v1::GenerateRequest { model: "some".into(), ..request(1) };
    coordinator.inference().await.generate(wanted).await.unwrap();

    let plan =
        coordinator.admin().await.get_plan(v1::GetPlanRequest { model: String::new() }).await.unwrap().into_inner();
    assert!(plan.plan_epoch > 0, "{plan:?}");
    // The form of `lockstep plan --json`, with the rates that the worker reported.
    let json: serde_json::Value = serde_json::from_str(&plan.plan_json).unwrap();
    let rank = &json["replicas"][0]["ranks"][0];
    assert!(json["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{json}");
    assert!(rank["worker_id"] == "w0" && rank["memory_bytes_per_second"].as_f64() > Some(0.0), "{json}");

    let mut admin = coordinator.admin().await;
    admin.unload_model(v1::UnloadModelRequest { name: "some".into() }).await.unwrap();
    assert_eq!(worker.state.unloads.lock().unwrap().len(), 1);
    let status = admin.unload_model(v1::UnloadModelRequest { name: "some".into() }).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}

#[tokio::test]
async fn orders_that_cannot_be_carried_out_are_refused() {
    let (coordinator, _workers) = cluster(1, config("tensor=1", 1)).await;
    let cases = [
        (load(&coordinator, "x", "", "").await, Code::InvalidArgument, "source: is empty"),
        (load(&coordinator, "x", "/m.gguf", "tensor=zero").await, Code::InvalidArgument, "policy: "),
        (load(&coordinator, "x", BAD_SOURCE, "").await, Code::FailedPrecondition, "no such file"),
        (load(&coordinator, "x", "/m.gguf", "tensor=9").await, Code::FailedPrecondition, "9"),
        (load(&coordinator, "stub-model", "/m.gguf", "").await, Code::AlreadyExists, "stub-model"),
    ];
    for (outcome, code, text) in cases {
        let status = outcome.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(text), "got {:?}, expected {text:?}", status.message());
    }
    // What failed is forgotten.
    let cluster = coordinator.status().await;
    assert_eq!(cluster.models.len(), 1);
    let drain = v1::DrainWorkerRequest { worker_id: "nobody".into() };
    assert_eq!(coordinator.admin().await.drain_worker(drain).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_repeated_order_never_unloads_what_served() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    let state = &workers[0].state;
    *state.refuses_loads.lock().unwrap() = true;
    state.held.lock().unwrap().clear();
    coordinator.wait_ready(false).await;
    let status = load(&coordinator, "stub-model", "/models/stub.gguf", "tensor=1").await.unwrap_err();
    assert!(status.message().contains("worker w0: no memory"), "{status:?}");
    *state.refuses_loads.lock().unwrap() = false;
    // The order to try again does not wait for the end of the back-off.
    assert!(load(&coordinator, "stub-model", "/models/stub.gguf", "tensor=1").await.unwrap().last().unwrap().ready);
}

#[tokio::test]
async fn an_order_waits_for_the_devices_that_it_needs() {
    let mut settings = config("tensor=1", 1);
    settings.model = None;
    let coordinator = Coordinator::start(settings).await;
    let _first = StubWorker::start("w0", coordinator.grpc).await;
    let order = load(&coordinator, "m", "/m.gguf", "tensor=2");
    let second = async {
        coordinator.wait_problem("need 2 devices, the cluster has 1").await;
        StubWorker::start("w1", coordinator.grpc).await
    };
    let (progress, _second) = futures::future::join(order, second).await;
    assert!(progress.unwrap().last().unwrap().ready);
}

#[tokio::test]
async fn parts_that_nobody_wants_are_unloaded() {
    let (coordinator, _workers) = cluster(1, config("tensor=1", 1)).await;
    let restarted = StubWorker::start("w1", coordinator.grpc).await;
    let left = v1::UnloadReplicaRequest {
        model: "of an earlier coordinator".into(),
        plan_epoch: 7,
        replica: 1,
        leader_term: 0,
    };
    let own = v1::UnloadReplicaRequest { model: "stub-model".into(), ..left.clone() };
    restarted.state.held.lock().unwrap().extend([left, own]);
    eventually("unloading the parts", || restarted.state.unloads.lock().unwrap().len() == 2).await;
    assert!(restarted.state.held.lock().unwrap().is_empty());
}

#[tokio::test]
async fn drained_worker_is_left_for_another() {
    let (coordinator, _workers) = cluster(1, config("tensor=1", 1)).await;
    let _spare = StubWorker::start("w1", coordinator.grpc).await;
    let mut admin = coordinator.admin().await;
    admin.drain_worker(v1::DrainWorkerRequest { worker_id: "w0".into() }).await.unwrap();
    let moved = |replicas: &[v1::ReplicaStatus]| match replicas {
        [one] => one.state() == v1::ReplicaState::Ready && one.ranks[0].worker_id == "w1",
        _ => false,
    };
    coordinator.replicas("the other worker serves", moved).await;
}

#[tokio::test]
async fn status_shows_ranks_and_engine() {
    let (coordinator, _workers) = cluster(2, config("tensor=2", 2)).await;
    let replicas = coordinator.replicas("a report of the engine", |replicas| replicas[0].engine.is_some()).await;
    assert_eq!(coordinator.status().await.workers.len(), 2);
    let replica = &replicas[0];
    assert_eq!(replica.ranks.len(), 2);
    assert_eq!(replica.engine.unwrap().num_free_kv_blocks, 12);
}

#[tokio::test]
async fn health_and_http_follow_the_model() {
    let coordinator = Coordinator::start(config("tensor=1", 1)).await;
    let channel = tonic::transport::Channel::from_shared(format!("http://{}", coordinator.grpc)).unwrap();
    let mut health = HealthClient::new(channel.connect().await.unwrap());
    let inference = || HealthCheckRequest { service: "lockstep.v1.Inference".into() };
    let status = health.check(inference()).await.unwrap().into_inner().status();
    assert_eq!(status, ServingStatus::NotServing);
    let answer = get(&coordinator, "/readyz").await;
    assert!(answer.status == 503 && answer.body.contains("waits for workers: 0 of 1"), "{answer:?}");
    assert_eq!(get(&coordinator, "/healthz").await.status, 200);

    let _worker = StubWorker::start("w0", coordinator.grpc).await;
    coordinator.wait_ready(true).await;
    let status = health.check(inference()).await.unwrap().into_inner().status();
    assert_eq!(status, ServingStatus::Serving);
    assert_eq!(get(&coordinator, "/readyz").await.status, 200);

    let stream = coordinator.inference().await.generate(request(3)).await.unwrap();
    crate::stub::collect(stream.into_inner()).await.unwrap();
    let targets = get(&coordinator, "/prometheus/workers").await.json();
    assert_eq!(
        targets,
        serde_json::json!([{"targets": [HTTP_ADDRESS], "labels": {"worker": "w0", "__scheme__": "http"}}])
    );

    let metrics = get(&coordinator, "/metrics").await.body;
    for line in [
        "lockstep_coordinator_requests_total{outcome=\"length\"} 1",
        "lockstep_coordinator_completion_tokens_total 3",
        "lockstep_coordinator_time_to_first_token_seconds_count 1",
        "lockstep_coordinator_inter_token_seconds_count 2",
        "lockstep_coordinator_time_per_output_token_seconds_count 1",
        "lockstep_coordinator_queue_seconds_count 1",
        "lockstep_coordinator_request_seconds_count 1",
        "lockstep_coordinator_replicas{model=\"stub-model\",state=\"ready\"} 1",
        "lockstep_coordinator_outstanding_tokens{model=\"stub-model\",replica=\"0\"} 0",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
}
