//! The OpenAI API through OpenAI's own client, and the page at `/` in a browser.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use lockstep_tests::{Cluster, Layout, environment, process::finish};

/// Runs a script of `tests/python` against the cluster and returns the names of the checks that passed: all.
async fn checks(cluster: &Cluster, script: &str, argument: &Path) -> Vec<String> {
    let mut python = Command::new(environment::python().unwrap());
    python.arg(environment::repository().join("tests/python").join(script));
    python.arg(format!("http://{}", cluster.http())).arg(argument);
    let ended = finish(python, &[]).await.unwrap();
    let (seen, errors) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{seen}{errors}");
    seen.lines().map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_page_works_in_a_browser() {
    let cluster = Cluster::start(Layout::new(2, 1)).unwrap();
    let passed = checks(&cluster, "status_page.py", &environment::browser().unwrap()).await;
    assert_eq!(passed, ["numbers", "chat", "texts", "stop", "policy", "loss"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_official_client_is_served() {
    let cluster = Cluster::start(Layout::new(2, 1)).unwrap();
    let passed = checks(&cluster, "openai_client.py", Path::new("smol")).await;
    let expected = ["models", "completions", "chat", "seeds_and_choices", "errors", "leaves", "overload"];
    assert_eq!(passed, expected);
    // The last checks left streams behind.
    let client = cluster.client().await.unwrap();
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let engine = client.engine().await.unwrap();
        if engine.num_running_sequences == 0 && engine.num_free_kv_blocks == engine.num_kv_blocks {
            break;
        }
        assert!(Instant::now() < end, "the engine still reports {engine:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
