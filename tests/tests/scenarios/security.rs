//! A cluster whose members speak mutual TLS: the same tokens, and no strangers.

use std::time::{Duration, Instant};

use lockstep_proto::v1::{GetClusterRequest, generate_request::Input};
use lockstep_tests::{
    Cluster, Layout,
    certificates::{Authority, Folder},
    client::greedy,
    http::{get, get_json},
    process::lockstep,
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
    let end = Instant::now() + Duration::from_secs(10);
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

#[tokio::test]
async fn what_other_machines_reach_needs_certificates_or_consent() {
    let worker = lockstep(&["worker", "--device=cpu", "--advertise-host=host-b"]).await.unwrap();
    let coordinator = lockstep(&["coordinator", "--grpc-listen=0.0.0.0:0"]).await.unwrap();
    for (ended, setting) in [(worker, "listen: is 0.0.0.0:0"), (coordinator, "grpc_listen is 0.0.0.0:0")] {
        let log = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success() && log.contains(setting) && log.contains("insecure"), "{log}");
    }
}
