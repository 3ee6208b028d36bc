//! Authorities and certificates for tests, and files of them.

use std::{
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
};

use lockstep_transport::TlsFiles;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType,
    date_time_ymd,
};
use tempfile::TempDir;

/// Last year of certificates that last.
const FAR: i32 = 2999;

/// An authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, PEM.
pub struct Pair {
    /// Certificate.
    pub certificate: String,
    /// Private key.
    pub key: String,
}

impl Authority {
    /// A new one.
    ///
    /// # Errors
    /// If cryptography fails.
    pub fn new() -> anyhow::Result<Self> {
        let mut params = CertificateParams::default();
        let name = format!("authority {:08x}", rand::random::<u32>());
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Ok(Self(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?))
    }

    /// A certificate for servers and clients under `name` and 127.0.0.1, for a long time.
    ///
    /// # Errors
    /// If the name is none.
    pub fn sign(&self, name: &str) -> anyhow::Result<Pair> {
        self.sign_until(name, FAR)
    }

    /// The same until the first day of `year`.
    ///
    /// # Errors
    /// As [`sign`](Self::sign).
    pub fn sign_until(&self, name: &str, year: i32) -> anyhow::Result<Pair> {
        let mut params = CertificateParams::new([name.to_owned()])?;
        params.subject_alt_names.push(SanType::IpAddress(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.not_after = date_time_ymd(year, 1, 1);
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.0)?;
        Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

/// A folder of certificates.
pub struct Folder(TempDir);

impl Folder {
    /// An empty one.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self(TempDir::new()?))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes the files of an end that trusts `ca` and shows `pair`; they may be there already.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn files(&self, name: &str, ca: Option<&Authority>, pair: Option<&Pair>) -> anyhow::Result<TlsFiles> {
        let file = |kind: &str, text: &str| -> anyhow::Result<PathBuf> {
            let path = self.path().join(format!("{name}.{kind}"));
            std::fs::write(&path, text)?;
            Ok(path)
        };
        let ca = ca.map(|ca| file("ca", &ca.0.pem())).transpose()?;
        let pair = pair.map(|pair| anyhow::Ok((file("cert", &pair.certificate)?, file("key", &pair.key)?)));
        Ok(TlsFiles { ca, pair: pair.transpose()? })
    }

    /// The files of a member of the cluster of `authority`.
    ///
    /// # Errors
    /// As [`files`](Self::files).
    pub fn member(&self, name: &str, authority: &Authority) -> anyhow::Result<TlsFiles> {
        self.files(name, Some(authority), Some(&authority.sign(name)?))
    }
}
