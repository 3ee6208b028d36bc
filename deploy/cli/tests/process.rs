//! The binary as a process: exit codes, and that a child ends with its parent.

#![allow(clippy::expect_used, reason = "a helper of tests")]

use std::{
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

fn lockstep(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn output(arguments: &[&str]) -> Output {
    lockstep(arguments).output().expect("the binary was built for this test")
}

#[test]
fn exit_codes_tell_usage_from_failure() {
    assert_eq!(output(&["--help"]).status.code(), Some(0));
    assert_eq!(output(&["no-such-command"]).status.code(), Some(2));
    assert_eq!(output(&["plan", "--shape", "tiny", "--devices", "2*abacus"]).status.code(), Some(2));
    assert_eq!(output(&["plan", "--shape", "tiny", "--devices", "2*cpu"]).status.code(), Some(0));
    let zero = output(&["plan", "--shape", "tiny", "--devices", "cpu", "--policy", "tensor=0"]);
    assert!(String::from_utf8(zero.stderr).unwrap().contains("N is at least 1"));
    assert_eq!(
        output(&["plan", "--shape", "tiny", "--devices", "4*cpu", "--policy", "tensor=4"]).status.code(),
        Some(0)
    );
    let refused = output(&["plan", "--shape", "llama-70b", "--devices", "cpu"]);
    assert_eq!(refused.status.code(), Some(1));
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(error.starts_with("error: ") && error.trim_end().lines().count() == 1, "{error}");
}

#[test]
fn a_new_tenants_key_stays_out_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tenants.toml");
    let file = std::fs::File::create(&path).unwrap();
    let made = lockstep(&["tenant", "new", "search"]).stdout(file).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let (shown, file) = (String::from_utf8(made.stderr).unwrap(), std::fs::read_to_string(&path).unwrap());
    let key = shown.lines().last().unwrap();
    assert!(key.starts_with("lockstep-") && !file.contains("lockstep-"), "{shown}{file}");
    let table: toml::Table = file.parse().unwrap();
    assert_eq!(table["tenant"][0]["name"].as_str(), Some("search"));
    assert_eq!(table["tenant"][0]["key_sha256"][0].as_str().map(str::len), Some(64));
}

#[test]
fn an_unknown_setting_stops_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lockstep.toml");
    std::fs::write(&path, "[worker]\nnum_device = 2\n").unwrap();
    let refused = output(&["worker", "--config", path.to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8(refused.stderr).unwrap().contains("num_device"));
}

#[test]
fn up_takes_the_devices_that_the_file_names_for_workers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lockstep.toml");
    std::fs::write(&path, "[worker]\ndevice = \"abacus\"\n").unwrap();
    let arguments = ["up", "--model", "/nowhere.gguf", "--config", path.to_str().unwrap()];
    let error = |command: &mut Command| {
        let refused = command.output().unwrap();
        assert!(!refused.status.success());
        String::from_utf8(refused.stderr).unwrap()
    };
    let message = error(lockstep(&arguments).env_remove("LOCKSTEP_DEVICE"));
    assert!(message.contains("device: \"abacus\" is none of"), "{message}");
    // The environment wins, then the flag.
    let message = error(lockstep(&arguments).env("LOCKSTEP_DEVICE", "sand"));
    assert!(message.contains("\"sand\""), "{message}");
    let message = error(lockstep(&arguments).env("LOCKSTEP_DEVICE", "sand").arg("--device=cpu"));
    assert!(message.contains("/nowhere.gguf"), "{message}");
}

#[test]
fn bench_refuses_what_cannot_be_measured() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("tiny.gguf");
    let written = output(&["synth", "tiny", "--output", model.to_str().unwrap()]);
    assert!(written.status.success(), "{written:?}");
    let error = |flags: &[&str], device: &str| {
        let command = [&["bench", "--model", model.to_str().unwrap()], flags].concat();
        let refused = lockstep(&command).env("LOCKSTEP_DEVICE", device).output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        String::from_utf8(refused.stderr).unwrap()
    };
    let message = error(&["--prefill", "512,900000"], "cpu");
    assert!(message.contains("--prefill 900000 do not fit the model: a sequence has at most"), "{message}");
    let message = error(&["--prefill", "8", "--depth", "900000", "--decode", "7"], "cpu");
    assert!(message.contains("--depth 900000 and --decode 7 do not fit"), "{message}");
    let message = error(&["--prefill", "8"], "abacus");
    assert!(message.contains("device: \"abacus\" is none of"), "{message}");
}

/// The system accepts connections for a process that is stopped.
#[test]
fn a_silent_coordinator_is_passed_over() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready.json");
    let mut child = lockstep(&["coordinator", "--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0"])
        .args(["--exit-on-stdin-close", &format!("--ready-file={}", ready.display())])
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while !ready.exists() {
        assert!(start.elapsed() < Duration::from_secs(20), "it does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    let addresses: serde_json::Value = serde_json::from_slice(&std::fs::read(&ready).unwrap()).unwrap();
    let (silent, answers) = (silent.local_addr().unwrap(), addresses["grpc"].as_str().unwrap());
    let start = Instant::now();
    let shown = output(&["status", "--server", &format!("{silent},{answers}")]);
    assert!(shown.status.success() && start.elapsed() < Duration::from_secs(10), "{:?} {shown:?}", start.elapsed());
    let shown = output(&["status", "--server", &silent.to_string()]);
    let error = String::from_utf8(shown.stderr).unwrap();
    assert_eq!(error, format!("error: cannot reach a coordinator at {silent}: it does not answer\n"));
    drop(child.stdin.take());
    child.wait().unwrap();
}

/// As after `kill -9` of `up`: the log has no reader any more when standard input closes.
#[test]
fn a_server_ends_when_its_parent_is_gone() {
    let listen = ["coordinator", "--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", "--exit-on-stdin-close"];
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready.json");
    let mut child = lockstep(&listen)
        .arg(format!("--ready-file={}", ready.display()))
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    let wait = |what: &str| {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    };
    while !ready.exists() {
        wait("it does not listen");
    }
    drop(child.stderr.take());
    drop(child.stdin.take());
    while child.try_wait().unwrap().is_none() {
        wait("it goes on without its parent");
    }
}

/// The first process of a container sees only the signals that it handles.
#[cfg(unix)]
#[test]
fn what_runs_in_init_containers_ends_on_sigterm() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (url, folder) = (format!("http://{}", silent.local_addr().unwrap()), tempfile::tempdir().unwrap());
    let [data, template, output] = ["data", "template", "output"].map(|name| folder.path().join(name));
    std::fs::write(&template, "").unwrap();
    let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let pull = vec!["pull".to_owned(), format!("{url}/m.gguf"), format!("--output={}/", text(folder.path()))];
    let member = ["etcd-member", "--name=a", "--initial-cluster=a=http://127.0.0.1:1", "--etcd-insecure"];
    let files = [("data-dir", &data), ("template", &template), ("output", &output)];
    let mut member = member.map(str::to_owned).to_vec();
    member.extend(files.map(|(flag, path)| format!("--{flag}={}", text(path))));
    member.push(format!("--etcd={url}"));
    for arguments in [pull, member].iter().take(if cfg!(feature = "etcd") { 2 } else { 1 }) {
        let mut child =
            Command::new(env!("CARGO_BIN_EXE_lockstep")).args(arguments).stderr(Stdio::null()).spawn().unwrap();
        // It has asked: handlers stand before that.
        silent.set_nonblocking(true).unwrap();
        let start = Instant::now();
        let wait = |what: &str| {
            assert!(start.elapsed() < Duration::from_secs(20), "{what}: {arguments:?}");
            std::thread::sleep(Duration::from_millis(20));
        };
        let asked = loop {
            match silent.accept() {
                Ok(asked) => break asked,
                Err(_) => wait("it asks for nothing"),
            }
        };
        assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
        let ended = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None => wait("it goes on"),
            }
        };
        assert_eq!(ended.code(), Some(130), "{arguments:?}");
        drop(asked);
    }
}
