//! TLS between clients and coordinators: the usual kind, in which the server's name counts and a client shows a certificate
//! only where one is demanded.

use std::{sync::Arc, time::SystemTime};

use rustls::{
    ClientConfig, ConfigBuilder, RootCertStore, ServerConfig, WantsVerifier,
    client::WantsClientCert,
    server::WebPkiClientVerifier,
    sign::{CertifiedKey, SingleCertAndKey},
    version::{TLS12, TLS13},
};

use crate::{
    TlsError, TlsFiles,
    files::Credentials,
    provider,
    reload::Reloading,
    verify::{AnyName, Trusted},
};

/// What a server shows to clients and, with an authority, demands of them; cheap to clone.
#[derive(Clone)]
pub struct ServerTls(Arc<Reloading<Configs>>);

struct Configs {
    grpc: Arc<ServerConfig>,
    http: Arc<ServerConfig>,
}

impl ServerTls {
    /// Reads the certificate and key; with `files.ca` clients need a certificate of one of these authorities.
    ///
    /// # Errors
    /// [`TlsError`] naming the file.
    pub fn open(files: TlsFiles) -> Result<Self, TlsError> {
        Ok(Self(Arc::new(Reloading::open("clients", files, configs)?)))
    }

    /// When the certificate in force expires.
    pub fn not_after(&self) -> SystemTime {
        self.0.not_after()
    }

    /// Takes changed files over, for ever.
    pub async fn watch(self) {
        self.0.watch().await;
    }

    pub(crate) fn grpc(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.current().grpc)
    }

    pub(crate) fn http(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.current().http)
    }
}

fn configs(credentials: &Credentials) -> Result<Configs, TlsError> {
    let missing = || TlsError::Missing { needed: "a certificate and its key", by: "TLS for clients" };
    let own = credentials.own.clone().ok_or_else(missing)?;
    let builder = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13, &TLS12])?;
    let builder = match &credentials.roots {
        None => builder.with_no_client_auth(),
        Some(roots) => builder.with_client_cert_verifier(
            WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), provider()).build()?,
        ),
    };
    let mut grpc = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(own)));
    let mut http = grpc.clone();
    grpc.alpn_protocols = vec![b"h2".to_vec()];
    http.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Configs { grpc: Arc::new(grpc), http: Arc::new(http) })
}

/// What a client demands of servers and, with a certificate, shows to them; cheap to clone.
#[derive(Clone)]
pub struct ClientTls(pub(crate) Arc<ClientConfig>);

impl ClientTls {
    /// Reads the authorities, without `files.ca` those of the system, and the certificate and key if there are any.
    ///
    /// # Errors
    /// [`TlsError`] naming the file.
    pub fn open(files: &TlsFiles) -> Result<Self, TlsError> {
        let credentials = files.parse(&files.read()?)?;
        let builder = client_builder()?.with_root_certificates(credentials.roots.unwrap_or_else(system_roots));
        Ok(Self::of(builder, credentials.own))
    }

    /// For the server that shows the certificate of `files`, under whatever name, and nobody else; it is shown the same
    /// certificate if it demands one. For who started that server.
    ///
    /// # Errors
    /// [`TlsError`] naming the file.
    pub fn to_own_server(files: &TlsFiles) -> Result<Self, TlsError> {
        let missing = || TlsError::Missing { needed: "the server's certificate", by: "a connection to it" };
        let own = files.parse(&files.read()?)?.own.ok_or_else(missing)?;
        let certificate = own.end_entity_cert()?.clone().into_owned();
        let verifier = AnyName { trusted: Trusted::Exactly(certificate), provider: provider() };
        let builder = client_builder()?.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
        Ok(Self::of(builder, Some(own)))
    }

    fn of(builder: ConfigBuilder<ClientConfig, WantsClientCert>, own: Option<Arc<CertifiedKey>>) -> Self {
        let mut config = match own {
            None => builder.with_no_client_auth(),
            Some(own) => builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(own))),
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        Self(Arc::new(config))
    }
}

fn client_builder() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, TlsError> {
    Ok(ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13, &TLS12])?)
}

/// Those authorities of the system that can be read; without any, no server is trusted.
fn system_roots() -> Arc<RootCertStore> {
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    Arc::new(store)
}
