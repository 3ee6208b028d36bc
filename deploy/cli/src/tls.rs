//! Settings of certificates and of etcd, as several commands share them.
//! Invariant: what belongs together is set together; a certificate without its key stops the start.

use std::path::PathBuf;

use lockstep_etcd::EtcdSettings;
use lockstep_transport::{ClientTls, TlsFiles};
use serde::{Deserialize, Serialize};

use crate::UsageError;

/// What a coordinator shows to clients and demands of them.
#[derive(Clone, Debug, Default, clap::Args, Deserialize, Serialize)]
pub struct ServerTlsArgs {
    /// Certificate for clients of both ports, followed by those between it and its authority, PEM; changed files are taken
    /// over while it runs
    #[arg(long, env = "LOCKSTEP_TLS_CERT", value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, env = "LOCKSTEP_TLS_KEY", value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// Certificates of the authorities from which clients need a certificate, PEM [default: they need none]
    #[arg(long, env = "LOCKSTEP_CLIENT_CA", value_name = "FILE")]
    client_ca: Option<PathBuf>,
}

impl ServerTlsArgs {
    /// The files; `None` if nothing is set.
    ///
    /// # Errors
    /// If some are set and others that they need are not.
    pub fn files(self) -> Result<Option<TlsFiles>, UsageError> {
        let pair = both(("tls_cert", self.tls_cert), ("tls_key", self.tls_key))?;
        match (pair, self.client_ca) {
            (None, Some(_)) => Err(UsageError(String::from("client_ca is set, which needs tls_cert and tls_key"))),
            (None, None) => Ok(None),
            (pair, ca) => Ok(Some(TlsFiles { ca, pair })),
        }
    }

    /// The flags that give another process these settings.
    pub fn arguments(&self) -> impl Iterator<Item = String> {
        flags([("tls-cert", &self.tls_cert), ("tls-key", &self.tls_key), ("client-ca", &self.client_ca)])
    }
}

/// What the members of a cluster show each other, and what may go without.
#[derive(Debug, Default, clap::Args, Deserialize, Serialize)]
pub struct ClusterTlsArgs {
    /// Certificate of the authority that signs for the members of this cluster and nobody else, PEM. With it and the two
    /// below, members speak mutual TLS with each other; changed files are taken over while it runs
    #[arg(long, env = "LOCKSTEP_CLUSTER_CA", value_name = "FILE")]
    cluster_ca: Option<PathBuf>,
    /// Certificate of this member from that authority, for servers and clients, PEM
    #[arg(long, env = "LOCKSTEP_CLUSTER_CERT", value_name = "FILE")]
    cluster_cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, env = "LOCKSTEP_CLUSTER_KEY", value_name = "FILE")]
    cluster_key: Option<PathBuf>,
    /// Speak clear text with other machines too where there are no certificates; without it, on this machine only
    #[arg(long, env = "LOCKSTEP_INSECURE", num_args = 0..=1, default_missing_value = "true", require_equals = true, value_name = "BOOL")]
    insecure: Option<bool>,
}

impl ClusterTlsArgs {
    /// Whether clear text is spoken with other machines too.
    pub fn allow_insecure(&self) -> bool {
        self.insecure.unwrap_or(false)
    }

    /// The files; `None` if nothing is set.
    ///
    /// # Errors
    /// If not all or none of them are set.
    pub fn files(self) -> Result<Option<TlsFiles>, UsageError> {
        let pair = both(("cluster_cert", self.cluster_cert), ("cluster_key", self.cluster_key))?;
        match (self.cluster_ca, pair) {
            (None, None) => Ok(None),
            (Some(ca), Some(pair)) => Ok(Some(TlsFiles { ca: Some(ca), pair: Some(pair) })),
            _ => {
                Err(UsageError(String::from("cluster_ca, cluster_cert and cluster_key are set together or not at all")))
            }
        }
    }
}

/// Where several coordinators and their workers meet.
#[derive(Debug, Default, clap::Args, Deserialize, Serialize)]
pub struct EtcdArgs {
    /// Members of etcd, for several coordinators: workers are found and the plan is kept there; a worker needs no
    /// --coordinator then. https:// speaks TLS. Needs a build with etcd
    #[arg(long, env = "LOCKSTEP_ETCD", value_name = "URL,...", value_delimiter = ',')]
    etcd: Option<Vec<String>>,
    /// What the cluster's keys in etcd begin with [default: /lockstep]
    #[arg(long, env = "LOCKSTEP_ETCD_PREFIX", value_name = "/NAME")]
    etcd_prefix: Option<String>,
    /// Certificates of the authorities that etcd's may come from, PEM; speaks TLS. These files and the password are read
    /// anew for each connection [default, with https: the system's]
    #[arg(long, env = "LOCKSTEP_ETCD_CA", value_name = "FILE")]
    etcd_ca: Option<PathBuf>,
    /// Certificate to show to an etcd that demands one, PEM; speaks TLS
    #[arg(long, env = "LOCKSTEP_ETCD_CERT", value_name = "FILE")]
    etcd_cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, env = "LOCKSTEP_ETCD_KEY", value_name = "FILE")]
    etcd_key: Option<PathBuf>,
    /// User of an etcd that demands a name and password
    #[arg(long, env = "LOCKSTEP_ETCD_USERNAME", value_name = "NAME")]
    etcd_username: Option<String>,
    /// File that holds the user's password
    #[arg(long, env = "LOCKSTEP_ETCD_PASSWORD_FILE", value_name = "FILE")]
    etcd_password_file: Option<PathBuf>,
    /// Speak clear text with an etcd on other machines, as --insecure allows it too
    #[arg(long, env = "LOCKSTEP_ETCD_INSECURE", num_args = 0..=1, default_missing_value = "true", require_equals = true, value_name = "BOOL")]
    etcd_insecure: Option<bool>,
}

impl EtcdArgs {
    /// The checked settings; `None` without endpoints.
    ///
    /// # Errors
    /// If a value is wrong, a file cannot be used, or clear text would leave this machine unasked.
    pub fn settings(self, allow_insecure: bool) -> Result<Option<EtcdSettings>, UsageError> {
        let Some(endpoints) = self.etcd else { return Ok(None) };
        let wrong = |problem: String| UsageError(format!("etcd: {problem}"));
        let tls =
            TlsFiles { ca: self.etcd_ca, pair: both(("etcd_cert", self.etcd_cert), ("etcd_key", self.etcd_key))? };
        // What is wrong with a file now is said at the start, not in the log of a process that waits for etcd.
        ClientTls::open(&tls).map_err(|error| wrong(error.to_string()))?;
        let prefix = self.etcd_prefix.as_deref().unwrap_or("/lockstep");
        let mut settings = EtcdSettings::new(&endpoints, prefix, tls).map_err(wrong)?;
        let allow_insecure = allow_insecure || self.etcd_insecure.unwrap_or(false);
        if let Some(endpoint) = settings.exposed().filter(|_| !allow_insecure) {
            return Err(wrong(format!(
                "{endpoint} is clear text with another machine: it needs https:// or, if something else protects the \
                 network, etcd_insecure"
            )));
        }
        settings.user = both(("etcd_username", self.etcd_username), ("etcd_password_file", self.etcd_password_file))?;
        if let Some((_, path)) = &settings.user {
            std::fs::read_to_string(path).map_err(|error| wrong(format!("{}: {error}", path.display())))?;
        }
        Ok(Some(settings))
    }
}

/// Certificate and key of a client, and the authorities that it trusts; `None` if nothing is set.
///
/// # Errors
/// If there is a certificate without a key.
pub fn of_client(
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
) -> Result<Option<TlsFiles>, UsageError> {
    let files = TlsFiles { ca, pair: both(("tls_cert", cert), ("tls_key", key))? };
    Ok((files != TlsFiles::default()).then_some(files))
}

/// The flags that give another process these files.
pub fn flags<'a>(named: impl IntoIterator<Item = (&'static str, &'a Option<PathBuf>)>) -> impl Iterator<Item = String> {
    named.into_iter().filter_map(|(name, path)| Some(format!("--{name}={}", path.as_ref()?.display())))
}

/// Two settings that are nothing without each other.
///
/// # Errors
/// If one of them is set alone.
pub fn both<A, B>(
    (first_name, first): (&str, Option<A>),
    (second_name, second): (&str, Option<B>),
) -> Result<Option<(A, B)>, UsageError> {
    let needs = |set: &str, missing: &str| Err(UsageError(format!("{set} is set, which needs {missing}")));
    match (first, second) {
        (None, None) => Ok(None),
        (Some(first), Some(second)) => Ok(Some((first, second))),
        (Some(_), None) => needs(first_name, second_name),
        (None, Some(_)) => needs(second_name, first_name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path() -> Option<PathBuf> {
        Some(PathBuf::from("x"))
    }

    #[test]
    fn what_belongs_together_is_set_together() {
        let error = |result: Result<Option<TlsFiles>, UsageError>| result.unwrap_err().to_string();
        let server = |tls_cert, tls_key, client_ca| ServerTlsArgs { tls_cert, tls_key, client_ca }.files();
        assert_eq!(error(server(path(), None, None)), "tls_cert is set, which needs tls_key");
        assert_eq!(error(server(None, path(), None)), "tls_key is set, which needs tls_cert");
        assert!(error(server(None, None, path())).starts_with("client_ca is set"));
        let cluster = |cluster_ca, cluster_cert, cluster_key| {
            ClusterTlsArgs { cluster_ca, cluster_cert, cluster_key, insecure: None }.files()
        };
        assert!(error(cluster(path(), None, None)).contains("set together"));
        assert!(error(cluster(None, path(), path())).contains("set together"));
        assert_eq!(cluster(None, None, None).unwrap(), None);
        assert!(cluster(path(), path(), path()).unwrap().is_some());
        assert!(of_client(path(), None, None).unwrap().is_some());
        assert_eq!(of_client(None, None, None).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_right_with_etcd_stops_the_start() {
        let at = |endpoint: &str| EtcdArgs { etcd: Some(vec![endpoint.to_owned()]), ..EtcdArgs::default() };
        let error = |args: EtcdArgs| args.settings(false).unwrap_err().to_string();
        assert!(at("127.0.0.1:2379").settings(false).unwrap().is_some());
        assert!(at("http://etcd-a:2379").settings(true).unwrap().is_some());
        let consenting = EtcdArgs { etcd_insecure: Some(true), ..at("http://etcd-a:2379") };
        assert!(consenting.settings(false).unwrap().is_some());
        assert!(error(at("http://etcd-a:2379")).contains("needs https:// or"));
        assert!(error(EtcdArgs { etcd_ca: path(), ..at("etcd-a:2379") }).contains("etcd: x:"));
        let named = || EtcdArgs { etcd_username: Some(String::from("lockstep")), ..at("127.0.0.1:2379") };
        assert_eq!(error(named()), "etcd_username is set, which needs etcd_password_file");
        assert!(error(EtcdArgs { etcd_password_file: path(), ..named() }).contains("etcd: x:"));
    }
}
