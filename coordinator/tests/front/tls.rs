//! Certificates: of clients on both ports, of workers, and what goes without.

use std::{net::SocketAddr, time::Duration};

use lockstep_coordinator::{CoordinatorConfig, CoordinatorError};
use lockstep_proto::{
    status::Class,
    v1::{self, admin_client::AdminClient, cluster_client::ClusterClient, inference_client::InferenceClient},
};
use lockstep_tests::certificates::{Authority, Folder};
use lockstep_transport::{ClientTls, ClusterTls, Connector, Outbound, TlsFiles, explain};
use rand::RngCore;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::stub::{Coordinator, StubWorker, collect, config, eventually, request};

/// Certificates of a cluster and of its server.
struct Certificates {
    folder: Folder,
    cluster: Authority,
    clients: Authority,
}

impl Certificates {
    fn new() -> Self {
        Self { folder: Folder::new().unwrap(), cluster: Authority::new().unwrap(), clients: Authority::new().unwrap() }
    }

    fn server(&self) -> TlsFiles {
        self.folder.files("server", None, Some(&self.clients.sign("server").unwrap())).unwrap()
    }

    fn member(&self, name: &str) -> ClusterTls {
        ClusterTls::open(self.folder.member(name, &self.cluster).unwrap()).unwrap()
    }

    fn client(&self, trusts: &Authority) -> Outbound {
        Outbound::Server(ClientTls::open(&self.folder.files("client", Some(trusts), None).unwrap()).unwrap())
    }

    fn config(&self) -> CoordinatorConfig {
        let cluster_tls = Some(self.folder.member("coordinator", &self.cluster).unwrap());
        CoordinatorConfig { client_tls: Some(self.server()), cluster_tls, ..config("tensor=2", 2) }
    }
}

fn channel(address: SocketAddr, outbound: Outbound) -> Channel {
    let (endpoint, connector) = Connector::new(&address.to_string(), outbound).unwrap();
    endpoint.connect_with_connector_lazy(connector)
}

async fn wait_ready(channel: &Channel) {
    let mut client = InferenceClient::new(channel.clone());
    for _ in 0..500 {
        let models = client.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
        if models.iter().any(|model| model.ready) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the model is not ready");
}

/// A cluster of two workers, all secured, and a client's connection.
async fn secured(certificates: &Certificates) -> (Coordinator, [StubWorker; 2], Channel) {
    let coordinator = Coordinator::start(certificates.config()).await;
    let workers = [
        StubWorker::start_as("w0", coordinator.grpc, Some(certificates.member("w0"))).await,
        StubWorker::start_as("w1", coordinator.grpc, Some(certificates.member("w1"))).await,
    ];
    let client = channel(coordinator.grpc, certificates.client(&certificates.clients));
    wait_ready(&client).await;
    (coordinator, workers, client)
}

#[tokio::test]
async fn clients_and_workers_come_in_over_tls() {
    let certificates = Certificates::new();
    let (coordinator, _workers, client) = secured(&certificates).await;
    let stream = InferenceClient::new(client).generate(request(5)).await.unwrap();
    assert_eq!(collect(stream.into_inner()).await.unwrap().text, "hello");

    let _ = rustls::crypto::ring::default_provider().install_default();
    let authority = std::fs::read(certificates.folder.path().join("client.ca")).unwrap();
    let http = reqwest::Client::builder()
        .tls_certs_only([reqwest::Certificate::from_pem(&authority).unwrap()])
        .build()
        .unwrap();
    let url = |path: &str| format!("https://{}{path}", coordinator.http);
    let metrics = http.get(url("/metrics")).send().await.unwrap().text().await.unwrap();
    for certificate in ["clients", "cluster"] {
        let gauge =
            format!("lockstep_coordinator_certificate_expiry_timestamp_seconds{{certificate=\"{certificate}\"}} ");
        assert!(metrics.contains(&gauge), "{metrics}");
    }
    let body = r#"{"prompt": "hi", "max_tokens": 5}"#;
    let post = http.post(url("/v1/completions")).header("content-type", "application/json").body(body);
    let answer = post.send().await.unwrap();
    assert_eq!(answer.version(), reqwest::Version::HTTP_11);
    assert!(answer.text().await.unwrap().contains("\"hello\""));
}

#[tokio::test]
async fn nobody_else_gets_in() {
    let certificates = Certificates::new();
    let coordinator = Coordinator::start(certificates.config()).await;
    let list = async |outbound| {
        let mut client = InferenceClient::new(channel(coordinator.grpc, outbound));
        client.list_models(v1::ListModelsRequest {}).await.unwrap_err()
    };
    let told = async |outbound| explain(&list(outbound).await).unwrap();
    assert_eq!(told(Outbound::ClearText).await, "the other end speaks TLS (https), this one clear text");
    assert!(told(certificates.client(&certificates.cluster)).await.contains("no authority that is trusted here"));
    // Neither kind of certificate opens the other's services.
    let refused = list(Outbound::Member(certificates.member("m"))).await;
    assert_eq!(Class::of(&refused), Class::Unauthenticated, "{refused:?}");
    let as_client = channel(coordinator.grpc, certificates.client(&certificates.clients));
    let refused = ClusterClient::new(as_client).register(tokio_stream::empty()).await.unwrap_err();
    assert_eq!(Class::of(&refused), Class::Unauthenticated, "{refused:?}");
    // A worker of another cluster.
    let files = certificates.folder.member("stranger", &Authority::new().unwrap()).unwrap();
    let stranger = StubWorker::start_as("w0", coordinator.grpc, Some(ClusterTls::open(files).unwrap())).await;
    let refused = stranger.registration.await.unwrap();
    assert!(explain(&refused).unwrap().contains("no authority that is trusted here"), "{refused:?}");
    let as_client = channel(coordinator.grpc, certificates.client(&certificates.clients));
    let cluster = AdminClient::new(as_client).get_cluster(v1::GetClusterRequest {}).await.unwrap().into_inner();
    assert!(cluster.workers.is_empty(), "{cluster:?}");
}

#[tokio::test]
async fn a_client_without_a_certificate_is_told_so() {
    let certificates = Certificates::new();
    let client_tls = TlsFiles {
        ca: certificates.folder.files("ca", Some(&certificates.clients), None).unwrap().ca,
        ..certificates.server()
    };
    let coordinator =
        Coordinator::start(CoordinatorConfig { client_tls: Some(client_tls), ..certificates.config() }).await;
    // Each time: the reason must not be lost with the connection.
    for _ in 0..20 {
        let channel = channel(coordinator.grpc, certificates.client(&certificates.clients));
        let refused = InferenceClient::new(channel).list_models(v1::ListModelsRequest {}).await.unwrap_err();
        assert_eq!(
            explain(&refused).as_deref(),
            Some("the other end demands a certificate of this one"),
            "{refused:?}"
        );
    }
}

#[tokio::test]
async fn certificates_change_under_a_running_stream() {
    let certificates = Certificates::new();
    let (coordinator, workers, client) = secured(&certificates).await;
    for worker in &workers {
        *worker.state.token_delay.lock().unwrap() = Duration::from_millis(20);
    }
    let stream = InferenceClient::new(client).generate(request(200)).await.unwrap();
    let stream = tokio::spawn(collect(stream.into_inner()));
    let new = Authority::new().unwrap();
    certificates.folder.files("server", None, Some(&new.sign("server").unwrap())).unwrap();
    let mut is_new = false;
    for _ in 0..100 {
        let mut client = InferenceClient::new(channel(coordinator.grpc, certificates.client(&new)));
        is_new = client.list_models(v1::ListModelsRequest {}).await.is_ok();
        if is_new {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(is_new && !stream.is_finished(), "new connections have the new certificate while the stream runs");
    assert_eq!(stream.await.unwrap().unwrap().token_ids.len(), 200);
}

#[tokio::test]
async fn addresses_of_other_machines_need_certificates_or_consent() {
    let everywhere: SocketAddr = "0.0.0.0:0".parse().unwrap();
    let start = |config| lockstep_coordinator::run(config, CancellationToken::new(), |_, _| {});
    for (config, setting) in [
        (CoordinatorConfig { grpc_listen: everywhere, ..config("auto", 1) }, "grpc_listen"),
        (CoordinatorConfig { http_listen: everywhere, ..config("auto", 1) }, "http_listen"),
    ] {
        let error = start(config).await.unwrap_err();
        assert!(matches!(&error, CoordinatorError::Exposed { setting: named, .. } if *named == setting), "{error}");
        assert!(error.to_string().contains("insecure"), "{error}");
    }
    Coordinator::start(CoordinatorConfig { grpc_listen: everywhere, allow_insecure: true, ..config("auto", 1) }).await;
    let missing = TlsFiles { ca: None, pair: Some(("/none/a.pem".into(), "/none/a.key".into())) };
    let error = start(CoordinatorConfig { client_tls: Some(missing), ..config("auto", 1) }).await.unwrap_err();
    assert!(error.to_string().starts_with("/none/a.pem: "), "{error}");
}

#[tokio::test]
async fn garbage_ends_its_own_connection_only() {
    let certificates = Certificates::new();
    let (coordinator, workers, client) = secured(&certificates).await;
    let in_clear = Coordinator::start(config("auto", 1)).await;
    let ports = [coordinator.grpc, coordinator.http, workers[0].address, in_clear.grpc, in_clear.http];
    let mut connections = Vec::new();
    for (index, address) in ports.into_iter().cycle().take(200).enumerate() {
        let mut bytes = vec![0; index * 7];
        rand::rng().fill_bytes(&mut bytes);
        // A beginning that each of the protocols takes for its own, and none.
        let begin: &[u8] =
            [&b"\x16\x03\x01\x02\x00\x01"[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET ", b""][index / 5 % 4];
        let mut stream = TcpStream::connect(address).await.unwrap();
        // It may have been closed meanwhile.
        let _ = stream.write_all(&[begin, &bytes].concat()).await;
        let _ = stream.shutdown().await;
        connections.push(stream);
    }
    for mut stream in connections {
        let ended = tokio::time::timeout(Duration::from_secs(8), stream.read_to_end(&mut Vec::new())).await;
        assert!(ended.is_ok(), "a connection of garbage is still open: {:?}", stream.peer_addr());
    }
    let stream = InferenceClient::new(client).generate(request(5)).await.unwrap();
    assert_eq!(collect(stream.into_inner()).await.unwrap().text, "hello");
    eventually("the other coordinator runs", || !in_clear.ended.is_finished()).await;
    let mut client = InferenceClient::new(channel(in_clear.grpc, Outbound::ClearText));
    assert!(client.list_models(v1::ListModelsRequest {}).await.is_ok());
}
