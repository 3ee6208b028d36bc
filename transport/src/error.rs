//! What is wrong with certificates, keys and addresses, and what a failed handshake means in words.

use std::{error::Error, io, path::PathBuf};

use rustls::{AlertDescription, CertificateError};

/// A file or setting of TLS that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A file does not hold what it should.
    #[error("{path}: {problem}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A certificate has expired.
    #[error("{path}: the certificate expired on {date}")]
    Expired {
        /// The file.
        path: PathBuf,
        /// Its last second, RFC 3339.
        date: String,
    },
    /// A file that is needed was not named.
    #[error("{needed} is not set, which {by} needs")]
    Missing {
        /// What is missing.
        needed: &'static str,
        /// What needs it.
        by: &'static str,
    },
    /// rustls refuses the certificates.
    #[error("certificates cannot be used: {0}")]
    Refused(#[from] rustls::Error),
    /// They make no verifier of clients.
    #[error("certificates cannot be used: {0}")]
    Verifier(#[from] rustls::client::VerifierBuilderError),
}

/// An address that cannot be connected to.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// It does not parse.
    #[error("address {0:?} is not of the form host:port")]
    Form(String),
    /// It says `https`, but there is nothing to check the other end with.
    #[error("address {0:?} asks for TLS, for which no certificate authority is set")]
    NeedsTls(String),
    /// It says `http` where TLS is set.
    #[error("address {0:?} asks for clear text, but certificates are set")]
    ForbidsTls(String),
}

/// What TLS has against a connection, if it is to blame for `error`: for people, from this end's point of view.
pub fn explain(error: &(dyn Error + 'static)) -> Option<String> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        if let Some(alert) = inner.and_then(|inner| alert_in(&inner.to_string())) {
            return Some(words(&alert));
        }
        let inner = inner.and_then(|inner| inner.downcast_ref::<rustls::Error>());
        if let Some(error) = error.downcast_ref::<rustls::Error>().or(inner) {
            return Some(words(error));
        }
        let reason = error.downcast_ref::<h2::Error>().and_then(h2::Error::reason);
        if reason == Some(h2::Reason::INADEQUATE_SECURITY) {
            return Some("the other end speaks TLS (https), this one clear text".to_owned());
        }
        cause = error.source();
    }
    None
}

/// The alert that an error's text tells of: of an error of its connection HTTP/2 keeps the text alone.
fn alert_in(text: &str) -> Option<rustls::Error> {
    let name = text.strip_prefix("received fatal alert: ")?;
    let known = [
        AlertDescription::CertificateRequired,
        AlertDescription::UnknownCA,
        AlertDescription::DecryptError,
        AlertDescription::CertificateExpired,
        AlertDescription::NoApplicationProtocol,
    ];
    known.into_iter().find(|alert| format!("{alert:?}") == name).map(rustls::Error::AlertReceived)
}

fn words(error: &rustls::Error) -> String {
    use rustls::Error as Tls;
    let words = match error {
        Tls::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
            "the other end's certificate comes from no authority that is trusted here"
        }
        Tls::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
            "the other end's certificate has expired"
        }
        Tls::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => {
            return format!("the other end's certificate is for another name: {error}");
        }
        Tls::AlertReceived(AlertDescription::CertificateRequired) => "the other end demands a certificate of this one",
        Tls::AlertReceived(AlertDescription::UnknownCA | AlertDescription::DecryptError) => {
            "the other end does not trust the authority that this one's certificate comes from"
        }
        Tls::AlertReceived(AlertDescription::CertificateExpired) => {
            "to the other end this one's certificate has expired"
        }
        Tls::AlertReceived(AlertDescription::NoApplicationProtocol) => {
            "the other end is not of this kind: a port for clients is no port for members, nor the other way round"
        }
        Tls::InvalidMessage(_) => "the other end does not speak TLS",
        Tls::NoCertificatesPresented => "the other end has shown no certificate",
        other => return format!("TLS failed: {other}"),
    };
    words.to_owned()
}
