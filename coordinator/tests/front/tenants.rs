//! API keys, limits and the use of tenants, over gRPC and HTTP.

use std::{path::PathBuf, time::Duration};

use lockstep_coordinator::tenants::key::KeyHash;
use lockstep_proto::{status::Class, v1};
use serde_json::{Value, json};
use tonic::{Code, Request, Status};

use crate::{
    http::{Answer, get, receive, send_as},
    stub::{self, Coordinator, StubWorker, collect, request},
};

/// A tenants' file; it goes with the test.
pub struct File(pub PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Tenants with these limits, each with its name as its key.
pub fn file(tenants: &[(&str, &str)]) -> File {
    let one = |(name, rest): &(&str, &str)| {
        format!("[[tenant]]\nname = \"{name}\"\nkey_sha256 = [\"{}\"]\n{rest}\n", KeyHash::of(name.as_bytes()))
    };
    let path = std::env::temp_dir().join(format!("lockstep-front-{}.toml", uuid::Uuid::new_v4()));
    std::fs::write(&path, tenants.iter().map(one).collect::<String>()).unwrap();
    File(path)
}

/// Waits until the model serves, which no key is needed to know.
pub async fn wait_ready(coordinator: &Coordinator) {
    for _ in 0..500 {
        if get(coordinator, "/readyz").await.status == 200 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the model does not become ready");
}

/// A coordinator that serves tenants.
async fn cluster(tenants: &[(&str, &str)], max_concurrent_requests: usize) -> (Coordinator, StubWorker, File) {
    let file = file(tenants);
    let mut config = stub::config("tensor=1", 1);
    config.tenants_file = Some(file.0.clone());
    config.max_concurrent_requests = max_concurrent_requests;
    let coordinator = Coordinator::start(config).await;
    let worker = StubWorker::start("w0", coordinator.grpc).await;
    wait_ready(&coordinator).await;
    (coordinator, worker, file)
}

fn with_key<T>(key: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    request
}

pub async fn generate(
    coordinator: &Coordinator,
    key: &str,
    max_tokens: u32,
) -> Result<tonic::Streaming<v1::GenerateResponse>, Status> {
    let request = with_key(key, request(max_tokens));
    Ok(coordinator.inference().await.generate(request).await?.into_inner())
}

pub async fn complete(coordinator: &Coordinator, key: &str, max_tokens: u32) -> Answer {
    let body = json!({"prompt": "hi", "max_tokens": max_tokens}).to_string();
    let stream = send_as(coordinator, key, "POST", "/v1/completions", "application/json", body.as_bytes()).await;
    receive(stream).await
}

async fn get_as(coordinator: &Coordinator, key: &str, path: &str) -> Answer {
    receive(send_as(coordinator, key, "GET", path, "text/plain", b"").await).await
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_open_what_their_tenant_may_use() {
    let (coordinator, _worker, _file) = cluster(&[("user", ""), ("boss", "admin = true")], 64).await;
    let refused = coordinator.inference().await.generate(request(2)).await.unwrap_err();
    assert_eq!((refused.code(), Class::of(&refused)), (Code::Unauthenticated, Class::Unauthenticated));
    assert_eq!(generate(&coordinator, "stranger", 2).await.unwrap_err().code(), Code::Unauthenticated);
    let list = coordinator.inference().await.list_models(v1::ListModelsRequest {}).await;
    assert_eq!(list.unwrap_err().code(), Code::Unauthenticated);
    assert_eq!(collect(generate(&coordinator, "user", 2).await.unwrap()).await.unwrap().token_ids.len(), 2);

    let mut admin = coordinator.admin().await;
    for (key, code) in
        [("stranger", Some(Code::Unauthenticated)), ("user", Some(Code::PermissionDenied)), ("boss", None)]
    {
        let answer = admin.get_cluster(with_key(key, v1::GetClusterRequest {})).await;
        assert_eq!(answer.err().map(|status| status.code()), code, "{key}");
    }
    let channel = tonic::transport::Channel::from_shared(format!("http://{}", coordinator.grpc)).unwrap();
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel.connect().await.unwrap());
    health.check(tonic_health::pb::HealthCheckRequest { service: String::new() }).await.unwrap();

    for (key, status, code) in [("", 401, "invalid_api_key"), ("stranger", 401, "invalid_api_key")] {
        for path in ["/v1/models", "/v1/none", "/status.json"] {
            let answer = get_as(&coordinator, key, path).await;
            assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (status, Some(code)), "{path}");
            assert!(answer.head.contains("www-authenticate: bearer"), "{}", answer.head);
        }
    }
    assert_eq!(complete(&coordinator, "stranger", 2).await.status, 401);
    assert_eq!(complete(&coordinator, "user", 2).await.json()["usage"]["completion_tokens"], 2);
    assert_eq!(get_as(&coordinator, "user", "/v1/models").await.status, 200);
    let refused = get_as(&coordinator, "user", "/status.json").await;
    assert_eq!((refused.status, refused.json()["error"]["type"].clone()), (403, Value::from("permission_error")));
    assert_eq!(get_as(&coordinator, "boss", "/status.json").await.status, 200);
    for open in ["/", "/healthz", "/readyz", "/metrics"] {
        assert_eq!(get(&coordinator, open).await.status, 200, "{open}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_say_when_to_come_back() {
    let tenants = [
        ("busy", "max_concurrent = 1"),
        ("rated", "tokens_per_minute = 120"),
        ("spent", "token_budget = 50"),
        ("renewed", "token_budget = 50\nbudget_period_hours = 1"),
    ];
    let (coordinator, worker, _file) = cluster(&tenants, 64).await;
    // "hi" is two tokens: 102 are reserved, 12 used.
    assert_eq!(collect(generate(&coordinator, "rated", 10).await.unwrap()).await.unwrap().token_ids.len(), 10);
    *worker.state.token_delay.lock().unwrap() = Duration::from_millis(20);
    let mut running = generate(&coordinator, "rated", 100).await.unwrap();
    running.message().await.unwrap();
    let refused = generate(&coordinator, "rated", 58).await.unwrap_err();
    assert_eq!((refused.code(), Class::of(&refused)), (Code::ResourceExhausted, Class::RateLimited));
    // 60 wanted, 6 and what came back meanwhile are there, two a second come back.
    let wait = Class::retry_after(&refused).unwrap().as_secs_f64();
    assert!((20.0..=27.0).contains(&wait), "{wait} s");
    let answer = complete(&coordinator, "rated", 58).await;
    assert_eq!((answer.status, answer.json()["error"]["code"].clone()), (429, Value::from("rate_limit_exceeded")));
    assert!(answer.head.contains("retry-after: 2"), "{}", answer.head);
    // A stream that ends early gives back what it did not use.
    drop(running);
    stub::eventually("the stream's end", || worker.state.num_running.load(std::sync::atomic::Ordering::SeqCst) == 0)
        .await;
    let mut busy = generate(&coordinator, "rated", 58).await;
    for _ in 0..100 {
        if busy.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        busy = generate(&coordinator, "rated", 58).await;
    }
    busy.unwrap();

    let mut running = generate(&coordinator, "busy", 100).await.unwrap();
    running.message().await.unwrap();
    let refused = generate(&coordinator, "busy", 1).await.unwrap_err();
    assert_eq!((refused.code(), Class::of(&refused)), (Code::ResourceExhausted, Class::RateLimited));
    assert!(Class::retry_after(&refused).is_some());
    let answer = complete(&coordinator, "busy", 1).await;
    assert!(answer.status == 429 && answer.head.contains("retry-after-ms: 500"), "{answer:?}");
    drop(running);
    // Every choice counts, and no waiting helps a request that has more than may run.
    let choices = json!({ "prompt": "hi", "max_tokens": 2, "n": 3 }).to_string();
    let (path, json_type) = ("/v1/completions", "application/json");
    let answer = receive(send_as(&coordinator, "busy", "POST", path, json_type, choices.as_bytes()).await).await;
    let error = &answer.json()["error"];
    assert_eq!((answer.status, &error["param"]), (400, &json!("n")), "{answer:?}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("3 choices") && message.contains("max_concurrent is 1"), "{message}");
    assert!(!answer.head.contains("retry-after"), "{}", answer.head);

    for (tenant, has_hint) in [("spent", false), ("renewed", true)] {
        assert_eq!(complete(&coordinator, tenant, 40).await.status, 200);
        let refused = generate(&coordinator, tenant, 7).await.unwrap_err();
        assert_eq!((refused.code(), Class::of(&refused)), (Code::ResourceExhausted, Class::QuotaExhausted));
        assert_eq!(Class::retry_after(&refused).is_some(), has_hint);
        let answer = complete(&coordinator, tenant, 7).await;
        assert_eq!((answer.status, answer.head.contains("retry-after")), (429, has_hint), "{answer:?}");
        assert_eq!(answer.json()["error"]["code"], "insufficient_quota");
        assert_eq!(complete(&coordinator, tenant, 6).await.status, 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_is_known_to_workers_and_counted() {
    let (coordinator, worker, _file) =
        cluster(&[("a", "weight = 7\nisolated = true\ntoken_budget = 100"), ("b", "")], 64).await;
    assert_eq!(complete(&coordinator, "a", 5).await.status, 200);
    let sequence = worker.state.last_sequence.lock().unwrap().clone().unwrap();
    assert_eq!((&*sequence.tenant, sequence.weight, sequence.is_isolated), ("a", 7, true));
    assert_eq!(collect(generate(&coordinator, "b", 3).await.unwrap()).await.unwrap().token_ids.len(), 3);
    let sequence = worker.state.last_sequence.lock().unwrap().clone().unwrap();
    assert_eq!((&*sequence.tenant, sequence.weight, sequence.is_isolated), ("b", 1, false));
    assert_eq!(complete(&coordinator, "stranger", 5).await.status, 401);
    let expected = [
        "tenant_requests_total{outcome=\"length\",tenant=\"a\"} 1",
        "tenant_prompt_tokens_total{tenant=\"a\"} 2",
        "tenant_completion_tokens_total{tenant=\"b\"} 3",
        "tenant_queue_seconds_count{tenant=\"a\"} 1",
        "tenant_running_requests{tenant=\"b\"} 0",
        "tenant_budget_left_tokens{tenant=\"a\"} 93",
        "tenants_file_valid 1",
        "requests_total{outcome=\"unauthenticated\"} 1",
    ];
    for _ in 0..2 {
        let metrics = get(&coordinator, "/metrics").await.body;
        for line in expected {
            assert!(metrics.contains(&format!("lockstep_coordinator_{line}")), "{line}: {metrics}");
        }
        assert!(!metrics.contains("stranger"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_tenant_does_not_fill_the_coordinator() {
    let (coordinator, worker, _file) = cluster(&[("heavy", ""), ("light", "")], 4).await;
    *worker.state.token_delay.lock().unwrap() = Duration::from_millis(50);
    let mut streams = Vec::new();
    for _ in 0..4 {
        streams.push(generate(&coordinator, "heavy", 200).await.unwrap());
    }
    assert_eq!(Class::of(&generate(&coordinator, "heavy", 1).await.unwrap_err()), Class::Overloaded);
    for _ in 0..2 {
        streams.push(generate(&coordinator, "light", 200).await.unwrap());
    }
    assert_eq!(Class::of(&generate(&coordinator, "light", 1).await.unwrap_err()), Class::Overloaded);
}
