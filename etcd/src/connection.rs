//! A connection to one member of etcd at a time.
//! Invariant: every call ends within [`REQUEST_TIMEOUT`]; whoever gets an error goes on with the next endpoint, since a
//! member that hangs or has lost the others looks connected.

use std::{error::Error, future::Future, path::PathBuf, time::Duration};

use etcd_client::{Channel, Client, ConnectOptions};
use lockstep_transport::{AddressError, ClientTls, Connector, Outbound, TlsError, explain};

use crate::EtcdSettings;

/// Longest wait for an answer.
pub const REQUEST_TIMEOUT: Duration = Duration::from_millis(1500);

/// Why etcd did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// A certificate, key or authority cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The password cannot be read.
    #[error("password file {path}: {source}")]
    Password {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// An endpoint does not parse.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// No answer came.
    #[error("{endpoint} did not answer within {} ms", REQUEST_TIMEOUT.as_millis())]
    Timeout {
        /// Who was asked.
        endpoint: String,
    },
    /// It refused, or the connection failed.
    #[error("{endpoint}: {}", in_words(source))]
    Client {
        /// Who was asked.
        endpoint: String,
        /// Cause.
        source: Box<etcd_client::Error>,
    },
    /// The lease has ended.
    #[error("the lease has ended")]
    LeaseLost,
    /// A stream ended, or a watch was cancelled.
    #[error("{endpoint}: {what}")]
    Ended {
        /// Whose stream.
        endpoint: String,
        /// Which, and why.
        what: String,
    },
}

impl EtcdError {
    /// Whether etcd understood what was asked and does not do it: it is too large, forbidden, or there is no room.
    pub fn is_refusal(&self) -> bool {
        // Codes of gRPC: invalid argument, permission denied, resource exhausted.
        let is_refusal = |code: i32| matches!(code, 3 | 7 | 8);
        match self {
            Self::Client { source, .. } => match source.as_ref() {
                etcd_client::Error::GRpcStatus(status) => is_refusal(status.code() as i32),
                _ => false,
            },
            _ => false,
        }
    }

    /// The settings to look at, if etcd and this process do not trust each other: time alone does not mend that.
    pub fn setting(&self) -> Option<&'static str> {
        const TLS: &str = "etcd_ca, etcd_cert, etcd_key";
        const PASSWORD: &str = "etcd_username, etcd_password_file";
        match self {
            Self::Tls(_) => Some(TLS),
            Self::Password { .. } => Some("etcd_password_file"),
            Self::Client { source, .. } => match source.as_ref() {
                etcd_client::Error::TransportError(cause) => explain(cause).map(|_| TLS),
                etcd_client::Error::GRpcStatus(status) => {
                    // Codes of gRPC: permission denied, unauthenticated. A wrong password is an invalid argument to etcd.
                    let is_refused = matches!(status.code() as i32, 7 | 16)
                        || ["authentication failed", "user name is empty"]
                            .iter()
                            .any(|it| status.message().contains(it));
                    if is_refused { Some(PASSWORD) } else { explain(status).map(|_| TLS) }
                }
                _ => None,
            },
            _ => None,
        }
    }
}

/// The endpoints in turn.
#[derive(Debug)]
pub struct Endpoints {
    settings: EtcdSettings,
    next: usize,
}

impl Endpoints {
    /// All endpoints of the settings; `first` is where to begin, so that not everybody begins with the same.
    pub fn new(settings: &EtcdSettings, first: usize) -> Self {
        Self { settings: settings.clone(), next: first }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.settings.endpoints.len()
    }

    /// Whether there are none, which the settings exclude.
    pub fn is_empty(&self) -> bool {
        self.settings.endpoints.is_empty()
    }

    /// Connects to the next one, with the certificates and the password that their files hold now.
    ///
    /// # Errors
    /// [`EtcdError`] if nothing that answers is there.
    pub async fn connect(&mut self) -> Result<Connection, EtcdError> {
        let all = &self.settings.endpoints;
        let endpoint = all.get(self.next % all.len().max(1)).cloned().unwrap_or_default();
        self.next = self.next.wrapping_add(1);
        let settings = self.settings.clone();
        let is_secured = endpoint.starts_with("https://");
        // The folder of a secret may lie on a network.
        let read = tokio::task::spawn_blocking(move || credentials(&settings, is_secured));
        let (outbound, user) = match tokio::time::timeout(REQUEST_TIMEOUT, read).await {
            Ok(Ok(read)) => read?,
            Ok(Err(_)) | Err(_) => {
                let what = "its certificates or password cannot be read: the file system does not answer".to_owned();
                return Err(EtcdError::Ended { endpoint, what });
            }
        };
        Connection::new(endpoint, outbound, user).await
    }
}

/// A connection to one endpoint.
pub struct Connection {
    /// For calls, each to be put into [`Self::within`].
    pub client: Client,
    endpoint: String,
}

impl Connection {
    async fn new(endpoint: String, outbound: Outbound, user: Option<(String, String)>) -> Result<Self, EtcdError> {
        let (target, connector) = Connector::new(&endpoint, outbound)?;
        // A member without a leader must not keep its streams open.
        let mut options = ConnectOptions::new().with_require_leader(true).with_auto_token_refresh(true);
        if let Some((name, password)) = user {
            options = options.with_user(name, password);
        }
        let connect = async {
            let channel = target
                .connect_timeout(REQUEST_TIMEOUT)
                .http2_keep_alive_interval(REQUEST_TIMEOUT)
                .keep_alive_timeout(REQUEST_TIMEOUT)
                .keep_alive_while_idle(true)
                .connect_with_connector(connector)
                .await?;
            Client::from_channel(Channel::Tonic(channel), Some(options)).await
        };
        Ok(Self { client: within(&endpoint, connect).await?, endpoint })
    }

    /// Who is at the other end.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Waits for a call, but not for long.
    ///
    /// # Errors
    /// [`EtcdError::Timeout`] or [`EtcdError::Client`].
    pub async fn within<T>(&self, call: impl Future<Output = Result<T, etcd_client::Error>>) -> Result<T, EtcdError> {
        within(&self.endpoint, call).await
    }

    /// A stream ended.
    pub fn ended(&self, what: impl Into<String>) -> EtcdError {
        EtcdError::Ended { endpoint: self.endpoint.clone(), what: what.into() }
    }

    /// A stream failed.
    pub fn failed(&self, source: etcd_client::Error) -> EtcdError {
        EtcdError::Client { endpoint: self.endpoint.clone(), source: Box::new(source) }
    }
}

async fn within<T>(endpoint: &str, call: impl Future<Output = Result<T, etcd_client::Error>>) -> Result<T, EtcdError> {
    match tokio::time::timeout(REQUEST_TIMEOUT, call).await {
        Err(_) => Err(EtcdError::Timeout { endpoint: endpoint.to_owned() }),
        Ok(answer) => {
            answer.map_err(|source| EtcdError::Client { endpoint: endpoint.to_owned(), source: Box::new(source) })
        }
    }
}

/// How to connect, and with which name and password.
fn credentials(settings: &EtcdSettings, is_secured: bool) -> Result<(Outbound, Option<(String, String)>), EtcdError> {
    let outbound = if is_secured { Outbound::Server(ClientTls::open(&settings.tls)?) } else { Outbound::ClearText };
    let user = settings.user.as_ref().map(|(name, path)| {
        let password =
            std::fs::read_to_string(path).map_err(|source| EtcdError::Password { path: path.clone(), source })?;
        Ok::<_, EtcdError>((name.clone(), password.trim_end_matches(['\r', '\n']).to_owned()))
    });
    Ok((outbound, user.transpose()?))
}

/// What the client's error comes from, which it does not say itself.
fn in_words(error: &etcd_client::Error) -> String {
    let mut cause: &(dyn Error + 'static) = match error {
        etcd_client::Error::TransportError(cause) => cause,
        etcd_client::Error::GRpcStatus(status) => status,
        other => return other.to_string(),
    };
    if let Some(reason) = explain(cause) {
        return reason;
    }
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use lockstep_tests::{
        Etcd,
        certificates::{Authority, Folder},
    };
    use lockstep_transport::TlsFiles;

    use super::*;

    /// Connects and reads.
    async fn attempt(settings: &EtcdSettings) -> Result<(), EtcdError> {
        let connection = Endpoints::new(settings, 0).connect().await?;
        connection.within(connection.client.kv_client().get("/test/x", None)).await.map(drop)
    }

    async fn problem(settings: &EtcdSettings) -> String {
        attempt(settings).await.unwrap_err().to_string()
    }

    #[tokio::test]
    async fn certificates_are_shown_and_demanded_as_they_are_now() {
        let (folder, ours) = (Folder::new().unwrap(), Authority::new().unwrap());
        let server = folder.member("etcd", &ours).unwrap();
        let mut etcd = Etcd::start_secured(&server).unwrap();
        let settings = |tls: TlsFiles| EtcdSettings::new(&etcd.endpoints(), "/test", tls).unwrap();
        let (known, unknown) = (settings(folder.member("us", &ours).unwrap()), settings(TlsFiles::default()));
        attempt(&known).await.unwrap();
        let untrusted = "comes from no authority that is trusted here";
        assert!(problem(&unknown).await.contains(untrusted), "the system's authorities did not sign it");
        assert_eq!(attempt(&unknown).await.unwrap_err().setting(), Some("etcd_ca, etcd_cert, etcd_key"));
        let bare = settings(TlsFiles { pair: None, ..known.tls.clone() });
        // With TLS 1.3 etcd may close the connection before its alert is read: the words differ, the refusal does not.
        assert!(attempt(&bare).await.is_err());

        // All certificates are replaced, under the same names.
        let others = Authority::new().unwrap();
        etcd.kill(0).unwrap();
        folder.member("etcd", &others).unwrap();
        etcd.restart(0).unwrap();
        assert!(problem(&known).await.contains(untrusted));
        folder.member("us", &others).unwrap();
        attempt(&known).await.unwrap();
    }

    #[tokio::test]
    async fn a_password_is_given_as_its_file_says_it_now() {
        let mut etcd = Etcd::start(1).unwrap();
        etcd.demand_password("lockstep", "first", "/test/").unwrap();
        let folder = Folder::new().unwrap();
        let path = folder.path().join("password");
        std::fs::write(&path, "first\n").unwrap();
        let stranger = EtcdSettings::new(&etcd.endpoints(), "/test", TlsFiles::default()).unwrap();
        let settings = EtcdSettings { user: Some(("lockstep".to_owned(), path.clone())), ..stranger.clone() };
        let mut endpoints = Endpoints::new(&settings, 0);
        let connection = endpoints.connect().await.unwrap();
        let read = async |key: &'static str| {
            let mut kv = connection.client.kv_client();
            connection.within(kv.get(key, None)).await
        };
        read("/test/x").await.unwrap();
        assert!(read("/other/x").await.unwrap_err().is_refusal(), "it is another cluster's key");
        assert!(problem(&stranger).await.contains("user name is empty"));

        etcd.change_password("lockstep", "second").unwrap();
        assert!(problem(&settings).await.contains("authentication failed"));
        assert_eq!(attempt(&settings).await.unwrap_err().setting(), Some("etcd_username, etcd_password_file"));
        assert!(read("/test/x").await.is_err(), "the token has ended, and the password is another one");
        std::fs::write(&path, "second\n").unwrap();
        attempt(&settings).await.unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(problem(&settings).await.contains("password file"));
    }
}
