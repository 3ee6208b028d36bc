//! A worker's whole life against a stub coordinator: register, describe, load, run, unload, drain; and what it refuses.

use std::{net::SocketAddr, time::Duration};

use crate::cluster::{block_on, cut, test_model};
use lockstep_proto::{
    prefix::{BlockHash, block_hashes},
    status::Class,
    v1::{
        self,
        cluster_server::{Cluster, ClusterServer},
        sequence_event::Event,
        worker_client::WorkerClient,
        worker_report::Report,
    },
};
use lockstep_sharding::ShardPlan;
use lockstep_worker::{
    WorkerConfig, WorkerError,
    config::RegistryAddress,
    devices::{DeviceSelection, DeviceSettings},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc,
    task::JoinHandle,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Channel, Server, server::TcpIncoming},
};

const WAIT: Duration = Duration::from_secs(20);
const BLOCK_SIZE: usize = 16;
const PROMPT: [u32; 5] = [504, 3575, 282, 4649, 314];

/// Passes every report on, or refuses every worker.
struct StubCoordinator {
    reports: mpsc::Sender<Report>,
    refuses: bool,
}

#[tonic::async_trait]
impl Cluster for StubCoordinator {
    type RegisterStream = ReceiverStream<Result<v1::RegistrationReply, Status>>;

    async fn register(
        &self,
        request: Request<Streaming<v1::WorkerReport>>,
    ) -> Result<Response<Self::RegisterStream>, Status> {
        if self.refuses {
            return Err(Class::AlreadyExists.status("worker_id \"w\" is registered already"));
        }
        let (replies, stream) = mpsc::channel(1);
        let reports = self.reports.clone();
        tokio::spawn(async move {
            let mut incoming = request.into_inner();
            replies.send(Ok(v1::RegistrationReply { lease_ms: 300 })).await.unwrap();
            while let Ok(Some(message)) = incoming.message().await {
                if reports.send(message.report.unwrap()).await.is_err() {
                    break;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// A worker under a stub coordinator.
struct Harness {
    shutdown: CancellationToken,
    worker: JoinHandle<Result<(), WorkerError>>,
    hello: v1::WorkerHello,
    reports: mpsc::Receiver<Report>,
    client: WorkerClient<Channel>,
}

async fn stub(refuses: bool) -> (String, mpsc::Receiver<Report>) {
    let (reports, receiver) = mpsc::channel(1000);
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = incoming.local_addr().unwrap();
    let stub = ClusterServer::new(StubCoordinator { reports, refuses });
    tokio::spawn(Server::builder().add_service(stub).serve_with_incoming(incoming));
    (format!("http://{address}"), receiver)
}

fn cpu(num_cpu_devices: usize) -> DeviceSettings {
    let selection = DeviceSelection::Cpu;
    DeviceSettings { selection, num_cpu_devices, threads_per_device: 1, ..DeviceSettings::default() }
}

fn config(coordinator: String) -> WorkerConfig {
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    WorkerConfig {
        cluster_tls: None,
        allow_insecure: false,
        worker_id: "worker-0".to_owned(),
        registry: RegistryAddress::Coordinator(coordinator),
        listen: any,
        rank_listen: any,
        http_listen: ([127, 0, 0, 1], 0).into(),
        advertise_host: "127.0.0.1".to_owned(),
        devices: cpu(2),
        memory_bytes: None,
        collective_timeout: Duration::from_secs(30),
        max_waiting_sequences: 4,
        is_prefix_caching: true,
        drain_timeout: Duration::from_secs(20),
    }
}

impl Harness {
    async fn start() -> Self {
        let (coordinator, mut reports) = stub(false).await;
        let shutdown = CancellationToken::new();
        let worker = tokio::spawn(lockstep_worker::run(config(coordinator), shutdown.clone()));
        let Some(Report::Hello(hello)) = tokio::time::timeout(WAIT, reports.recv()).await.unwrap() else {
            panic!("the first report is no hello");
        };
        let client = WorkerClient::connect(format!("http://{}", hello.address)).await.unwrap();
        let client = client.max_decoding_message_size(lockstep_proto::MAX_MESSAGE_BYTES);
        Self { shutdown, worker, hello, reports, client }
    }

    /// A load of the replica whose index is `replica`, of a plan with a replica on each of `devices`.
    async fn load_request(&mut self, plan_epoch: u64, replica: u32, devices: &[usize]) -> v1::LoadReplicaRequest {
        let source = test_model().display().to_string();
        let request = v1::DescribeModelRequest { source: source.clone() };
        let described = self.client.describe_model(request).await.unwrap();
        let shape = lockstep_sharding::codec::decode_shape(&described.into_inner().shape).unwrap();
        let replica_on = |device: &usize| {
            let mut plan = cut(&shape, &[1], 128);
            plan.stages[0].ranks[0].local_rank = *device;
            plan
        };
        let plan = ShardPlan {
            block_size: BLOCK_SIZE,
            max_sequence_tokens: 512,
            max_num_sequences: 4,
            max_step_tokens: 64,
            reason: String::new(),
            replicas: devices.iter().map(replica_on).collect(),
        };
        v1::LoadReplicaRequest {
            model: "m".to_owned(),
            source,
            plan_epoch,
            replica,
            plan: lockstep_sharding::encode(&plan).unwrap().into(),
            secret: vec![7; 32],
            rank_addresses: vec![self.hello.rank_address.clone()],
            leader_term: 0,
            index: replica,
        }
    }

    async fn load(&mut self, plan_epoch: u64) -> Result<(), Status> {
        self.load_on(plan_epoch, 0, &[0]).await
    }

    async fn load_on(&mut self, plan_epoch: u64, replica: u32, devices: &[usize]) -> Result<(), Status> {
        let request = self.load_request(plan_epoch, replica, devices).await;
        let mut progress = self.client.load_replica(request).await?.into_inner();
        let mut last = v1::LoadReplicaProgress::default();
        while let Some(message) = progress.message().await? {
            assert!(message.loaded_bytes >= last.loaded_bytes);
            last = message;
        }
        assert!(last.ready && last.loaded_bytes == last.total_bytes && last.total_bytes > 0, "{last:?}");
        Ok(())
    }

    /// What `/readyz` answers, as an error if the worker is not ready.
    async fn readiness(&self) -> Result<(), String> {
        let mut stream = TcpStream::connect(&self.hello.http_address).await.unwrap();
        stream.write_all(b"GET /readyz HTTP/1.0\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        if answer.split(' ').nth(1) == Some("200") { Ok(()) } else { Err(answer) }
    }

    async fn unload(&mut self, plan_epoch: u64, replica: u32) {
        self.unload_as(0, plan_epoch, replica).await.unwrap();
    }

    /// The same as a coordinator that leads in `leader_term`.
    async fn unload_as(&mut self, leader_term: u64, plan_epoch: u64, replica: u32) -> Result<(), Status> {
        let part = v1::UnloadReplicaRequest { model: "m".to_owned(), plan_epoch, replica, leader_term };
        self.client.unload_replica(part).await.map(drop)
    }

    /// Waits until exactly these parts, by epoch and replica, are held.
    async fn holds(&mut self, parts: &[(u64, u32)]) {
        let is_part = |report: &v1::ReplicaReport| (report.plan_epoch, report.replica);
        self.heartbeat(|heartbeat| heartbeat.replicas.iter().map(is_part).eq(parts.iter().copied())).await;
    }

    async fn run(&mut self, plan_epoch: u64, max_tokens: u32) -> Result<Streaming<v1::SequenceEvent>, Status> {
        self.run_on(plan_epoch, 0, max_tokens).await
    }

    async fn run_on(
        &mut self,
        plan_epoch: u64,
        replica: u32,
        max_tokens: u32,
    ) -> Result<Streaming<v1::SequenceEvent>, Status> {
        let sampling = v1::SamplingParams {
            max_tokens: Some(max_tokens),
            temperature: Some(0.0),
            seed: Some(1),
            ..Default::default()
        };
        let request = v1::RunSequenceRequest {
            model: "m".to_owned(),
            plan_epoch,
            replica,
            request_id: "r".to_owned(),
            token_ids: PROMPT.to_vec(),
            sampling: Some(sampling),
            ..Default::default()
        };
        Ok(self.client.run_sequence(request).await?.into_inner())
    }

    /// Waits for a heartbeat that `accepts` likes.
    async fn heartbeat(&mut self, accepts: impl Fn(&v1::Heartbeat) -> bool) -> v1::Heartbeat {
        let found = async {
            loop {
                match self.reports.recv().await {
                    Some(Report::Heartbeat(heartbeat)) if accepts(&heartbeat) => return heartbeat,
                    Some(_) => {}
                    None => panic!("the registration ended"),
                }
            }
        };
        tokio::time::timeout(WAIT, found).await.unwrap()
    }
}

async fn collect(mut events: Streaming<v1::SequenceEvent>) -> (Vec<u32>, v1::SequenceFinish) {
    let mut token_ids = Vec::new();
    loop {
        match events.message().await.unwrap().unwrap().event.unwrap() {
            Event::Tokens(tokens) => token_ids.extend(tokens.token_ids),
            Event::Finish(finish) => return (token_ids, finish),
        }
    }
}

#[test]
fn followers_learn_which_prefixes_a_leader_holds() {
    block_on(async {
        let mut harness = Harness::start().await;
        harness.load(1).await.unwrap();
        let follow = v1::FollowPrefixesRequest { model: "m".to_owned(), plan_epoch: 1, replica: 0 };
        let mut early = harness.client.follow_prefixes(follow.clone()).await.unwrap().into_inner();
        assert_eq!(early.message().await.unwrap().unwrap(), v1::PrefixChanges::default());
        let (token_ids, _) = collect(harness.run(1, 60).await.unwrap()).await;
        // The last token is yielded and never computed.
        let token_ids = [&PROMPT[..], &token_ids[..59]].concat();
        let root = BlockHash::root("", false);
        let names: Vec<u64> = block_hashes(root, &token_ids, BLOCK_SIZE).map(BlockHash::short).collect();
        let mut added = Vec::new();
        while added.len() < names.len() {
            added.extend(tokio::time::timeout(WAIT, early.message()).await.unwrap().unwrap().unwrap().added);
        }
        assert_eq!(added, names);
        let mut late = harness.client.follow_prefixes(follow.clone()).await.unwrap().into_inner();
        let mut held = late.message().await.unwrap().unwrap().added;
        held.sort_unstable();
        added.sort_unstable();
        assert_eq!(held, added);
        harness.unload(1, 0).await;
        for mut reports in [early, late] {
            assert_eq!(tokio::time::timeout(WAIT, reports.message()).await.unwrap().unwrap(), None);
        }
        let stale = harness.client.follow_prefixes(follow).await.unwrap_err();
        assert_eq!(Class::of(&stale), Class::StaleEpoch);
    });
}

#[test]
fn a_worker_loads_runs_unloads_and_drains() {
    block_on(async {
        let mut harness = Harness::start().await;
        assert_eq!(harness.hello.devices.len(), 2);
        let early = harness.run(1, 4).await.unwrap_err();
        assert_eq!(Class::of(&early), Class::StaleEpoch);
        harness.load(1).await.unwrap();
        harness.load(1).await.unwrap();

        let (token_ids, finish) = collect(harness.run(1, 8).await.unwrap()).await;
        assert_eq!((token_ids.len(), finish.reason()), (8, v1::FinishReason::Length));
        assert_eq!(finish.usage.unwrap().prompt_tokens, 5);
        let stale = harness.run(2, 4).await.unwrap_err();
        assert_eq!(Class::of(&stale), Class::StaleEpoch);
        let invalid = harness.run(1, 0).await.unwrap_err();
        assert_eq!(Class::of(&invalid), Class::InvalidRequest);

        // A stream that is dropped frees its blocks.
        let mut abandoned = harness.run(1, 400).await.unwrap();
        abandoned.message().await.unwrap().unwrap();
        let engine = |heartbeat: &v1::Heartbeat| heartbeat.replicas.first().and_then(|replica| replica.engine);
        harness.heartbeat(|heartbeat| engine(heartbeat).is_some_and(|engine| engine.num_running_sequences == 1)).await;
        drop(abandoned);
        let freed = |engine: v1::EngineStatus| {
            engine.num_running_sequences == 0 && engine.num_free_kv_blocks == engine.num_kv_blocks
        };
        harness.heartbeat(|heartbeat| engine(heartbeat).is_some_and(freed)).await;

        // A newer epoch takes over and ends what still runs on the older one.
        let mut cut_off = harness.run(1, 400).await.unwrap();
        cut_off.message().await.unwrap().unwrap();
        harness.load(2).await.unwrap();
        let lost = loop {
            match cut_off.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("the stream ended without a status"),
                Err(status) => break status,
            }
        };
        assert_eq!(Class::of(&lost), Class::WorkerLost);
        assert_eq!(Class::of(&harness.load(1).await.unwrap_err()), Class::StaleEpoch);

        // Shutdown lets sequences finish, takes no new part, and waits until its part is withdrawn: this test is the
        // coordinator, which goes on sending requests until others can take them.
        let last = harness.run(2, 30).await.unwrap();
        harness.shutdown.cancel();
        let draining = harness.heartbeat(|heartbeat| heartbeat.draining).await;
        assert!((15_000..=20_000).contains(&draining.drain_left_ms), "{draining:?}");
        assert_eq!(collect(last).await.0.len(), 30);
        assert_eq!(collect(harness.run(2, 4).await.unwrap()).await.0.len(), 4);
        let refused = harness.load(3).await.unwrap_err();
        assert_eq!(Class::of(&refused), Class::ShuttingDown);
        assert!(!harness.worker.is_finished());
        harness.unload(2, 0).await;
        tokio::time::timeout(WAIT, harness.worker).await.unwrap().unwrap().unwrap();
    });
}

#[test]
fn unloading_frees_the_replica() {
    block_on(async {
        let mut harness = Harness::start().await;
        harness.load(3).await.unwrap();
        harness.holds(&[(3, 0)]).await;
        harness.unload(3, 0).await;
        harness.unload(3, 0).await;
        harness.holds(&[]).await;
        assert_eq!(Class::of(&harness.run(3, 4).await.unwrap_err()), Class::StaleEpoch);
        harness.shutdown.cancel();
        tokio::time::timeout(WAIT, harness.worker).await.unwrap().unwrap().unwrap();
    });
}

#[test]
fn a_worker_whose_load_failed_is_not_ready_until_another_succeeds() {
    block_on(async {
        let mut harness = Harness::start().await;
        let registered = async {
            while harness.readiness().await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(WAIT, registered).await.unwrap();
        let good = harness.load_request(1, 0, &[0]).await;
        let source = "/nowhere/m.gguf".to_owned();
        let mut progress =
            harness.client.load_replica(v1::LoadReplicaRequest { source, ..good }).await.unwrap().into_inner();
        while let Ok(Some(_)) = progress.message().await {}
        let problem = harness.readiness().await.unwrap_err();
        assert!(problem.contains("\"m\" could not be loaded") && problem.contains("/nowhere/m.gguf"), "{problem}");
        // Coordinators take back what did not load, before they try again.
        harness.unload(1, 0).await;
        assert_eq!(harness.readiness().await.unwrap_err(), problem);
        harness.load(2).await.unwrap();
        assert_eq!(harness.readiness().await, Ok(()));
        harness.unload(2, 0).await;
        harness.shutdown.cancel();
        tokio::time::timeout(WAIT, harness.worker).await.unwrap().unwrap().unwrap();
    });
}

#[test]
fn a_replacement_leaves_the_other_devices_alone() {
    block_on(async {
        let mut harness = Harness::start().await;
        harness.load_on(1, 0, &[0, 1]).await.unwrap();
        harness.load_on(1, 1, &[0, 1]).await.unwrap();
        let healthy = harness.run_on(1, 0, 60).await.unwrap();
        // Replica 1 of epoch 1 is replaced by replica 0 of epoch 2 on its device.
        harness.load_on(2, 0, &[1]).await.unwrap();
        harness.holds(&[(1, 0), (2, 0)]).await;
        assert_eq!(collect(healthy).await.0.len(), 60);
        assert_eq!(collect(harness.run_on(2, 0, 4).await.unwrap()).await.0.len(), 4);
        assert_eq!(Class::of(&harness.run_on(1, 1, 4).await.unwrap_err()), Class::StaleEpoch);

        harness.unload(2, 0).await;
        harness.holds(&[(1, 0)]).await;
        assert_eq!(collect(harness.run_on(1, 0, 4).await.unwrap()).await.0.len(), 4);
        harness.unload(1, 0).await;
        harness.shutdown.cancel();
        tokio::time::timeout(WAIT, harness.worker).await.unwrap().unwrap().unwrap();
    });
}

#[test]
fn unloading_waits_for_the_load_that_it_ends() {
    block_on(async {
        let mut harness = Harness::start().await;
        let request = harness.load_request(1, 0, &[0]).await;
        let mut progress = harness.client.load_replica(request).await.unwrap().into_inner();
        harness.unload(1, 0).await;
        // The heartbeat after the next was certainly made after the answer.
        while harness.reports.try_recv().is_ok() {}
        harness.heartbeat(|_| true).await;
        let heartbeat = harness.heartbeat(|_| true).await;
        assert!(heartbeat.replicas.is_empty(), "{heartbeat:?}");
        // The load may have been ready before; either way its stream is at its end.
        let ended = async { while let Ok(Some(_)) = progress.message().await {} };
        tokio::time::timeout(WAIT, ended).await.unwrap();
        harness.shutdown.cancel();
        tokio::time::timeout(WAIT, harness.worker).await.unwrap().unwrap().unwrap();
    });
}

#[test]
fn who_led_before_changes_nothing() {
    block_on(async {
        let mut harness = Harness::start().await;
        let of_term = |leader_term, request| v1::LoadReplicaRequest { leader_term, ..request };
        let load = async |harness: &mut Harness, term, epoch| {
            let request = of_term(term, harness.load_request(epoch, 0, &[0]).await);
            let mut progress = harness.client.load_replica(request).await?.into_inner();
            while progress.message().await?.is_some() {}
            Ok::<_, Status>(())
        };
        load(&mut harness, 7, 1).await.unwrap();
        load(&mut harness, 9, 2).await.unwrap();
        // Whoever led in term 7 knows nothing of epoch 2, and would free it or plan on its device.
        let refused =
            [harness.unload_as(7, 2, 0).await, load(&mut harness, 7, 3).await, load(&mut harness, 0, 4).await];
        for status in refused.map(Result::unwrap_err) {
            assert_eq!(Class::of(&status), Class::StaleEpoch);
            assert!(status.message().contains("term 9 leads"), "{status:?}");
        }
        harness.holds(&[(2, 0)]).await;
        assert_eq!(collect(harness.run(2, 4).await.unwrap()).await.0.len(), 4);
        harness.unload_as(9, 2, 0).await.unwrap();
        harness.holds(&[]).await;
        harness.shutdown.cancel();
        tokio::time::timeout(WAIT, harness.worker).await.unwrap().unwrap().unwrap();
    });
}

#[test]
fn what_cannot_start_says_why() {
    block_on(async {
        let (coordinator, _reports) = stub(true).await;
        let run = |config| tokio::time::timeout(WAIT, lockstep_worker::run(config, CancellationToken::new()));
        let twin = run(config(coordinator.clone())).await.unwrap().unwrap_err();
        assert!(twin.to_string().contains("registered already"), "{twin}");

        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let listen = taken.local_addr().unwrap();
        let in_use = run(WorkerConfig { listen, ..config(coordinator.clone()) }).await.unwrap().unwrap_err();
        assert!(in_use.to_string().contains(&listen.to_string()), "{in_use}");

        let none = run(WorkerConfig { devices: cpu(0), ..config(coordinator) }).await.unwrap().unwrap_err();
        assert!(none.to_string().contains("num_devices"), "{none}");
    });
}
