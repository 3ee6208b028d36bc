//! A client that leaves gives its KV blocks back.

use std::time::{Duration, Instant};

use lockstep_tests::{
    Client, Cluster, Layout,
    client::{greedy, tokens},
    process::PATIENCE,
};

/// Polls the engine's report until it is as wanted.
async fn wait_for(client: &Client, what: &str, is_so: impl Fn(&lockstep_proto::v1::EngineStatus) -> bool) {
    let end = Instant::now() + PATIENCE;
    loop {
        let engine = client.engine().await;
        if engine.as_ref().is_ok_and(&is_so) {
            return;
        }
        assert!(Instant::now() < end, "{what}: the engine still reports {engine:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_streams_free_their_blocks() {
    let cluster = Cluster::start(Layout::new(2, 1)).unwrap();
    let client = cluster.client().await.unwrap();
    wait_for(&client, "an idle engine", |engine| engine.num_free_kv_blocks == engine.num_kv_blocks).await;
    let mut streams = Vec::new();
    for first in 1..5 {
        let mut stream = client.start(greedy(tokens(&[first; 100]), 4000)).await.unwrap();
        stream.message().await.unwrap().unwrap();
        streams.push(stream);
    }
    wait_for(&client, "four sequences", |engine| {
        engine.num_running_sequences == 4 && engine.num_kv_blocks - engine.num_free_kv_blocks >= 16
    })
    .await;
    drop(streams);
    wait_for(&client, "all blocks free", |engine| {
        engine.num_running_sequences == 0 && engine.num_free_kv_blocks == engine.num_kv_blocks
    })
    .await;
    let output = client.generate(greedy(tokens(&[504, 3575, 282, 4649, 314]), 1)).await.unwrap();
    assert_eq!(output.text, " Paris");
}
