//! Certificates and keys as they lie in PEM files.
//! Invariant: what leaves here can be used: a key fits its certificate, which has not expired.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use x509_cert::{
    Certificate,
    der::{DateTime, Decode},
};

use crate::{TlsError, provider};

/// The files of one end of a connection, PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of the authorities from one of which the other end's certificate must come.
    pub ca: Option<PathBuf>,
    /// This end's certificate, followed by those between it and its authority, and its private key.
    pub pair: Option<(PathBuf, PathBuf)>,
}

/// Their bytes.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Pem {
    /// Of the authorities.
    pub ca: Option<Vec<u8>>,
    /// Certificate and private key.
    pub pair: Option<(Vec<u8>, Vec<u8>)>,
}

/// What they hold.
pub(crate) struct Credentials {
    /// The authorities.
    pub roots: Option<Arc<RootCertStore>>,
    /// This end's certificate and key.
    pub own: Option<Arc<CertifiedKey>>,
    /// When this end's certificate expires; far away if there is none.
    pub not_after: SystemTime,
}

impl TlsFiles {
    /// Reads all files. Symbolic links are followed anew each time.
    ///
    /// # Errors
    /// [`TlsError::Read`].
    pub fn read(&self) -> Result<Pem, TlsError> {
        let read = |path: &PathBuf| std::fs::read(path).map_err(|source| TlsError::Read { path: path.clone(), source });
        let pair = self.pair.as_ref().map(|(certificate, key)| Ok::<_, TlsError>((read(certificate)?, read(key)?)));
        Ok(Pem { ca: self.ca.as_ref().map(read).transpose()?, pair: pair.transpose()? })
    }

    /// What `pem`, read from these files, holds.
    pub(crate) fn parse(&self, pem: &Pem) -> Result<Credentials, TlsError> {
        let mut roots = None;
        if let (Some(path), Some(bytes)) = (&self.ca, &pem.ca) {
            let mut store = RootCertStore::empty();
            for certificate in certificates(path, bytes)? {
                store.add(certificate).map_err(|error| invalid(path, &error))?;
            }
            roots = Some(Arc::new(store));
        }
        let (mut own, mut not_after) = (None, DateTime::INFINITY);
        if let (Some((path, key_path)), Some((bytes, key))) = (&self.pair, &pem.pair) {
            let chain = certificates(path, bytes)?;
            // Those above it may be old ones that only some peers need.
            if let Some(certificate) = chain.first() {
                not_after = expiry(path, certificate)?;
            }
            let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| invalid(key_path, &error))?;
            let pair = CertifiedKey::from_der(chain, key, &provider());
            let of_both =
                |error| invalid(key_path, &format!("no key for the certificate in {}: {error}", path.display()));
            own = Some(Arc::new(pair.map_err(of_both)?));
        }
        Ok(Credentials { roots, own, not_after: not_after.to_system_time() })
    }
}

/// All certificates of a PEM file, at least one.
fn certificates(path: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
    let all = all.map_err(|error| invalid(path, &error))?;
    if all.is_empty() { Err(invalid(path, &"no certificate in PEM form")) } else { Ok(all) }
}

/// The end of a certificate's life, which must be to come.
fn expiry(path: &Path, certificate: &CertificateDer<'_>) -> Result<DateTime, TlsError> {
    let parsed = Certificate::from_der(certificate).map_err(|error| invalid(path, &error))?;
    let date = parsed.tbs_certificate().validity().not_after.to_date_time();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    if date.unix_duration() < now {
        return Err(TlsError::Expired { path: path.to_owned(), date: date.to_string() });
    }
    Ok(date)
}

fn invalid(path: &Path, problem: &dyn std::fmt::Display) -> TlsError {
    TlsError::Invalid { path: path.to_owned(), problem: problem.to_string() }
}
