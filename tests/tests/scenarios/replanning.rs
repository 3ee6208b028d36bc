//! Plans that take the place of others under streams: an upgrade changes the settings, a worker returns, a path is cut for good.
//! No stream loses a token.

use std::time::{Duration, Instant};

use lockstep_proto::v1::{GetClusterRequest, ModelStatus};
use lockstep_tests::{
    Client, Output, SharedCluster,
    client::check_undisturbed,
    network::{self, Cut, Network, Node},
    process::PATIENCE,
    shared::Members,
};
use tokio::task::JoinHandle;

use crate::worker_loss::{ready_replicas, requests, start, undisturbed};

/// Most that a client may wait for the next token while a replica is planned and loaded anew.
const LONGEST_GAP: Duration = Duration::from_secs(10);

type Streams = Vec<JoinHandle<anyhow::Result<(Output, Duration)>>>;

async fn model(client: &Client) -> ModelStatus {
    client.admin.clone().get_cluster(GetClusterRequest {}).await.unwrap().into_inner().models.remove(0)
}

/// The model, once its only replica is ready and has so many ranks.
async fn ranks(client: &Client, num_ranks: usize) -> ModelStatus {
    let end = Instant::now() + PATIENCE;
    loop {
        let replicas = ready_replicas(client, 1).await;
        if replicas.len() == 1 && replicas[0].ranks.len() == num_ranks {
            return model(client).await;
        }
        assert!(Instant::now() < end, "not {num_ranks} ranks: {replicas:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn check(streams: Streams, undisturbed: &[Output], limit: Duration, what: &str, cluster: &SharedCluster) {
    let mut longest = Duration::ZERO;
    for (stream, expected) in streams.into_iter().zip(undisturbed) {
        let (output, gap) = stream.await.unwrap().unwrap_or_else(|error| panic!("{error:?}\n{}", cluster.log()));
        check_undisturbed(expected, &output).unwrap_or_else(|error| panic!("{what}: {error}"));
        longest = longest.max(gap);
    }
    println!("stream gap, {what}: {:.2} s", longest.as_secs_f64());
    assert!(longest < limit, "{longest:?}\n{}", cluster.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_changes_the_policy_under_streams() {
    let mut cluster = SharedCluster::start(2, 2, "tensor=1,replicas=1").unwrap();
    let client = cluster.client(0).await.unwrap();
    ranks(&client, 1).await;
    let undisturbed = undisturbed(&client).await;
    let streams = start(&client, &requests()).await;
    // The first of the coordinators that an upgrade replaces.
    let upgraded = Node::Coordinator(1);
    cluster.set(upgraded, "--policy", "tensor=2").unwrap();
    cluster.set(upgraded, "--settings-revision", "1").unwrap();
    cluster.kill(upgraded).unwrap();
    cluster.restart(upgraded).unwrap();
    cluster.wait_listening(1).unwrap();
    let epoch = ranks(&client, 2).await.plan_epoch;
    check(streams, &undisturbed, LONGEST_GAP, "another policy", &cluster).await;

    // One that is started again with the settings of before changes nothing, be it the leader or not.
    cluster.kill(Node::Coordinator(0)).unwrap();
    cluster.restart(Node::Coordinator(0)).unwrap();
    cluster.wait_listening(0).unwrap();
    let end = Instant::now() + PATIENCE;
    while !cluster.log().contains("these settings do not count") {
        assert!(Instant::now() < end, "{}", cluster.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for index in 0..2 {
        assert_eq!(ranks(&cluster.client(index).await.unwrap(), 2).await.plan_epoch, epoch, "{}", cluster.log());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_grows_back_when_its_worker_returns() {
    let members = Members {
        // So little that one alone holds few sequences: two are better, whatever they measure.
        worker_arguments: &["--memory=155MiB"],
        coordinator_arguments: &["--replan-delay-secs=0.5"],
        ..Members::new(1, 2, "replicas=1")
    };
    let mut cluster = SharedCluster::start_members(members).unwrap();
    let client = cluster.client(0).await.unwrap();
    ranks(&client, 2).await;
    let undisturbed = undisturbed(&client).await;
    cluster.kill(Node::Worker(1)).unwrap();
    ranks(&client, 1).await;
    cluster.restart(Node::Worker(1)).unwrap();
    let begin = Instant::now();
    let streams = start(&client, &requests()).await;
    ranks(&client, 2).await;
    println!("two ranks again {:.1} s after the worker was started", begin.elapsed().as_secs_f64());
    check(streams, &undisturbed, LONGEST_GAP, "a worker that returned", &cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lasting_cut_between_the_ranks_is_planned_around() {
    if network::run_apart(&["--exact", "replanning::a_lasting_cut_between_the_ranks_is_planned_around", "--nocapture"])
        .unwrap()
    {
        return;
    }
    let network = Network::start(1, 3).await.unwrap();
    let members = Members::new(1, 3, "tensor=2,replicas=1");
    let cluster = SharedCluster::start_on(network, members).await.unwrap();
    let client = cluster.client(0).await.unwrap();
    let replica = ready_replicas(&client, 1).await.remove(0);
    let undisturbed = undisturbed(&client).await;
    let streams = start(&client, &requests()).await;
    let worker = |rank: usize| replica.ranks[rank].worker_id["worker-".len()..].parse().unwrap();
    let network = cluster.network.as_ref().unwrap();
    // A proxy cuts what comes to its worker, and the higher rank has connected to the lower.
    let (workers, limit) = match network.means() {
        "namespaces" => (vec![worker(0), worker(1)], LONGEST_GAP),
        _ => (vec![worker(0)], 2 * LONGEST_GAP),
    };
    network.cut(&Cut::Ranks(workers)).unwrap();
    check(streams, &undisturbed, limit, "a lasting cut between the ranks", &cluster).await;
    let log = cluster.log();
    assert!(log.contains("two workers cannot reach each other"), "{log}");
}
