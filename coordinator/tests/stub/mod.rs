//! A coordinator in this process and stub workers ([`worker`]) that compute nothing. Tokens are bytes, so ids and text are
//! the same thing.
//! For: the front's tests and the bench of the added time to first token.

#![allow(dead_code, unused_imports, reason = "each user needs a part of it")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test harness fails by panicking")]

mod model;
mod worker;

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use lockstep_coordinator::{CoordinatorConfig, CoordinatorError, ModelSpec};
use lockstep_proto::v1;
use lockstep_sharding::PlanOptions;
use tokio::{sync::oneshot, task::JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Status, transport::Channel};

pub use self::worker::{BAD_SOURCE, HTTP_ADDRESS, SLOW_SOURCE, SLOWLY, StubState, StubWorker};

/// Context of the stub's model, tokens.
pub const MODEL_TOKENS: usize = 1 << 18;
/// Longest sequence that [`config`] has served, tokens.
pub const MAX_TOKENS: usize = 512;
/// Model name in the tests.
pub const MODEL: &str = "stub-model";
/// Longest wait for what a machine that is not busy does at once.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// Between two looks.
pub const POLL: Duration = Duration::from_millis(10);

/// A coordinator in this process.
pub struct Coordinator {
    /// gRPC address.
    pub grpc: SocketAddr,
    /// HTTP address.
    pub http: SocketAddr,
    /// Tells it to stop.
    pub shutdown: CancellationToken,
    /// Its end.
    pub ended: JoinHandle<Result<(), CoordinatorError>>,
    _stop: DropGuard,
}

/// Settings for tests: any ports, the stub's model, short waits, but for silences: a busy machine is no lost worker.
pub fn config(policy: &str, min_workers: usize) -> CoordinatorConfig {
    let plan_options = PlanOptions { max_sequence_tokens: Some(MAX_TOKENS), ..PlanOptions::default() };
    CoordinatorConfig {
        grpc_listen: "127.0.0.1:0".parse().unwrap(),
        http_listen: "127.0.0.1:0".parse().unwrap(),
        coordinator_id: "coordinator".into(),
        etcd: None,
        model: Some(ModelSpec {
            name: MODEL.into(),
            source: "/models/stub.gguf".into(),
            policy: policy.parse().unwrap(),
            min_workers,
            plan_options,
        }),
        settings_revision: 0,
        plan_options,
        min_workers_timeout: None,
        replan_delay: None,
        lease: Duration::from_secs(10),
        max_concurrent_requests: 64,
        failover_timeout: Duration::from_secs(5),
        slow_reader_timeout: Duration::from_secs(60),
        drain_timeout: Duration::from_secs(5),
        tenants_file: None,
        browser_folder: None,
        client_tls: None,
        cluster_tls: None,
        allow_insecure: false,
    }
}

impl Coordinator {
    /// Starts one and waits until it listens.
    pub async fn start(config: CoordinatorConfig) -> Self {
        let shutdown = CancellationToken::new();
        let (sender, receiver) = oneshot::channel();
        let token = shutdown.clone();
        let ended = tokio::spawn(async move {
            lockstep_coordinator::run(config, token, |grpc, http| sender.send((grpc, http)).unwrap()).await
        });
        let (grpc, http) = receiver.await.unwrap();
        Self { grpc, http, shutdown: shutdown.clone(), ended, _stop: shutdown.drop_guard() }
    }

    /// A client of Inference.
    pub async fn inference(&self) -> v1::inference_client::InferenceClient<Channel> {
        v1::inference_client::InferenceClient::connect(format!("http://{}", self.grpc)).await.unwrap()
    }

    /// A client of Admin.
    pub async fn admin(&self) -> v1::admin_client::AdminClient<Channel> {
        v1::admin_client::AdminClient::connect(format!("http://{}", self.grpc)).await.unwrap()
    }

    /// Waits until the model's readiness is as wanted.
    pub async fn wait_ready(&self, wanted: bool) {
        let mut client = self.inference().await;
        let end = Instant::now() + PATIENCE;
        loop {
            let models = client.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
            if models.iter().any(|model| model.ready) == wanted {
                return;
            }
            assert!(Instant::now() < end, "readiness did not become {wanted}: {:?}", self.status().await);
            tokio::time::sleep(POLL).await;
        }
    }

    /// What operators see.
    pub async fn status(&self) -> v1::GetClusterResponse {
        self.admin().await.get_cluster(v1::GetClusterRequest {}).await.unwrap().into_inner()
    }

    /// What operators see, once it is as `wanted`.
    pub async fn becomes(
        &self,
        what: &str,
        wanted: impl Fn(&v1::GetClusterResponse) -> bool,
    ) -> v1::GetClusterResponse {
        let end = Instant::now() + PATIENCE;
        loop {
            let status = self.status().await;
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < end, "not so within {PATIENCE:?}: {what}: {status:?}");
            tokio::time::sleep(POLL).await;
        }
    }

    /// The replicas of the first model, once they are as `wanted`.
    pub async fn replicas(&self, what: &str, wanted: impl Fn(&[v1::ReplicaStatus]) -> bool) -> Vec<v1::ReplicaStatus> {
        let status = self.becomes(what, |status| status.models.first().is_some_and(|model| wanted(&model.replicas)));
        status.await.models.remove(0).replicas
    }

    /// Waits until the first model's problem says that.
    pub async fn wait_problem(&self, text: &str) {
        self.becomes(text, |status| status.models.first().is_some_and(|model| model.problem.contains(text))).await;
    }
}

/// A coordinator whose model is ready on `num_workers` stub workers, with all its replicas.
pub async fn cluster(num_workers: usize, config: CoordinatorConfig) -> (Coordinator, Vec<StubWorker>) {
    let coordinator = Coordinator::start(config).await;
    let mut workers = Vec::new();
    for index in 0..num_workers {
        workers.push(StubWorker::start(&format!("w{index}"), coordinator.grpc).await);
    }
    let are_ready = |it: &[v1::ReplicaStatus]| it.iter().all(|replica| replica.state() == v1::ReplicaState::Ready);
    coordinator.replicas("all are ready", |replicas| !replicas.is_empty() && are_ready(replicas)).await;
    (coordinator, workers)
}

/// Polls until `condition` or [`PATIENCE`].
pub async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "{what} did not happen within {PATIENCE:?}");
        tokio::time::sleep(POLL).await;
    }
}

/// A request for `max_tokens` tokens after "hi".
pub fn request(max_tokens: u32) -> v1::GenerateRequest {
    v1::GenerateRequest {
        input: Some(v1::generate_request::Input::Prompt("hi".into())),
        sampling: Some(v1::SamplingParams { max_tokens: Some(max_tokens), ..Default::default() }),
        ..Default::default()
    }
}

/// Everything that a stream brought.
#[derive(Debug, Default)]
pub struct Collected {
    /// All text.
    pub text: String,
    /// All tokens.
    pub token_ids: Vec<u32>,
    /// All log-probabilities.
    pub logprobs: Vec<v1::TokenLogprobs>,
    /// The last message.
    pub finish: Option<v1::Finish>,
}

/// Reads a stream to its end.
pub async fn collect(mut stream: tonic::Streaming<v1::GenerateResponse>) -> Result<Collected, Status> {
    let mut collected = Collected::default();
    while let Some(message) = stream.message().await? {
        match message.event.unwrap() {
            v1::generate_response::Event::Delta(delta) => {
                collected.text.push_str(&delta.text);
                collected.token_ids.extend(delta.token_ids);
                collected.logprobs.extend(delta.logprobs);
            }
            v1::generate_response::Event::Finish(finish) => collected.finish = Some(finish),
        }
    }
    Ok(collected)
}
