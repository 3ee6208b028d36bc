//! Mutual TLS 1.3 between the members of a cluster: coordinators, workers and their ranks.
//! Invariant: both ends show a certificate of the cluster's authority. That alone makes a member: names are not compared,
//! since members are reached by addresses that come and go. So the authority is one that signs for this cluster only.

use std::{sync::Arc, time::SystemTime};

use rustls::{
    CipherSuite, ClientConfig, ServerConfig, client::Resumption, crypto::CryptoProvider, server::WebPkiClientVerifier,
    sign::SingleCertAndKey, version::TLS13,
};

use crate::{
    TlsError, TlsFiles,
    files::Credentials,
    provider,
    reload::Reloading,
    verify::{AnyName, Trusted},
};

/// By this protocol name a member's gRPC connection is told from a client's on a port that takes both.
pub(crate) const GRPC_PROTOCOL: &[u8] = b"lockstep-grpc";
/// Protocol name of the links between ranks.
const RANK_PROTOCOL: &[u8] = b"lockstep-rank";

/// What a member shows to others and demands of them; cheap to clone.
#[derive(Clone)]
pub struct ClusterTls(Arc<Reloading<Configs>>);

struct Configs {
    grpc: Both,
    ranks: Both,
}

/// The two ends of a connection.
struct Both {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl ClusterTls {
    /// Reads the authority, and this member's certificate and key; all three are needed.
    ///
    /// # Errors
    /// [`TlsError`] naming the file.
    pub fn open(files: TlsFiles) -> Result<Self, TlsError> {
        Ok(Self(Arc::new(Reloading::open("cluster", files, configs)?)))
    }

    /// When the certificate in force expires.
    pub fn not_after(&self) -> SystemTime {
        self.0.not_after()
    }

    /// Takes changed files over, for ever.
    pub async fn watch(self) {
        self.0.watch().await;
    }

    pub(crate) fn grpc_server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.current().grpc.server)
    }

    pub(crate) fn grpc_client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.0.current().grpc.client)
    }

    pub(crate) fn rank_server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.current().ranks.server)
    }

    pub(crate) fn rank_client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.0.current().ranks.client)
    }
}

impl std::fmt::Debug for ClusterTls {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("ClusterTls")
    }
}

fn configs(credentials: &Credentials) -> Result<Configs, TlsError> {
    let missing = |needed| TlsError::Missing { needed, by: "TLS within the cluster" };
    let roots = credentials.roots.clone().ok_or_else(|| missing("the cluster's authority"))?;
    let own = credentials.own.clone().ok_or_else(|| missing("a member's certificate and key"))?;
    let provider = fast_provider();
    let demand_of_clients =
        WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider)).build()?;
    let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(demand_of_clients)
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(Arc::clone(&own))));
    // Connections of members last: each begins with the certificates, none by a ticket of an earlier one.
    server.send_tls13_tickets = 0;
    let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyName { trusted: Trusted::SignedBy(roots), provider }))
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(own)));
    client.resumption = Resumption::disabled();
    let both = |protocol: &[u8]| {
        let (mut server, mut client) = (server.clone(), client.clone());
        server.alpn_protocols = vec![protocol.to_vec()];
        client.alpn_protocols = vec![protocol.to_vec()];
        Both { server: Arc::new(server), client: Arc::new(client) }
    };
    Ok(Configs { grpc: both(GRPC_PROTOCOL), ranks: both(RANK_PROTOCOL) })
}

/// With the cipher first that processors have instructions for and that costs least.
fn fast_provider() -> Arc<CryptoProvider> {
    let mut provider = CryptoProvider::clone(&provider());
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}
