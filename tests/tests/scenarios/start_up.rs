//! What cannot start says why and ends.

use std::{
    io::Read,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use lockstep_proto::v1;
use lockstep_tests::{
    Cluster, Layout,
    client::{greedy, tokens},
    cluster, environment,
    process::{PATIENCE, lockstep, synthesize},
};

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

/// Bytes that a process has read so far, from the cache or the disk.
fn bytes_read(pid: u64) -> u64 {
    let counters = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
    counters.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn model_that_shrinks_while_it_loads_is_named_with_the_tensor() {
    let folder = tempfile::TempDir::new().unwrap();
    let model = synthesize(folder.path(), 16).await.unwrap();
    let num_bytes = std::fs::metadata(&model).unwrap().len();
    let cluster = Cluster::start(Layout::new(1, 1)).unwrap();
    let client = cluster.client().await.unwrap();
    let worker = cluster.worker_pid(0).unwrap();
    let before = bytes_read(worker);
    let request =
        v1::LoadModelRequest { name: "larger".into(), source: model.to_str().unwrap().into(), ..Default::default() };
    let mut progress = client.admin.clone().load_model(request).await.unwrap().into_inner();
    // A tenth of the file is more than the header, which is read twice.
    let shrink = tokio::task::spawn_blocking(move || {
        let end = Instant::now() + PATIENCE;
        while bytes_read(worker) - before < num_bytes / 10 {
            assert!(Instant::now() < end, "the model is not being loaded");
        }
        std::fs::File::options().write(true).open(&model).unwrap().set_len(num_bytes / 20).unwrap();
    });
    let refused = async {
        loop {
            match progress.message().await {
                Ok(message) => assert!(!message.expect("an end without an error").ready, "it loaded"),
                Err(status) => break status,
            }
        }
    };
    let status = tokio::time::timeout(PATIENCE, refused).await.unwrap();
    shrink.await.unwrap();
    for text in ["larger.gguf", "blk.", "file shrank while it was read"] {
        assert!(status.message().contains(text), "expected {text:?} in {status:?}");
    }
    // What the cluster served before, it serves still; and the name is free again.
    let output = client.generate(greedy(tokens(&[504, 3575, 282, 4649, 314]), 1)).await.unwrap();
    assert_eq!(output.text, " Paris");
    let models = client.admin.clone().get_cluster(v1::GetClusterRequest {}).await.unwrap().into_inner().models;
    assert_eq!(models.len(), 1, "{models:?}");
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
    let end = Instant::now() + PATIENCE;
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
