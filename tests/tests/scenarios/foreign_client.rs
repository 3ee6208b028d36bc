//! A client in another language that knows the server by reflection alone.

use std::process::Command;

use lockstep_tests::{Cluster, Layout, environment, process::finish};
use serde_json::Value;

#[tokio::test(flavor = "multi_thread")]
async fn python_calls_generate_by_reflection() {
    let cluster = Cluster::start(Layout::new(2, 1)).unwrap();
    let script = environment::repository().join("tests/python/foreign_client.py");
    let mut python = Command::new(environment::python().unwrap());
    python.arg(script).arg(cluster.grpc());
    let ended = finish(python, &[]).await.unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let report: Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!(report["health"], "SERVING", "{report}");
    let text = report["text"].as_str().unwrap();
    assert!(text.starts_with(" Paris"), "{report}");
    assert_eq!(report["finish"]["usage"]["completionTokens"], 8, "{report}");
    assert_eq!(report["refused"], "INVALID_ARGUMENT", "{report}");
    assert_eq!(report["reason"], "invalid_request", "{report}");
    let services = report["services"].as_array().unwrap();
    for service in ["lockstep.v1.Inference", "lockstep.v1.Admin", "grpc.health.v1.Health"] {
        assert!(services.iter().any(|name| name == service), "{report}");
    }
}
