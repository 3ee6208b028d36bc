//! Who may know whom: the crates' dependencies, as cargo sees them.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use lockstep_tests::environment;
use serde_json::Value;

/// Crate → the crates of this workspace that it may depend on (tests' dependencies aside).
const MAY_KNOW: [(&str, &[&str]); 14] = [
    ("lockstep-formats", &[]),
    ("lockstep-proto", &[]),
    ("lockstep-transport", &[]),
    ("lockstep-etcd", &["lockstep-transport"]),
    ("lockstep-telemetry", &["lockstep-transport"]),
    ("lockstep-sharding", &["lockstep-formats"]),
    ("lockstep-kernels", &["lockstep-formats"]),
    ("lockstep-model", &["lockstep-formats", "lockstep-sharding"]),
    ("lockstep-executor", &["lockstep-formats", "lockstep-kernels", "lockstep-model", "lockstep-sharding"]),
    (
        "lockstep-browser",
        &["lockstep-executor", "lockstep-formats", "lockstep-kernels", "lockstep-model", "lockstep-sharding"],
    ),
    (
        "lockstep-worker",
        &[
            "lockstep-etcd",
            "lockstep-executor",
            "lockstep-formats",
            "lockstep-proto",
            "lockstep-model",
            "lockstep-sharding",
            "lockstep-kernels",
            "lockstep-telemetry",
            "lockstep-transport",
        ],
    ),
    (
        "lockstep-coordinator",
        &[
            "lockstep-etcd",
            "lockstep-proto",
            "lockstep-model",
            "lockstep-sharding",
            "lockstep-telemetry",
            "lockstep-transport",
        ],
    ),
    (
        "lockstep-cli",
        &[
            "lockstep-etcd",
            "lockstep-formats",
            "lockstep-proto",
            "lockstep-model",
            "lockstep-sharding",
            "lockstep-kernels",
            "lockstep-telemetry",
            "lockstep-transport",
            "lockstep-worker",
            "lockstep-coordinator",
        ],
    ),
    ("lockstep-tests", &["lockstep-proto", "lockstep-transport"]),
];

/// Crate → packages from outside that it must not depend on.
const MUST_NOT_USE: [(&str, &[&str]); 5] = [
    ("lockstep-sharding", &["tokio", "tonic", "rand", "axum", "cudarc", "wgpu"]),
    ("lockstep-kernels", &["tokio", "tonic", "etcd-client"]),
    ("lockstep-coordinator", &["candle-core", "cudarc", "wgpu", "rustls"]),
    ("lockstep-worker", &["cudarc", "wgpu", "axum", "rustls"]),
    ("lockstep-proto", &["tokio", "etcd-client"]),
];

/// Crate → names of what it depends on outside of tests.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let manifest = environment::repository().join("Cargo.toml");
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline", "--manifest-path"])
        .arg(manifest)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let name_of = |value: &Value| value["name"].as_str().unwrap().to_owned();
    metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| {
            let used = package["dependencies"].as_array().unwrap().iter();
            (name_of(package), used.filter(|dependency| dependency["kind"] != "dev").map(name_of).collect())
        })
        .collect()
}

#[test]
fn crates_know_only_whom_they_may() {
    let dependencies = dependencies();
    let known: BTreeSet<&str> = MAY_KNOW.iter().map(|(name, _)| *name).collect();
    assert_eq!(dependencies.keys().map(String::as_str).collect::<BTreeSet<_>>(), known, "a crate without a rule");
    for (name, allowed) in MAY_KNOW {
        let ours = dependencies[name].iter().filter(|dependency| dependency.starts_with("lockstep-"));
        for dependency in ours {
            assert!(allowed.contains(&dependency.as_str()), "{name} must not depend on {dependency}");
        }
    }
    for (name, forbidden) in MUST_NOT_USE {
        for dependency in forbidden {
            assert!(!dependencies[name].contains(*dependency), "{name} must not use {dependency}");
        }
    }
}
