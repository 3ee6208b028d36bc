//! What deploys the binary: the Helm chart, the container and compose files, the systemd units, held against schemas and
//! house rules, and run as far as they can be. The checks are Python's, since Helm's engine, Kubernetes' schemas and the
//! linter come as its packages (`helm/tests`, `deploy/tests`).

use std::process::Command;

use lockstep_tests::{cluster, environment, process::finish};

/// Runs a module of tests of a folder; its own report is the reason if one fails.
async fn run_python(folder: &str, module: &str) {
    let mut python = Command::new(environment::python().unwrap());
    python.args(["-m", "unittest", module]).current_dir(environment::repository().join(folder));
    python.env("LOCKSTEP_BIN", environment::binary().unwrap());
    let ended = finish(python, &[]).await.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(ended.status.success(), "{}{}", text(&ended.stdout), text(&ended.stderr));
}

#[tokio::test]
async fn the_chart_renders_what_kubernetes_takes() {
    run_python("helm/tests", "test_chart").await;
}

#[tokio::test]
async fn the_chart_renders_what_operators_rely_on() {
    run_python("helm/tests", "test_operation").await;
}

#[tokio::test]
async fn helm_installs_changes_and_rolls_back_the_chart() {
    run_python("helm/tests", "test_release").await;
}

#[tokio::test]
async fn the_chart_s_etcd_loses_a_disk_and_grows() {
    run_python("helm/tests", "test_etcd").await;
}

#[tokio::test]
async fn alerts_and_dashboard_know_the_metrics() {
    run_python("helm/tests", "test_monitoring").await;
}

#[tokio::test]
async fn the_cluster_that_the_chart_describes_answers() {
    let _turn = cluster::turn().unwrap();
    run_python("helm/tests", "test_cluster").await;
}

#[tokio::test]
async fn compose_and_units_run_what_they_say() {
    let _turn = cluster::turn().unwrap();
    run_python("deploy/tests", "test_containers").await;
}

#[tokio::test]
async fn a_model_is_delivered_over_breaks_and_by_slices() {
    let _turn = cluster::turn().unwrap();
    run_python("helm/tests", "test_delivery").await;
}
