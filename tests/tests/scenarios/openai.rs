//! The OpenAI API through OpenAI's own client, and the page at `/` in a browser.

use std::{
    ffi::OsStr,
    process::Command,
    time::{Duration, Instant},
};

use lockstep_tests::{
    Cluster, Layout, environment,
    process::{PATIENCE, finish, lockstep},
};
use serde_json::Value;

/// Runs a script of `tests/python` against the cluster and returns the names of the checks that passed: all.
async fn checks(cluster: &Cluster, script: &str, arguments: &[&OsStr]) -> Vec<String> {
    let mut python = Command::new(environment::python().unwrap());
    python.arg(environment::repository().join("tests/python").join(script));
    python.arg(format!("http://{}", cluster.http())).args(arguments);
    let ended = finish(python, &[]).await.unwrap();
    let (seen, errors) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{seen}{errors}");
    seen.lines().map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_page_works_in_a_browser() {
    let cluster = Cluster::start(Layout::new(2, 1)).unwrap();
    let passed = checks(&cluster, "status_page.py", &[environment::browser().unwrap().as_ref()]).await;
    assert_eq!(passed, ["numbers", "chat", "texts", "stop", "policy", "loss"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_takes_an_api_key() {
    let (mut file, mut keys) = (String::new(), Vec::new());
    for (name, rest) in [("user", ""), ("admin", "admin = true")] {
        let made = lockstep(&["tenant", "new", name, "--json"]).await.unwrap();
        let made: Value = serde_json::from_slice(&made.stdout).unwrap();
        file += &format!("[[tenant]]\nname = \"{name}\"\nkey_sha256 = [{}]\n{rest}\n", made["key_sha256"]);
        keys.push(made["key"].as_str().unwrap().to_owned());
    }
    let folder = tempfile::tempdir().unwrap();
    let tenants = folder.path().join("tenants.toml");
    std::fs::write(&tenants, file).unwrap();
    let arguments = [format!("--tenants={}", tenants.display()), format!("--api-key={}", keys[1])];
    let arguments = arguments.each_ref().map(String::as_str);
    let model = environment::model().unwrap();
    let cluster = Cluster::start_with_arguments(Layout::new(1, 1), &model, &arguments).unwrap();
    let browser = environment::browser().unwrap();
    let arguments = [browser.as_ref(), keys[0].as_ref(), keys[1].as_ref()];
    let passed = checks(&cluster, "status_page_key.py", &arguments).await;
    assert_eq!(passed, ["nobody", "stranger", "user", "administrator", "forgotten"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_official_client_is_served() {
    let cluster = Cluster::start(Layout::new(2, 1)).unwrap();
    let passed = checks(&cluster, "openai_client.py", &["smol".as_ref()]).await;
    let expected = ["models", "completions", "chat", "seeds_and_choices", "errors", "leaves", "overload"];
    assert_eq!(passed, expected);
    // The last checks left streams behind.
    let client = cluster.client().await.unwrap();
    let end = Instant::now() + PATIENCE;
    loop {
        let engine = client.engine().await.unwrap();
        if engine.num_running_sequences == 0 && engine.num_free_kv_blocks == engine.num_kv_blocks {
            break;
        }
        assert!(Instant::now() < end, "the engine still reports {engine:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
