//! Several coordinators over a real etcd: one is killed under streams, etcd is stopped; nobody loses a token.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use lockstep_proto::v1::{self, GenerateRequest, GetClusterRequest, generate_response::Event};
use lockstep_tests::{
    Client, Output, SharedCluster, environment, http, network::Node, ports::free_ports, process, shared::Members,
};
use tokio::{io::AsyncReadExt, sync::watch, task::JoinHandle};
use tonic::Status;

use crate::worker_loss::{STOP, ready_replicas, requests, signal};

/// What the command line sends.
const PROMPT: &str = "Once upon a time";
/// Tokens of a stream that have come when the fault strikes.
const NUM_TOKENS_BEFORE: usize = 30;
/// Longer than the leases of workers and coordinators.
const ETCD_PAUSE: Duration = Duration::from_secs(8);

/// What a client has of an answer, and how it ended.
struct Answer {
    output: Output,
    ended: Result<(), Status>,
}

async fn read(client: Client, request: GenerateRequest, count: watch::Sender<usize>) -> Answer {
    let mut output = Output::default();
    let mut stream = match client.start(request).await {
        Ok(stream) => stream,
        Err(status) => return Answer { output, ended: Err(status) },
    };
    loop {
        match stream.message().await {
            Ok(Some(message)) => match message.event {
                Some(Event::Delta(delta)) => {
                    output.text.push_str(&delta.text);
                    output.token_ids.extend(delta.token_ids);
                    output.logprobs.extend(delta.logprobs);
                    count.send_replace(output.token_ids.len());
                }
                Some(Event::Finish(finish)) => output.finish = finish,
                None => {}
            },
            Ok(None) => return Answer { output, ended: Ok(()) },
            Err(status) => return Answer { output, ended: Err(status) },
        }
    }
}

/// Starts requests, and returns once each has brought some tokens.
async fn start(client: &Client, requests: &[GenerateRequest]) -> Vec<JoinHandle<Answer>> {
    let start = |request: &GenerateRequest| {
        let (sender, count) = watch::channel(0);
        (tokio::spawn(read(client.clone(), request.clone(), sender)), count)
    };
    let (answers, counts): (Vec<_>, Vec<_>) = requests.iter().map(start).unzip();
    for mut count in counts {
        count.wait_for(|count| *count >= NUM_TOKENS_BEFORE).await.unwrap();
    }
    answers
}

/// Greedy, drawn with a seed, and drawn with none but the request's id.
fn three_requests() -> [GenerateRequest; 3] {
    let [greedy, drawn] = requests();
    let mut unseeded = drawn.clone();
    unseeded.sampling.as_mut().unwrap().seed = None;
    let named = |request, id: &str| GenerateRequest { request_id: id.to_owned(), ..request };
    [named(greedy, "greedy"), named(drawn, "drawn"), named(unseeded, "unseeded")]
}

fn check_same(expected: &Output, got: &Output, what: &str) {
    assert_eq!(got.token_ids, expected.token_ids, "{what}");
    assert_eq!((&got.text, &got.logprobs), (&expected.text, &expected.logprobs), "{what}");
    assert_eq!(got.finish.reason, expected.finish.reason, "{what}");
    let tokens = |output: &Output| output.finish.usage.unwrap().completion_tokens;
    assert_eq!(tokens(got), tokens(expected), "{what}");
}

/// `lockstep generate` at these coordinators.
fn generate(servers: &str) -> Command {
    let mut command = Command::new(environment::binary().unwrap());
    command.args(["generate", "--server", servers, "--max-tokens=250", "--temperature=0", "--ignore-eos", PROMPT]);
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_leader_costs_nobody_a_token() {
    let mut cluster = SharedCluster::start(2, 2, "tensor=1,replicas=2").unwrap();
    let first = cluster.client(0).await.unwrap();
    ready_replicas(&first, 2).await;
    let leader = cluster.leader().unwrap();
    let (dies, stays) = (cluster.client(leader).await.unwrap(), cluster.client(1 - leader).await.unwrap());
    ready_replicas(&stays, 2).await;
    let mut undisturbed = Vec::new();
    for request in three_requests() {
        undisturbed.push(stays.generate(request).await.unwrap());
    }
    let both = format!("{},{}", cluster.grpc(leader).unwrap(), cluster.grpc(1 - leader).unwrap());
    let expected = process::finish(generate(cluster.grpc(1 - leader).unwrap()), &[]).await.unwrap();

    let mut command_line = generate(&both);
    let command_line = command_line.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let kept = start(&stays, &three_requests()[..1]).await;
    let broken = start(&dies, &three_requests()).await;
    cluster.kill(Node::Coordinator(leader)).unwrap();
    let killed = Instant::now();

    for ((answer, request), expected) in broken.into_iter().zip(three_requests()).zip(&undisturbed) {
        let Answer { mut output, ended } = answer.await.unwrap();
        assert!(ended.is_err(), "{} was done before its coordinator was killed", request.request_id);
        let (token_ids, text_bytes) = (output.token_ids.clone(), output.text.len() as u64);
        let received = Some(v1::Received { token_ids, text_bytes });
        let what = request.request_id.clone();
        let rest = stays.generate(GenerateRequest { received, ..request }).await.unwrap();
        output.text.push_str(&rest.text);
        output.token_ids.extend(rest.token_ids);
        output.logprobs.extend(rest.logprobs);
        output.finish = rest.finish;
        check_same(expected, &output, &what);
    }
    for answer in kept {
        let Answer { output, ended } = answer.await.unwrap();
        ended.unwrap();
        check_same(&undisturbed[0], &output, "a stream of the other coordinator");
    }
    let printed = tokio::task::spawn_blocking(|| command_line.wait_with_output()).await.unwrap().unwrap();
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    assert_eq!(String::from_utf8_lossy(&printed.stdout), String::from_utf8_lossy(&expected.stdout));

    // Whoever leads now plans for a worker that is lost, and had nothing loaded anew before.
    let epochs = |cluster: v1::GetClusterResponse| cluster.models[0].plan_epoch;
    let status = || async { stays.admin.clone().get_cluster(GetClusterRequest {}).await.unwrap().into_inner() };
    let before = epochs(status().await);
    cluster.add_worker("spare").unwrap();
    cluster.kill(Node::Worker(0)).unwrap();
    loop {
        let status = status().await;
        let is_ready = status.models[0].replicas.iter().filter(|it| it.state() == v1::ReplicaState::Ready).count() == 2;
        if is_ready && epochs(status) > before {
            break;
        }
        assert!(killed.elapsed() < Duration::from_secs(40), "{}", cluster.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(cluster.leader().unwrap(), 1 - leader);
    check_same(&undisturbed[0], &stays.generate(three_requests()[0].clone()).await.unwrap(), "the new replica");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_leaves_a_stopped_coordinator() {
    let cluster = SharedCluster::start(2, 1, "tensor=1").unwrap();
    let (stops, stays) = (cluster.grpc(0).unwrap(), cluster.grpc(1).unwrap());
    for index in 0..2 {
        ready_replicas(&cluster.client(index).await.unwrap(), 1).await;
    }
    let expected = process::finish(generate(stays), &[]).await.unwrap();
    let both = format!("{stops},{stays}");
    let mut command = tokio::process::Command::from(generate(&both));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut first = [0; 40];
    child.stdout.as_mut().unwrap().read_exact(&mut first).await.unwrap();
    let pid = cluster.pid(Node::Coordinator(0)).unwrap().to_string();
    signal(STOP, &pid);
    let stopped = Instant::now();
    let printed = child.wait_with_output().await.unwrap();
    let message = String::from_utf8_lossy(&printed.stderr);
    assert!(
        printed.status.success() && stopped.elapsed() < Duration::from_secs(20),
        "{:?} {message}",
        stopped.elapsed()
    );
    let text = [&first[..], &printed.stdout].concat();
    assert_eq!(String::from_utf8_lossy(&text), String::from_utf8_lossy(&expected.stdout));
    assert!(message.contains(&format!("; continued at {stays} after {stops} was lost")), "{message}");
    let shown = process::lockstep(&["status", "--server", &both]).await.unwrap();
    assert!(shown.status.success() && !shown.stdout.is_empty(), "{shown:?}");
    signal("-CONT", &pid);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_serves_outlives_the_leases() {
    let cluster = SharedCluster::start(1, 1, "tensor=1").unwrap();
    let client = cluster.client(0).await.unwrap();
    ready_replicas(&client, 1).await;
    let request = &three_requests()[0];
    let undisturbed = client.generate(request.clone()).await.unwrap();
    let status = || async { client.admin.clone().get_cluster(GetClusterRequest {}).await.unwrap().into_inner() };
    let epoch = status().await.models[0].plan_epoch;

    let stream = start(&client, &three_requests()[..1]).await.remove(0);
    let pid = cluster.etcd.pid(0).unwrap().to_string();
    signal(STOP, &pid);
    let stopped = Instant::now();
    check_same(&undisturbed, &stream.await.unwrap().output, "a stream under which etcd is stopped");
    check_same(&undisturbed, &client.generate(request.clone()).await.unwrap(), "a request while etcd is stopped");
    while status().await.registry.unwrap().problem.is_empty() {
        assert!(stopped.elapsed() < ETCD_PAUSE, "nobody noticed that etcd is away");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let shown = process::lockstep(&["status", "--server", cluster.grpc(0).unwrap()]).await.unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains("etcd is away for"), "{shown:?}");
    tokio::time::sleep(ETCD_PAUSE.saturating_sub(stopped.elapsed())).await;
    signal("-CONT", &pid);

    // Both lease and register again, and find all as it was.
    let is_registered = || {
        let keys = cluster.etcd.control(&["get", "--prefix", "--keys-only", "/lockstep/"]).unwrap_or_default();
        ["/lockstep/workers/worker-0", "/lockstep/leader"].iter().all(|key| keys.contains(key))
    };
    tokio::time::sleep(Duration::from_secs(2)).await;
    while !is_registered() || !status().await.registry.unwrap().problem.is_empty() {
        assert!(stopped.elapsed() < ETCD_PAUSE + Duration::from_secs(15), "{}", cluster.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    check_same(&undisturbed, &client.generate(request.clone()).await.unwrap(), "a request after etcd came back");
    assert_eq!(status().await.models[0].plan_epoch, epoch);
    assert_eq!(cluster.log().matches("loading replica").count(), 1, "{}", cluster.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_worker_comes_back_before_its_lease_ends() {
    let mut cluster = SharedCluster::start(1, 1, "tensor=1").unwrap();
    let client = cluster.client(0).await.unwrap();
    ready_replicas(&client, 1).await;
    let undisturbed = client.generate(three_requests()[0].clone()).await.unwrap();
    cluster.kill(Node::Worker(0)).unwrap();
    let killed = Instant::now();
    cluster.restart(Node::Worker(0)).unwrap();
    ready_replicas(&client, 0).await;
    ready_replicas(&client, 1).await;
    println!("a killed worker serves again after {:.2} s", killed.elapsed().as_secs_f64());
    // Its key was still there.
    assert!(cluster.log().contains("taking over from a predecessor that has ended"), "{}", cluster.log());
    check_same(&undisturbed, &client.generate(three_requests()[0].clone()).await.unwrap(), "the worker that came back");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_no_coordinator_reaches_is_not_ready() {
    let http = format!("127.0.0.1:{}", free_ports(1).unwrap()[0]);
    // It listens elsewhere than it says.
    let worker_arguments = &["--listen=127.0.0.1:0", "--advertise-host=127.0.0.2", &format!("--http-listen={http}")];
    let members = Members { worker_arguments, ..Members::new(1, 1, "tensor=1") };
    let cluster = SharedCluster::start_members(members).unwrap();
    let end = Instant::now() + process::PATIENCE;
    while !cluster.log().contains("cannot be reached") {
        assert!(Instant::now() < end, "{}", cluster.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let readiness = http::get(&http, "/readyz").await.unwrap_err().to_string();
    assert!(readiness.contains("no coordinator has reached it"), "{readiness}");
    assert!(http::get(&http, "/metrics").await.unwrap().contains("lockstep_worker_registered 0"));
    let status = cluster.client(0).await.unwrap().admin.get_cluster(GetClusterRequest {}).await.unwrap();
    let worker = status.into_inner().workers.remove(0);
    println!("{}", worker.problem);
    assert!(!worker.problem.is_empty() && worker.worker_id == "worker-0", "{worker:?}");
}
