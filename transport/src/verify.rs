//! Which servers are trusted where names say nothing.
//! For: members of a cluster, which come and go under any address, and whoever connects to a server of his own making.
//! Not here: servers that are reached under a name, whose certificates must be for it ([`crate::client`]).

use std::sync::Arc;

use rustls::{
    CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor,
    },
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::ParsedCertificate,
};

/// Whose certificates are accepted.
#[derive(Debug)]
pub(crate) enum Trusted {
    /// Those that come from one of these authorities.
    SignedBy(Arc<RootCertStore>),
    /// This one alone.
    Exactly(CertificateDer<'static>),
}

/// Accepts a server under whatever name it is reached.
#[derive(Debug)]
pub(crate) struct AnyName {
    /// Whom.
    pub trusted: Trusted,
    /// Checks signatures.
    pub provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match &self.trusted {
            Trusted::SignedBy(roots) => verify_server_cert_signed_by_trust_anchor(
                &ParsedCertificate::try_from(end_entity)?,
                roots,
                intermediates,
                now,
                self.provider.signature_verification_algorithms.all,
            )?,
            Trusted::Exactly(certificate) if certificate == end_entity => {}
            Trusted::Exactly(_) => return Err(CertificateError::UnknownIssuer.into()),
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
