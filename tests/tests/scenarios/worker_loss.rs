//! A worker that is killed ends the requests that it served, soon and with a reason.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use lockstep_proto::status::Class;
use lockstep_tests::{
    Cluster, Layout,
    client::{greedy, read_to_end, tokens},
};
use tonic::Code;

/// Longest time from the kill to the client's error.
const LIMIT: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread")]
async fn killed_leader_is_unavailable_within_two_seconds() {
    kill_worker(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_follower_is_unavailable_within_two_seconds() {
    kill_worker(1).await;
}

async fn kill_worker(index: usize) {
    let cluster = Cluster::start(Layout::new(2, 1)).unwrap();
    let client = cluster.client().await.unwrap();
    let mut stream = client.start(greedy(tokens(&[504, 3575, 282]), 4000)).await.unwrap();
    stream.message().await.unwrap().unwrap();
    let pid = cluster.worker_pid(index).unwrap().to_string();
    let begin = Instant::now();
    assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    let status = read_to_end(stream).await.unwrap_err();
    assert!(begin.elapsed() < LIMIT, "{:?} until {status:?}", begin.elapsed());
    assert_eq!((status.code(), Class::of(&status)), (Code::Unavailable, Class::WorkerLost), "{status:?}");
    assert!(status.message().contains("worker"), "{status:?}");

    // The next request is answered too: there is no replica until a worker comes back.
    let refused = client.generate(greedy(tokens(&[504]), 1)).await.unwrap_err();
    assert!(matches!(Class::of(&refused), Class::NotReady | Class::WorkerLost), "{refused:?}");
}
