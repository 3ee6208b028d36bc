//! A connection to one member of etcd at a time.
//! Invariant: every call ends within [`REQUEST_TIMEOUT`]; whoever gets an error goes on with the next endpoint, since a
//! member that hangs or has lost the others looks connected.

use std::{future::Future, time::Duration};

use etcd_client::{Client, ConnectOptions};

use crate::EtcdSettings;

/// Longest wait for an answer.
pub const REQUEST_TIMEOUT: Duration = Duration::from_millis(1500);

/// Why etcd did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// No answer came.
    #[error("{endpoint} did not answer within {} ms", REQUEST_TIMEOUT.as_millis())]
    Timeout {
        /// Who was asked.
        endpoint: String,
    },
    /// It refused, or the connection failed.
    #[error("{endpoint}: {source}")]
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
            Self::Timeout { .. } | Self::LeaseLost | Self::Ended { .. } => false,
        }
    }
}

/// The endpoints in turn.
#[derive(Debug)]
pub struct Endpoints {
    all: Vec<String>,
    next: usize,
}

impl Endpoints {
    /// All endpoints of the settings; `first` is where to begin, so that not everybody begins with the same.
    pub fn new(settings: &EtcdSettings, first: usize) -> Self {
        Self { all: settings.endpoints.clone(), next: first }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether there are none, which the settings exclude.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Connects to the next one.
    ///
    /// # Errors
    /// [`EtcdError`] if nothing that answers is there.
    pub async fn connect(&mut self) -> Result<Connection, EtcdError> {
        let endpoint = self.all.get(self.next % self.all.len().max(1)).cloned().unwrap_or_default();
        self.next = self.next.wrapping_add(1);
        Connection::new(endpoint).await
    }
}

/// A connection to one endpoint.
pub struct Connection {
    /// For calls, each to be put into [`Self::within`].
    pub client: Client,
    endpoint: String,
}

impl Connection {
    async fn new(endpoint: String) -> Result<Self, EtcdError> {
        // A member without a leader must not keep its streams open.
        let options = ConnectOptions::new()
            .with_connect_timeout(REQUEST_TIMEOUT)
            .with_keep_alive(REQUEST_TIMEOUT, REQUEST_TIMEOUT)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        let client = within(&endpoint, Client::connect([endpoint.as_str()], Some(options))).await?;
        Ok(Self { client, endpoint })
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
