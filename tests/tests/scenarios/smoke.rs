//! The first thing that a user does works.

use lockstep_proto::v1;
use lockstep_tests::{Cluster, Layout, client::greedy, process::lockstep};

#[tokio::test(flavor = "multi_thread")]
async fn two_workers_answer_and_stop_cleanly() {
    let cluster = Cluster::start(Layout::new(2, 1)).unwrap();
    let client = cluster.client().await.unwrap();
    let prompt = v1::generate_request::Input::Prompt("The capital of France is".into());
    let output = client.generate(greedy(prompt, 12)).await.unwrap();
    assert!(output.text.starts_with(" Paris"), "{:?}", output.text);
    assert_eq!(output.token_ids.len(), 12);
    assert_eq!(output.finish.reason(), v1::FinishReason::Length);
    let usage = output.finish.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (5, 12));

    let question = ["generate", "--server", &cluster.grpc(), "--chat", "-t", "0", "-n", "24", "Why is the sky blue?"];
    let answer = lockstep(&question).await.unwrap();
    assert!(answer.status.success(), "{answer:?}");
    assert!(String::from_utf8_lossy(&answer.stdout).contains("light"), "{answer:?}");
    assert!(String::from_utf8_lossy(&answer.stderr).contains("tokens/s"), "{answer:?}");

    let status = lockstep(&["status", "--server", &cluster.grpc(), "--json"]).await.unwrap();
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(status["workers"].as_array().unwrap().len(), 2, "{status}");
    assert_eq!(status["models"][0]["replicas"][0]["ranks"].as_array().unwrap().len(), 2, "{status}");

    drop(client);
    let (status, log) = cluster.stop().unwrap();
    assert!(status.success(), "{status}");
    let is_alarm = |line: &&str| line.contains(" WARN ") || line.contains(" ERROR ");
    assert_eq!(log.lines().filter(is_alarm).collect::<Vec<_>>(), Vec::<&str>::new());
}
