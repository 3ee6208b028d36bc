//! What cannot start says why and ends.

use std::{
    io::Read,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use lockstep_tests::{Cluster, Layout, cluster, environment, process::lockstep};

#[tokio::test]
async fn port_in_use_is_named() {
    let _turn = cluster::turn().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let model = environment::model().unwrap();
    let flag = format!("--grpc-port={port}");
    let ended = lockstep(&["up", "--http-port=0", &flag, "--model", model.to_str().unwrap()]).await.unwrap();
    let log = String::from_utf8_lossy(&ended.stderr).into_owned() + &String::from_utf8_lossy(&ended.stdout);
    assert!(!ended.status.success());
    assert!(log.contains(&format!("cannot listen on 127.0.0.1:{port}")), "{log}");
}

#[tokio::test]
async fn truncated_model_is_named() {
    let _turn = cluster::turn().unwrap();
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("short.gguf");
    let mut whole = std::fs::File::open(environment::model().unwrap()).unwrap().take(5_000_000);
    std::io::copy(&mut whole, &mut std::fs::File::create(&path).unwrap()).unwrap();
    let ended = lockstep(&["up", "--grpc-port=0", "--http-port=0", "--model", path.to_str().unwrap()]).await.unwrap();
    let log = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success());
    assert!(log.contains("short.gguf"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn second_worker_with_a_live_id_is_refused() {
    let cluster = Cluster::start(Layout::new(1, 1)).unwrap();
    let coordinator = format!("http://{}", cluster.grpc());
    let mut second = Command::new(environment::binary().unwrap())
        .args(["worker", "--exit-on-stdin-close", "--worker-id=worker-0", "--coordinator", &coordinator])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    let status = loop {
        if let Some(status) = second.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            second.kill().unwrap();
            panic!("the second worker-0 was not refused");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let mut log = String::new();
    second.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(!status.success());
    assert!(log.contains("worker_id \"worker-0\" is taken"), "{log}");
    let client = cluster.client().await.unwrap();
    assert!(client.tokenize("still there").await.is_ok());
}
