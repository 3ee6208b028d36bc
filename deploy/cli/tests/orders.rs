//! Orders of an operator to a cluster that runs: load, drain, unload.

#![allow(clippy::expect_used, reason = "a helper of tests")]

use std::{
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(30);

/// Servers that end with the test.
struct Servers(Vec<Child>);

impl Drop for Servers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn lockstep(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn said(server: &str, arguments: &[&str]) -> (bool, String) {
    let Output { status, stdout, stderr } = lockstep(arguments).env("LOCKSTEP_SERVER", server).output().expect("run");
    (status.success(), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

/// Waits until `lockstep status` shows a text.
fn shows(server: &str, text: &str) {
    let start = Instant::now();
    loop {
        let (_, status) = said(server, &["status"]);
        if status.contains(text) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "no {text:?} in {status}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A coordinator without a model, and a worker; returns where it listens.
fn start(folder: &Path) -> (Servers, String) {
    let ready = folder.join("ready.json");
    let spawn = |arguments: &[&str]| lockstep(arguments).stderr(Stdio::null()).spawn().expect("spawn");
    let listen = ["coordinator", "--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0"];
    let ready_file = format!("--ready-file={}", ready.display());
    let mut servers = Servers(vec![spawn(&[&listen[..], &[&ready_file]].concat())]);
    let start = Instant::now();
    while !ready.exists() {
        assert!(start.elapsed() < PATIENCE, "it does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    let addresses: serde_json::Value = serde_json::from_slice(&std::fs::read(&ready).expect("file")).expect("JSON");
    let grpc = addresses["grpc"].as_str().expect("an address").to_owned();
    let coordinator = format!("--coordinator={grpc}");
    let worker = ["worker", "--worker-id=w", "--device=cpu", "--listen=127.0.0.1:0", "--memory=1GiB", &coordinator];
    servers.0.push(spawn(&worker));
    shows(&grpc, "ready");
    (servers, grpc)
}

#[test]
fn models_are_loaded_and_unloaded_and_a_drained_worker_holds_nothing() {
    let folder = tempfile::tempdir().expect("folder");
    let model = folder.path().join("tiny.gguf");
    let model = model.to_str().expect("a path");
    let (is_written, problem) = said("", &["synth", "tiny", "--output", model]);
    assert!(is_written, "{problem}");
    let (mut servers, server) = start(folder.path());

    assert_eq!(said(&server, &["load", model]), (true, "tiny: serves\n".to_owned()));
    assert_eq!(
        said(&server, &["load", model, "--name", "chat", "--policy", "tensor=1"]),
        (true, "chat: serves\n".to_owned())
    );
    let (is_done, problem) = said(&server, &["load", model, "--name", "chat", "--policy", "replicas=2"]);
    assert!(!is_done && problem.contains("chat"), "{problem}");
    let (is_done, problem) = said(&server, &["load", "/nowhere/m.gguf"]);
    assert!(!is_done && problem.contains("/nowhere/m.gguf"), "{problem}");
    assert_eq!(lockstep(&["load", model, "--policy", "tensor=zero"]).output().expect("run").status.code(), Some(2));

    assert_eq!(said(&server, &["unload", "chat"]), (true, "chat: unloaded\n".to_owned()));
    let (is_done, problem) = said(&server, &["unload", "chat"]);
    assert!(!is_done && problem.contains("\"chat\""), "{problem}");
    let (_, status) = said(&server, &["status"]);
    assert!(status.contains("model tiny ") && !status.contains("model chat "), "{status}");

    // Nothing can take its place: the model waits, and the worker holds nothing and runs on until it is stopped.
    let (is_done, text) = said(&server, &["drain", "w"]);
    assert!(is_done && text.ends_with("w: drained, it can be stopped\n"), "{text}");
    shows(&server, "drained: holds nothing");
    let worker = &mut servers.0[1];
    assert_eq!(worker.try_wait().expect("state"), None);
    assert!(Command::new("kill").arg(worker.id().to_string()).status().expect("kill").success());
    assert!(worker.wait().expect("end").success());
}
