//! A cluster whose members speak mutual TLS: the same tokens, and no strangers.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use lockstep_proto::v1::{GetClusterRequest, generate_request::Input};
use lockstep_tests::{
    Cluster, Etcd, Layout, SharedCluster,
    certificates::{Authority, Folder},
    client::greedy,
    environment,
    http::{get, get_json},
    process::{PATIENCE, lockstep},
    shared::Members,
};

use crate::prompts::PROMPTS;

async fn tokens(cluster: &Cluster) -> Vec<u32> {
    let client = cluster.client().await.unwrap();
    client.generate(greedy(Input::Prompt(PROMPTS[0].into()), 40)).await.unwrap().token_ids
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secured_cluster_gives_the_same_tokens_and_takes_no_strangers() {
    let layout = Layout::new(2, 1);
    let in_clear = tokens(&Cluster::start(layout).unwrap()).await;
    let (folder, ours) = (Folder::new().unwrap(), Authority::new().unwrap());
    let cluster = Cluster::start_secured(layout, &folder.member("member", &ours).unwrap()).unwrap();
    assert_eq!(tokens(&cluster).await, in_clear);
    let pages = get_json(&cluster.http(), "/prometheus/workers").await.unwrap();
    for page in pages.as_array().unwrap() {
        assert_eq!(page["labels"]["__scheme__"], "https");
        let refused = get(page["targets"][0].as_str().unwrap(), "/metrics").await.unwrap_err().to_string();
        assert!(refused.contains("this port speaks TLS"), "{refused}");
    }
    assert_eq!(pages.as_array().unwrap().len(), 2);

    // One of another authority never comes in and goes on trying; one without certificates is told and ends.
    let files = folder.member("stranger", &Authority::new().unwrap()).unwrap();
    let _stranger = cluster.spare_member("stranger", &files).unwrap();
    let coordinator = format!("--coordinator={}", cluster.grpc());
    let ended = lockstep(&["worker", "--device=cpu", "--worker-id=bare", &coordinator]).await.unwrap();
    let log = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && log.contains("cluster_ca, cluster_cert and cluster_key are needed"), "{log}");
    let end = Instant::now() + PATIENCE;
    while !cluster.log().contains("the other end's certificate comes from no authority that is trusted here") {
        assert!(Instant::now() < end, "{}", cluster.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let client = cluster.client().await.unwrap();
    let state = client.admin.clone().get_cluster(GetClusterRequest {}).await.unwrap().into_inner();
    let ids: Vec<&str> = state.workers.iter().map(|worker| worker.worker_id.as_str()).collect();
    assert_eq!(ids, ["worker-0", "worker-1"]);
    assert_eq!(tokens(&cluster).await, in_clear);
}

#[tokio::test(flavor = "multi_thread")]
async fn up_serves_clients_with_certificates() {
    let (folder, authority) = (Folder::new().unwrap(), Authority::new().unwrap());
    let server = folder.member("server", &authority).unwrap();
    let (Some(ca), Some((cert, key))) = (server.ca, server.pair) else { panic!("a member without files") };
    let flag = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let flags = [flag("tls-cert", &cert), flag("tls-key", &key), flag("client-ca", &ca)];
    let arguments = [flags[0].as_str(), &flags[1], &flags[2], "--prefix-caching=off"];
    let cluster = Cluster::start_with_arguments(Layout::new(1, 1), &environment::model().unwrap(), &arguments).unwrap();
    let generate = ["generate", "--max-tokens=4", "Once upon", &format!("--server=https://{}", cluster.grpc())];
    let trusting = [flag("tls-ca", &ca), flag("tls-cert", &cert), flag("tls-key", &key)];
    let trusting: Vec<&str> = trusting.iter().map(String::as_str).collect();
    let answered = lockstep(&[&generate[..], &trusting[..]].concat()).await.unwrap();
    assert!(answered.status.success() && !answered.stdout.is_empty(), "{answered:?}");
    let refused = lockstep(&[&generate[..], &trusting[..1]].concat()).await.unwrap();
    let error = String::from_utf8_lossy(&refused.stderr);
    // What TLS says of it may be lost with the connection.
    let says_how = error.contains("a certificate") && error.contains("(--tls-cert, --tls-key)");
    assert!(!refused.status.success() && says_how, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_may_demand_certificates_and_a_password() {
    let (folder, authority) = (Folder::new().unwrap(), Authority::new().unwrap());
    let mut etcd = Etcd::start_secured(&folder.member("etcd", &authority).unwrap()).unwrap();
    etcd.demand_password("lockstep", "secret", "/lockstep/").unwrap();
    let password = folder.path().join("password");
    std::fs::write(&password, "secret\n").unwrap();
    let files = folder.member("us", &authority).unwrap();
    let (Some(ca), Some((cert, key))) = (files.ca, files.pair) else { panic!("a member without files") };
    let flag = |name: &str, path: &Path| format!("--etcd-{name}={}", path.display());
    let access = vec![
        flag("ca", &ca),
        flag("cert", &cert),
        flag("key", &key),
        "--etcd-username=lockstep".to_owned(),
        flag("password-file", &password),
    ];
    let members = Members::new(1, 1, "tensor=1");
    let cluster = SharedCluster::start_over(etcd, access, members).unwrap();
    let client = cluster.client(0).await.unwrap();
    let request = greedy(Input::Prompt(PROMPTS[0].into()), 4);
    let end = Instant::now() + PATIENCE;
    while client.generate(request.clone()).await.is_err() {
        assert!(Instant::now() < end, "{}", cluster.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_etcd_refuses_is_said_once_with_its_setting() {
    let mut etcd = Etcd::start(1).unwrap();
    etcd.demand_password("lockstep", "secret", "/lockstep/").unwrap();
    let folder = Folder::new().unwrap();
    let password = folder.path().join("password");
    std::fs::write(&password, "another\n").unwrap();
    let access = vec!["--etcd-username=lockstep".to_owned(), format!("--etcd-password-file={}", password.display())];
    let members = Members::new(1, 1, "tensor=1");
    let cluster = SharedCluster::start_over(etcd, access, members).unwrap();
    let count = || cluster.log().matches("do not trust each other").count();
    let end = Instant::now() + PATIENCE;
    while count() < 2 {
        assert!(Instant::now() < end, "{}", cluster.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let log = cluster.log();
    assert_eq!((count(), log.matches("authentication failed").count()), (2, 2), "{log}");
    assert!(log.contains("etcd_password_file") && !log.contains("etcd is away"), "{log}");
}

#[tokio::test]
async fn what_other_machines_reach_needs_certificates_or_consent() {
    let worker = lockstep(&["worker", "--device=cpu", "--advertise-host=host-b"]).await.unwrap();
    let coordinator = lockstep(&["coordinator", "--grpc-listen=0.0.0.0:0"]).await.unwrap();
    for (ended, setting) in [(worker, "listen: is 0.0.0.0:0"), (coordinator, "grpc_listen is 0.0.0.0:0")] {
        let log = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success() && log.contains(setting) && log.contains("insecure"), "{log}");
    }
}
