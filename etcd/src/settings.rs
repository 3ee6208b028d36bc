//! Where etcd answers, and how it is to be spoken to.
//! Invariant: a name and password, and certificates, are never sent in clear text to a member that was to be secured.

use std::path::PathBuf;

use lockstep_transport::{Connector, Outbound, TlsFiles};

use crate::keys::Keys;

/// Checked settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdSettings {
    /// Client URLs of its members, at least one; all `http` or all `https`.
    pub endpoints: Vec<String>,
    /// What the cluster's keys begin with; no slash at its end.
    pub prefix: String,
    /// With `https`: the authorities of the members' certificates, by default those of the system, and the certificate that
    /// they are shown. Read anew for each connection.
    pub tls: TlsFiles,
    /// Where etcd demands it: a user, and the file of its password, which is read anew for each connection.
    pub user: Option<(String, PathBuf)>,
}

impl EtcdSettings {
    /// Accepts the settings or says what is wrong with them. An endpoint without a scheme is `https` beside files of TLS,
    /// else `http`.
    ///
    /// # Errors
    /// The value that is wrong, in words.
    pub fn new(endpoints: &[String], prefix: &str, tls: TlsFiles) -> Result<Self, String> {
        let has_files = tls != TlsFiles::default();
        let with_scheme = |endpoint: &String| match endpoint.split_once("://") {
            None if has_files => Ok(format!("https://{endpoint}")),
            None => Ok(format!("http://{endpoint}")),
            Some(("http", _)) if has_files => {
                Err(format!("{endpoint:?} asks for clear text, but certificates are set"))
            }
            Some(("http" | "https", _)) => Ok(endpoint.clone()),
            Some((scheme, _)) => Err(format!("{endpoint:?} begins with {scheme}://, known are https:// and http://")),
        };
        let endpoints = endpoints.iter().filter(|endpoint| !endpoint.is_empty()).map(with_scheme);
        let endpoints = endpoints.collect::<Result<Vec<_>, _>>()?;
        for endpoint in &endpoints {
            let plain = endpoint.replacen("https://", "http://", 1);
            Connector::new(&plain, Outbound::ClearText)
                .map_err(|_| format!("{endpoint:?} is not of the form host:port"))?;
        }
        let num_secured = endpoints.iter().filter(|endpoint| endpoint.starts_with("https://")).count();
        if endpoints.is_empty() {
            return Err("no endpoint is given".to_owned());
        }
        if num_secured != 0 && num_secured != endpoints.len() {
            return Err(format!("{num_secured} of {} endpoints are https://, expected all or none", endpoints.len()));
        }
        let is_clean = !prefix.chars().any(|letter| letter.is_control() || letter.is_whitespace());
        if !prefix.starts_with('/') || prefix.len() < 2 || prefix.ends_with('/') || !is_clean {
            return Err(format!("prefix {prefix:?} is not of the form /name"));
        }
        Ok(Self { endpoints, prefix: prefix.to_owned(), tls, user: None })
    }

    /// The first member that may be on another machine and is spoken to in clear text, if there is one.
    pub fn exposed(&self) -> Option<&str> {
        let is_exposed = |endpoint: &&String| {
            Connector::new(endpoint, Outbound::ClearText).is_ok_and(|(_, connector)| !connector.is_local())
        };
        self.endpoints.iter().find(is_exposed).map(String::as_str)
    }

    /// The keys of the cluster.
    pub fn keys(&self) -> Keys {
        Keys::new(&self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(endpoints: &str, tls: TlsFiles) -> Result<EtcdSettings, String> {
        let endpoints: Vec<String> = endpoints.split(',').map(str::to_owned).collect();
        EtcdSettings::new(&endpoints, "/lockstep", tls)
    }

    fn files() -> TlsFiles {
        TlsFiles { ca: Some(PathBuf::from("ca.pem")), pair: None }
    }

    #[test]
    fn refuses_what_cannot_be_meant() {
        let plain = |endpoints: &str| settings(endpoints, TlsFiles::default());
        assert_eq!(plain("a:2379").unwrap().endpoints, ["http://a:2379"]);
        assert_eq!(plain("https://a:2379,").unwrap().endpoints, ["https://a:2379"]);
        assert_eq!(settings("a:2379", files()).unwrap().endpoints, ["https://a:2379"]);
        assert!(plain("unix://a").unwrap_err().contains("unix"));
        assert!(plain("https://a").unwrap_err().contains("host:port"));
        assert!(plain("").unwrap_err().contains("no endpoint"));
        assert!(plain("https://a:1,http://b:1").unwrap_err().contains("1 of 2 endpoints"));
        assert!(settings("http://a:2379", files()).unwrap_err().contains("clear text"));
        for prefix in ["", "/", "lockstep", "/lockstep/", "/lock step"] {
            let problem = EtcdSettings::new(&["a:2379".to_owned()], prefix, TlsFiles::default()).unwrap_err();
            assert!(problem.contains("prefix"), "{prefix}");
        }
    }

    #[test]
    fn clear_text_that_leaves_the_machine_is_found() {
        let exposed = |endpoints: &str, tls| settings(endpoints, tls).unwrap().exposed().map(str::to_owned);
        for local in ["127.0.0.1:2379", "localhost:2379", "http://[::1]:2379", "http://localhost:2379/"] {
            assert_eq!(exposed(local, TlsFiles::default()), None, "{local}");
        }
        assert_eq!(exposed("127.0.0.1:1,etcd-b:2379", TlsFiles::default()).as_deref(), Some("http://etcd-b:2379"));
        assert_eq!(exposed("10.0.0.1:2379", TlsFiles::default()).as_deref(), Some("http://10.0.0.1:2379"));
        assert_eq!(exposed("etcd-a:2379", files()), None);
    }
}
