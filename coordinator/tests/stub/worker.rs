//! A worker that speaks the real protocol over loopback but computes nothing: it answers every sequence with the bytes of a
//! script.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{Stream, StreamExt, TryStreamExt};
use lockstep_proto::{
    status::Class,
    v1::{self, worker_report::Report, worker_server::Worker},
};
use lockstep_transport::{ClusterTls, Connector, Gate, Incoming, Outbound};
use tokio::{
    net::TcpListener,
    sync::{broadcast, mpsc},
    task::JoinHandle,
};
use tokio_stream::wrappers::{BroadcastStream, ReceiverStream};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{
    Request, Response, Status,
    transport::{Channel, Server},
};

use super::model;

/// Where the stubs say that their metrics are.
pub const HTTP_ADDRESS: &str = "stub-host:7072";
/// A source that the stub cannot describe.
pub const BAD_SOURCE: &str = "/models/none.gguf";
/// One for which it takes so long.
pub const SLOW_SOURCE: &str = "/models/slow.gguf";
/// See `SLOW_SOURCE`.
pub const SLOWLY: Duration = Duration::from_millis(1500);

const HEARTBEAT_PERIOD: Duration = Duration::from_millis(50);

/// How a stub worker behaves; shared with the test.
pub struct StubState {
    /// Text that its sequences spell, over and over.
    pub script: Mutex<String>,
    /// Pause before each token, and before a refusal.
    pub token_delay: Mutex<Duration>,
    /// Its sequences yield no token from this index of their output on.
    pub halts_at: Mutex<usize>,
    /// It breaks under every sequence that it takes; loaded again it works.
    pub is_poisoned: Mutex<bool>,
    /// The class with which it refuses the next sequence.
    pub refusal: Mutex<Option<Class>>,
    /// Why its replica part is broken, for the next heartbeat.
    pub problem: Mutex<String>,
    /// The worker that it cannot reach, if that is the problem.
    pub unreachable: Mutex<String>,
    /// Why its steps do not come back, for the next heartbeat.
    pub stall: Mutex<String>,
    /// It drains, and how much time it says is left.
    pub drain_left: Mutex<Option<Duration>>,
    /// Heartbeats are sent.
    pub is_beating: Mutex<bool>,
    /// Sequences dropped by the coordinator before they were finished.
    pub num_cancelled: AtomicUsize,
    /// Sequences now running.
    pub num_running: AtomicUsize,
    /// Alternatives in the log-probabilities of its tokens.
    pub num_top: AtomicUsize,
    /// Messages with tokens that it has sent.
    pub num_sent: AtomicUsize,
    /// Requests of UnloadReplica.
    pub unloads: Mutex<Vec<v1::UnloadReplicaRequest>>,
    /// Descriptions never come; how many were asked for.
    pub describes_never: Mutex<bool>,
    pub num_described: AtomicUsize,
    /// How long a load takes.
    pub load_delay: Mutex<Duration>,
    /// Loads fail, and so do descriptions.
    pub refuses_loads: Mutex<bool>,
    /// Unloads fail.
    pub refuses_unloads: Mutex<bool>,
    /// The parts that it holds and reports.
    pub held: Mutex<Vec<v1::UnloadReplicaRequest>>,
    /// Requests of LoadReplica.
    pub loads: Mutex<Vec<v1::LoadReplicaRequest>>,
    /// The last request of RunSequence.
    pub last_sequence: Mutex<Option<v1::RunSequenceRequest>>,
    /// What its sequences are said to have found computed.
    pub cached_tokens: Mutex<u32>,
    /// Reports of prefixes to those who follow; the number of these is how many do.
    pub prefix_changes: broadcast::Sender<v1::PrefixChanges>,
    /// Its session, where it registers in etcd.
    pub session: u64,
    /// Fires at its end.
    pub stop: CancellationToken,
}

impl Default for StubState {
    fn default() -> Self {
        Self {
            script: Mutex::new("hello world ".into()),
            token_delay: Mutex::default(),
            halts_at: Mutex::new(usize::MAX),
            is_poisoned: Mutex::default(),
            refusal: Mutex::default(),
            problem: Mutex::default(),
            unreachable: Mutex::default(),
            stall: Mutex::default(),
            drain_left: Mutex::default(),
            is_beating: Mutex::new(true),
            num_cancelled: AtomicUsize::default(),
            num_running: AtomicUsize::default(),
            num_top: AtomicUsize::default(),
            num_sent: AtomicUsize::default(),
            unloads: Mutex::default(),
            describes_never: Mutex::default(),
            num_described: AtomicUsize::default(),
            load_delay: Mutex::default(),
            refuses_loads: Mutex::default(),
            refuses_unloads: Mutex::default(),
            held: Mutex::default(),
            loads: Mutex::default(),
            last_sequence: Mutex::default(),
            cached_tokens: Mutex::default(),
            prefix_changes: broadcast::Sender::new(16),
            session: rand::random(),
            stop: CancellationToken::new(),
        }
    }
}

impl StubState {
    fn heartbeat(&self) -> v1::Heartbeat {
        let problem = self.problem.lock().unwrap().clone();
        let held = self.held.lock().unwrap();
        let replicas = held.iter().map(|part| v1::ReplicaReport {
            model: part.model.clone(),
            plan_epoch: part.plan_epoch,
            replica: part.replica,
            problem: problem.clone(),
            unreachable_worker: self.unreachable.lock().unwrap().clone(),
            stall: self.stall.lock().unwrap().clone(),
            ranks: Vec::new(),
            engine: Some(v1::EngineStatus {
                num_kv_blocks: 16,
                num_free_kv_blocks: 12,
                num_running_sequences: self.num_running.load(Ordering::SeqCst) as u32,
                ..Default::default()
            }),
        });
        let drain_left = *self.drain_left.lock().unwrap();
        v1::Heartbeat {
            replicas: replicas.collect(),
            draining: drain_left.is_some(),
            drain_left_ms: drain_left.map_or(0, |left| left.as_millis() as u64),
        }
    }
}

#[derive(Clone)]
struct StubService(Arc<StubState>);

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for StubService {
    type LoadReplicaStream = Events<v1::LoadReplicaProgress>;
    type RunSequenceStream = ReceiverStream<Result<v1::SequenceEvent, Status>>;

    async fn describe_model(
        &self,
        request: Request<v1::DescribeModelRequest>,
    ) -> Result<Response<v1::DescribeModelResponse>, Status> {
        let source = request.into_inner().source;
        self.0.num_described.fetch_add(1, Ordering::SeqCst);
        if *self.0.describes_never.lock().unwrap() {
            std::future::pending::<()>().await;
        }
        if source == BAD_SOURCE || *self.0.refuses_loads.lock().unwrap() {
            return Err(Class::InvalidRequest.status("no such file"));
        }
        if source == SLOW_SOURCE {
            tokio::time::sleep(SLOWLY).await;
        }
        Ok(Response::new(v1::DescribeModelResponse {
            shape: lockstep_sharding::encode_shape(&model::shape()).unwrap(),
            tokenizer_json: model::tokenizer_json(),
            chat_template: "{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('role robot is unknown') }}{% endif %}{{ message.role }}:{{ message.content }};{% endfor %}".into(),
            bos_token_id: None,
            add_bos_token: false,
            eos_token_ids: vec![u32::from(source == SLOW_SOURCE)],
        }))
    }

    async fn load_replica(
        &self,
        request: Request<v1::LoadReplicaRequest>,
    ) -> Result<Response<Self::LoadReplicaStream>, Status> {
        let request = request.into_inner();
        let v1::LoadReplicaRequest { model, plan_epoch, replica, .. } = request.clone();
        self.0.loads.lock().unwrap().push(request);
        if *self.0.refuses_loads.lock().unwrap() {
            return Err(Class::Internal.status("no memory"));
        }
        let part = v1::UnloadReplicaRequest { model, plan_epoch, replica, leader_term: 0 };
        self.0.held.lock().unwrap().push(part);
        let delay = *self.0.load_delay.lock().unwrap();
        tokio::time::sleep(delay).await;
        let steps = [(50, false), (100, true)];
        let messages =
            steps.map(|(loaded_bytes, ready)| Ok(v1::LoadReplicaProgress { loaded_bytes, total_bytes: 100, ready }));
        Ok(Response::new(Box::pin(futures::stream::iter(messages))))
    }

    async fn unload_replica(
        &self,
        request: Request<v1::UnloadReplicaRequest>,
    ) -> Result<Response<v1::UnloadReplicaResponse>, Status> {
        let part = v1::UnloadReplicaRequest { leader_term: 0, ..request.into_inner() };
        if *self.0.refuses_unloads.lock().unwrap() {
            return Err(Class::Internal.status("it is stuck"));
        }
        self.0.held.lock().unwrap().retain(|held| *held != part);
        self.0.unloads.lock().unwrap().push(part);
        Ok(Response::new(v1::UnloadReplicaResponse {}))
    }

    async fn run_sequence(
        &self,
        request: Request<v1::RunSequenceRequest>,
    ) -> Result<Response<Self::RunSequenceStream>, Status> {
        let request = request.into_inner();
        let v1::RunSequenceRequest { model, plan_epoch, replica, .. } = request.clone();
        if !self.0.held.lock().unwrap().contains(&v1::UnloadReplicaRequest {
            model,
            plan_epoch,
            replica,
            leader_term: 0,
        }) {
            return Err(Class::StaleEpoch.status("not held on 10.0.0.1"));
        }
        let refusal = self.0.refusal.lock().unwrap().take();
        if let Some(class) = refusal {
            let delay = *self.0.token_delay.lock().unwrap();
            tokio::time::sleep(delay).await;
            return Err(class.status("it is refused on purpose"));
        }
        *self.0.last_sequence.lock().unwrap() = Some(request.clone());
        let (sender, receiver) = mpsc::channel(4);
        let state = Arc::clone(&self.0);
        state.num_running.fetch_add(1, Ordering::SeqCst);
        tokio::spawn(async move {
            let is_complete = spell(&state, request, &sender).await;
            state.num_running.fetch_sub(1, Ordering::SeqCst);
            if !is_complete {
                state.num_cancelled.fetch_add(1, Ordering::SeqCst);
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    type FollowPrefixesStream = Events<v1::PrefixChanges>;

    async fn follow_prefixes(
        &self,
        _request: Request<v1::FollowPrefixesRequest>,
    ) -> Result<Response<Self::FollowPrefixesStream>, Status> {
        let first = futures::stream::iter([Ok(v1::PrefixChanges::default())]);
        let changes = BroadcastStream::new(self.0.prefix_changes.subscribe());
        let changes = changes.map_err(|error| Status::internal(error.to_string()));
        Ok(Response::new(Box::pin(first.chain(changes))))
    }

    type FollowHeartbeatsStream = Events<v1::Heartbeat>;

    async fn follow_heartbeats(
        &self,
        request: Request<v1::FollowHeartbeatsRequest>,
    ) -> Result<Response<Self::FollowHeartbeatsStream>, Status> {
        if request.into_inner().session != self.0.session {
            return Err(Class::StaleEpoch.status("another session"));
        }
        let ticks = tokio_stream::wrappers::IntervalStream::new(tokio::time::interval(HEARTBEAT_PERIOD));
        let state = Arc::clone(&self.0);
        let beats = futures::StreamExt::filter_map(ticks, move |_| {
            let heartbeat = state.is_beating.lock().unwrap().then(|| Ok(state.heartbeat()));
            std::future::ready(heartbeat)
        });
        let stop = self.0.stop.clone().cancelled_owned();
        Ok(Response::new(Box::pin(futures::StreamExt::take_until(beats, stop))))
    }

    async fn drain(&self, _request: Request<v1::DrainRequest>) -> Result<Response<v1::DrainResponse>, Status> {
        Ok(Response::new(v1::DrainResponse {}))
    }
}

/// Sends the script's bytes as tokens; false if the coordinator left.
async fn spell(
    state: &StubState,
    request: v1::RunSequenceRequest,
    sender: &mpsc::Sender<Result<v1::SequenceEvent, Status>>,
) -> bool {
    let sampling = request.sampling.unwrap_or_default();
    let script = state.script.lock().unwrap().clone().into_bytes();
    let delay = *state.token_delay.lock().unwrap();
    if *state.is_poisoned.lock().unwrap() {
        *state.problem.lock().unwrap() = "rank 0: it broke".into();
        let broken = Class::WorkerLost.status("rank 0: it broke");
        return sender.send(Err(broken)).await.is_ok();
    }
    let first = request.num_output_tokens as usize;
    for index in first..sampling.max_tokens() as usize {
        if index >= *state.halts_at.lock().unwrap() {
            sender.closed().await;
            return false;
        }
        if !delay.is_zero() {
            tokio::select! {
                () = tokio::time::sleep(delay) => {}
                () = sender.closed() => return false,
            }
        }
        let token_id = u32::from(script[index % script.len()]);
        let chosen = v1::TokenLogprob { token_id, logprob: -0.5, text: String::new() };
        let top = vec![chosen.clone(); state.num_top.load(Ordering::SeqCst)];
        let logprobs = (sampling.logprobs > 0).then_some(v1::TokenLogprobs { chosen: Some(chosen), top });
        let tokens = v1::SequenceTokens {
            token_ids: vec![token_id],
            logprobs: logprobs.into_iter().collect(),
            queue_ms: (index == first).then_some(0.25),
            cached_tokens: *state.cached_tokens.lock().unwrap(),
        };
        if sender.send(Ok(event(v1::sequence_event::Event::Tokens(tokens)))).await.is_err() {
            return false;
        }
        state.num_sent.fetch_add(1, Ordering::SeqCst);
    }
    if *state.halts_at.lock().unwrap() == sampling.max_tokens() as usize {
        sender.closed().await;
        return false;
    }
    let usage = v1::Usage {
        prompt_tokens: request.token_ids.len() as u32,
        completion_tokens: sampling.max_tokens(),
        cached_tokens: *state.cached_tokens.lock().unwrap(),
    };
    let finish = v1::SequenceFinish {
        reason: v1::FinishReason::Length.into(),
        usage: Some(usage),
        timings: Some(v1::Timings { queue_ms: 0.25, ..Default::default() }),
    };
    sender.send(Ok(event(v1::sequence_event::Event::Finish(finish)))).await.is_ok()
}

fn event(event: v1::sequence_event::Event) -> v1::SequenceEvent {
    v1::SequenceEvent { event: Some(event) }
}

/// A running stub worker; it dies at once when dropped.
pub struct StubWorker {
    /// Its behaviour.
    pub state: Arc<StubState>,
    /// Where its service listens.
    pub address: SocketAddr,
    /// Ends when the coordinator ends the registration, with the status.
    pub registration: JoinHandle<Status>,
    _stop: DropGuard,
}

impl StubWorker {
    /// Serves and registers under `worker_id`; does not wait for the coordinator's answer.
    pub async fn start(worker_id: &str, coordinator: SocketAddr) -> Self {
        Self::start_as(worker_id, coordinator, None).await
    }

    /// The same with a device that is 20 times as fast.
    pub async fn start_fast(worker_id: &str, coordinator: SocketAddr) -> Self {
        let (mut worker, mut hello) = Self::serve(worker_id, None).await;
        let device = &mut hello.devices[0];
        device.name = "fast".into();
        device.memory_bytes_per_second *= 20.0;
        device.operations_per_second *= 20.0;
        worker.registration = tokio::spawn(register(hello, channel(coordinator, None), Arc::clone(&worker.state)));
        worker
    }

    /// The same as a member of a cluster.
    pub async fn start_as(worker_id: &str, coordinator: SocketAddr, tls: Option<ClusterTls>) -> Self {
        let (mut worker, hello) = Self::serve(worker_id, tls.as_ref()).await;
        worker.registration = tokio::spawn(register(hello, channel(coordinator, tls), Arc::clone(&worker.state)));
        worker
    }

    /// Serves, but registers nowhere: with what it would say of itself.
    pub async fn serve(worker_id: &str, tls: Option<&ClusterTls>) -> (Self, v1::WorkerHello) {
        let state = Arc::new(StubState::default());
        let stop = state.stop.clone();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = v1::worker_server::WorkerServer::new(StubService(Arc::clone(&state)));
        let server = Server::builder()
            .add_service(service)
            .serve_with_incoming(Incoming::new(listener, Gate::Members(tls.cloned())).into_stream());
        let stopped = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = server => {}
                () = stopped.cancelled() => {}
            }
        });
        let hello = v1::WorkerHello {
            worker_id: worker_id.into(),
            address: address.to_string(),
            rank_address: address.to_string(),
            host: "stub-host".into(),
            devices: vec![v1::WorkerDevice {
                name: "cpu".into(),
                reason: "stub".into(),
                memory_bytes: 1 << 30,
                memory_bytes_per_second: 1e10,
                operations_per_second: 1e11,
                ..Default::default()
            }],
            version: "0".into(),
            http_address: HTTP_ADDRESS.into(),
        };
        let registration = tokio::spawn(std::future::pending());
        (Self { state, address, registration, _stop: stop.drop_guard() }, hello)
    }
}

/// A connection to the coordinator, made when it is used.
fn channel(coordinator: SocketAddr, tls: Option<ClusterTls>) -> Channel {
    let outbound = tls.map_or(Outbound::ClearText, Outbound::Member);
    let (endpoint, connector) = Connector::new(&coordinator.to_string(), outbound).unwrap();
    endpoint.connect_with_connector_lazy(connector)
}

async fn register(hello: v1::WorkerHello, channel: Channel, state: Arc<StubState>) -> Status {
    let (sender, receiver) = mpsc::channel(4);
    let report = |report| v1::WorkerReport { report: Some(report) };
    sender.send(report(Report::Hello(hello))).await.unwrap();
    let mut client = v1::cluster_client::ClusterClient::new(channel);
    let mut replies = match client.register(ReceiverStream::new(receiver)).await {
        Ok(replies) => replies.into_inner(),
        Err(status) => return status,
    };
    let mut tick = tokio::time::interval(HEARTBEAT_PERIOD);
    loop {
        tokio::select! {
            reply = replies.message() => match reply {
                Ok(Some(_)) => {}
                Ok(None) => return Status::ok("ended"),
                Err(status) => return status,
            },
            _ = tick.tick() => {
                if *state.is_beating.lock().unwrap() {
                    let _ = sender.try_send(report(Report::Heartbeat(state.heartbeat())));
                }
            }
            () = state.stop.cancelled() => return Status::cancelled("stub stopped"),
        }
    }
}
