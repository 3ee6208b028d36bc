//! How long streams stand still when something is lost: two coordinators over etcd, SmolLM2 with TP 2 on workers of one
//! thread, each process in a network namespace of its own (elsewhere behind proxies). Prints a table: from the fault until
//! a coordinator knows of it, and the longest that any of four clients waited for a token. All four outputs are compared
//! with what came undisturbed.
//!
//!   tests/run.sh sets up what it needs; then
//!   cargo bench --workspace --features lockstep-cli/etcd --bench recovery
//!   RECOVERY_ROUNDS=1 cargo bench ...

#![allow(clippy::unwrap_used, clippy::panic, reason = "a bench fails by panicking")]

use std::{
    process::Command,
    time::{Duration, Instant},
};

use lockstep_proto::v1::{GenerateRequest, GetClusterRequest, ReplicaState, ReplicaStatus, SamplingParams};
use lockstep_tests::{
    Client, Output, SharedCluster,
    client::{check_undisturbed, generate_at_any, tokens},
    network::{self, Cut, Network, Node},
    process::PATIENCE,
    shared::Members,
};
use tokio::{task::JoinHandle, time::sleep};

/// Work of some seconds for each stream.
const NUM_TOKENS: u32 = 300;
/// How long streams run before a fault.
const BEFORE: Duration = Duration::from_millis(500);
/// How long stops and cuts last: longer than it should take to notice them and to plan anew.
const LASTS: Duration = Duration::from_secs(12);
/// Between two looks.
const POLL: Duration = Duration::from_millis(2);

#[derive(Clone, Copy)]
enum Fault {
    Kill(usize),
    Stop(usize),
    CutRanks,
    CutOff(usize),
    KillCoordinator,
}

impl Fault {
    const ALL: [Self; 8] = [
        Self::Kill(0),
        Self::Kill(1),
        Self::Stop(0),
        Self::Stop(1),
        Self::CutRanks,
        Self::CutOff(0),
        Self::CutOff(1),
        Self::KillCoordinator,
    ];

    fn name(self) -> String {
        let rank = |rank| if rank == 0 { "the leader" } else { "the other rank" };
        match self {
            Self::Kill(index) => format!("`kill -9` of {}", rank(index)),
            Self::Stop(index) => format!("`kill -STOP` of {}", rank(index)),
            Self::CutRanks => "cut between the ranks".to_owned(),
            Self::CutOff(index) => format!("cut between {} and the coordinators", rank(index)),
            Self::KillCoordinator => "`kill -9` of the coordinator of all clients".to_owned(),
        }
    }
}

fn main() {
    if network::run_apart(&["--bench"]).unwrap() {
        return;
    }
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let rounds = std::env::var("RECOVERY_ROUNDS").map_or(3, |value| value.parse().unwrap());
        let load = std::fs::read_to_string("/proc/loadavg").unwrap();
        let mut is_first = true;
        for (name, num_workers, num_replicas) in
            [("a second replica takes over", 4, 2), ("one replica, a new plan with a spare worker", 3, 1)]
        {
            let mut cluster = Stage::start(num_workers, num_replicas).await;
            if std::mem::take(&mut is_first) {
                let means = cluster.cluster.network.as_ref().unwrap().means();
                println!("faults by {means}, {rounds} rounds, load of the machine {}", load.trim());
                println!("| layout | fault | known after, s | longest gap, s |\n| --- | --- | --- | --- |");
            }
            for fault in Fault::ALL {
                let (mut known, mut gaps) = (Vec::new(), Vec::new());
                for _ in 0..rounds {
                    let (detected, gap) = cluster.strike(fault).await;
                    known.push(detected.as_secs_f64());
                    gaps.push(gap.as_secs_f64());
                }
                println!("| {name} | {} | {} | {} |", fault.name(), range(known), range(gaps));
            }
        }
    });
}

fn range(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    match (values.first(), values.last()) {
        (Some(least), Some(most)) if most - least >= 0.005 => format!("{least:.2} to {most:.2}"),
        (Some(least), _) => format!("{least:.2}"),
        _ => String::new(),
    }
}

/// A cluster, and what its model says undisturbed.
struct Stage {
    cluster: SharedCluster,
    clients: Vec<Client>,
    num_replicas: usize,
    undisturbed: Vec<Output>,
    num_requests: usize,
}

impl Stage {
    async fn start(num_workers: usize, num_replicas: usize) -> Self {
        let network = Network::start(2, num_workers).await.unwrap();
        let policy = &format!("tensor=2,replicas={num_replicas}");
        let members = Members { min_workers: 2, ..Members::new(2, num_workers, policy) };
        let cluster = SharedCluster::start_on(network, members).await.unwrap();
        let clients = vec![cluster.client(0).await.unwrap(), cluster.client(1).await.unwrap()];
        let mut stage = Self { cluster, clients, num_replicas, undisturbed: Vec::new(), num_requests: 0 };
        stage.ready().await;
        for request in requests() {
            stage.undisturbed.push(stage.clients[0].generate(request).await.unwrap());
        }
        stage
    }

    /// Both coordinators' view of ready replicas, once all are.
    async fn ready(&self) -> Vec<ReplicaStatus> {
        let end = Instant::now() + PATIENCE;
        loop {
            let (one, other) = (ready_replicas(&self.clients[0]).await, ready_replicas(&self.clients[1]).await);
            if one.len() == self.num_replicas && other.len() == self.num_replicas {
                return one;
            }
            assert!(Instant::now() < end, "not ready: {}", self.cluster.log());
            sleep(POLL).await;
        }
    }

    /// Inflicts a fault under four streams and undoes it; until it was known, and the longest gap.
    async fn strike(&mut self, fault: Fault) -> (Duration, Duration) {
        let replica = self.ready().await.remove(0);
        let worker = |rank: usize| -> usize { replica.ranks[rank].worker_id["worker-".len()..].parse().unwrap() };
        let workers = [worker(0), worker(1)];
        let streams: Vec<_> = (0..4).map(|index| self.stream(index)).collect();
        sleep(BEFORE).await;
        let begin = Instant::now();
        let network = self.cluster.network.as_ref().unwrap();
        let known = match fault {
            Fault::Kill(rank) => self.kill(Node::Worker(workers[rank]), &replica).await,
            Fault::KillCoordinator => self.kill(Node::Coordinator(0), &replica).await,
            Fault::Stop(rank) => {
                let pid = self.cluster.pid(Node::Worker(workers[rank])).unwrap();
                signal("-STOP", pid);
                let known = self.known(&replica).await;
                sleep(LASTS.saturating_sub(begin.elapsed())).await;
                signal("-CONT", pid);
                known
            }
            Fault::CutRanks | Fault::CutOff(_) => {
                let cut = match fault {
                    Fault::CutOff(rank) => Cut::Coordinators(workers[rank]),
                    _ => Cut::Ranks(workers.to_vec()),
                };
                network.cut(&cut).unwrap();
                let known = self.known(&replica).await;
                sleep(LASTS.saturating_sub(begin.elapsed())).await;
                network.heal(&cut).unwrap();
                known
            }
        };
        let mut longest = Duration::ZERO;
        for (index, stream) in streams.into_iter().enumerate() {
            let (output, gap) = stream.await.unwrap();
            check_undisturbed(&self.undisturbed[index % 2], &output).unwrap_or_else(|error| panic!("{error}"));
            longest = longest.max(gap);
        }
        (known.saturating_duration_since(begin), longest)
    }

    async fn kill(&mut self, node: Node, replica: &ReplicaStatus) -> Instant {
        self.cluster.kill(node).unwrap();
        let known = self.known(replica).await;
        self.cluster.restart(node).unwrap();
        known
    }

    /// When a coordinator that answers has the replica not ready any more, or the first one does not answer.
    async fn known(&self, replica: &ReplicaStatus) -> Instant {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            let Ok(cluster) = self.clients[0].admin.clone().get_cluster(GetClusterRequest {}).await else { break };
            let models = cluster.into_inner().models;
            let mut replicas = models.iter().flat_map(|model| &model.replicas);
            let is_the_same = |other: &&ReplicaStatus| other.ranks == replica.ranks;
            if replicas.find(is_the_same).is_none_or(|replica| replica.state() != ReplicaState::Ready) {
                break;
            }
            sleep(POLL).await;
        }
        Instant::now()
    }

    fn stream(&mut self, index: usize) -> JoinHandle<(Output, Duration)> {
        self.num_requests += 1;
        let request_id = format!("request-{}", self.num_requests);
        let request = GenerateRequest { request_id, ..requests()[index % 2].clone() };
        let clients = self.clients.clone();
        tokio::spawn(async move {
            let (output, _) = generate_at_any(&clients, &request).await.unwrap();
            let gap = output.longest_gap;
            (output, gap)
        })
    }
}

async fn ready_replicas(client: &Client) -> Vec<ReplicaStatus> {
    let Ok(cluster) = client.admin.clone().get_cluster(GetClusterRequest {}).await else { return Vec::new() };
    let replicas = cluster.into_inner().models.into_iter().flat_map(|model| model.replicas);
    replicas.filter(|replica| replica.state() == ReplicaState::Ready).collect()
}

/// Greedy, and drawn with a seed.
fn requests() -> [GenerateRequest; 2] {
    [0.0, 0.8].map(|temperature| GenerateRequest {
        input: Some(tokens(&[504, 3575, 282, 4649, 314])),
        sampling: Some(SamplingParams {
            max_tokens: Some(NUM_TOKENS),
            temperature: Some(temperature),
            seed: Some(7),
            ignore_eos: true,
            logprobs: 1,
            ..Default::default()
        }),
        ..Default::default()
    })
}

fn signal(signal: &str, pid: u32) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}
