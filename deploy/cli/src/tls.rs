//! Settings of certificates, as coordinator and worker share them.
//! Invariant: what belongs together is set together; a certificate without its key stops the start.

use std::path::PathBuf;

use lockstep_transport::TlsFiles;

use crate::UsageError;

/// Certificate and key for clients and, if these need certificates, their authorities.
///
/// # Errors
/// If some are set and others that they need are not.
pub fn for_clients(
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    client_ca: Option<PathBuf>,
) -> Result<Option<TlsFiles>, UsageError> {
    let pair = both(("tls_cert", cert), ("tls_key", key))?;
    match (pair, client_ca) {
        (None, Some(_)) => Err(UsageError(String::from("client_ca is set, which needs tls_cert and tls_key"))),
        (None, None) => Ok(None),
        (pair, ca) => Ok(Some(TlsFiles { ca, pair })),
    }
}

/// Authority, certificate and key of a member of the cluster.
///
/// # Errors
/// If not all or none of them are set.
pub fn for_cluster(
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
) -> Result<Option<TlsFiles>, UsageError> {
    let pair = both(("cluster_cert", cert), ("cluster_key", key))?;
    match (ca, pair) {
        (None, None) => Ok(None),
        (Some(ca), Some(pair)) => Ok(Some(TlsFiles { ca: Some(ca), pair: Some(pair) })),
        _ => Err(UsageError(String::from("cluster_ca, cluster_cert and cluster_key are set together or not at all"))),
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

type Named = (&'static str, Option<PathBuf>);

fn both(cert: Named, key: Named) -> Result<Option<(PathBuf, PathBuf)>, UsageError> {
    match (cert, key) {
        ((_, None), (_, None)) => Ok(None),
        ((_, Some(cert)), (_, Some(key))) => Ok(Some((cert, key))),
        ((set, Some(_)), (missing, None)) | ((missing, None), (set, Some(_))) => {
            Err(UsageError(format!("{set} is set, which needs {missing}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_belongs_together_is_set_together() {
        let path = || Some(PathBuf::from("x"));
        let error = |result: Result<Option<TlsFiles>, UsageError>| result.unwrap_err().to_string();
        assert_eq!(error(for_clients(path(), None, None)), "tls_cert is set, which needs tls_key");
        assert_eq!(error(for_clients(None, path(), None)), "tls_key is set, which needs tls_cert");
        assert!(error(for_clients(None, None, path())).starts_with("client_ca is set"));
        assert!(error(for_cluster(path(), None, None)).contains("set together"));
        assert!(error(for_cluster(None, path(), path())).contains("set together"));
        assert_eq!(for_cluster(None, None, None).unwrap(), None);
        assert!(for_cluster(path(), path(), path()).unwrap().is_some());
        assert!(of_client(path(), None, None).unwrap().is_some());
        assert_eq!(of_client(None, None, None).unwrap(), None);
    }
}
