//! What a coordinator can fail at, and what a request can.
//! Invariant: [`RequestError::class`] is the one place that decides what kind of failure a failure is; the codes of gRPC
//! and HTTP follow from that.

use std::time::Duration;

use lockstep_proto::{
    sampling::FieldError,
    status::{Class, RETRY_AFTER},
};
use tonic::Status;

use crate::{cluster::store::StoreError, served::BreakCause};

/// A failure of the coordinator itself (requests fail with their own errors).
#[derive(Debug, thiserror::Error)]
pub enum CoordinatorError {
    /// An address cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: std::net::SocketAddr,
        /// Cause.
        source: std::io::Error,
    },
    /// An address that other machines reach, without TLS.
    #[error(
        "{setting} is {address}, which other machines reach, and there is no TLS: set tls_cert and tls_key, listen on \
         127.0.0.1, or ask for clear text with insecure"
    )]
    Exposed {
        /// The setting.
        setting: &'static str,
        /// The address.
        address: std::net::SocketAddr,
    },
    /// The tenants' file cannot be used.
    #[error("tenants' file {}: {problem}", path.display())]
    TenantsFile {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The folder of the page `/browser` is not what `browser/build.sh` makes.
    #[error("browser_dir {} has no {file}: browser/build.sh makes such a folder", path.display())]
    BrowserFolder {
        /// The folder.
        path: std::path::PathBuf,
        /// What is missing.
        file: &'static str,
    },
    /// Certificates or keys cannot be used.
    #[error(transparent)]
    Tls(#[from] lockstep_transport::TlsError),
    /// A server ended before it was told to.
    #[error("the {server} server failed: {reason}")]
    Server {
        /// gRPC or HTTP.
        server: &'static str,
        /// Cause.
        reason: String,
    },
    /// A metric cannot be what it is defined as.
    #[error("metrics: {0}")]
    Metrics(#[source] lockstep_telemetry::metrics::MetricError),
}

/// Why a request was refused or ended early.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RequestError {
    /// A field has a value that can never be served.
    #[error("{field}: {problem}")]
    Invalid {
        /// Field of the request.
        field: &'static str,
        /// What is wrong with it: the value got and those allowed.
        problem: String,
    },
    /// No such model is loaded.
    #[error("model {name:?} is not loaded; loaded are: {loaded}")]
    UnknownModel {
        /// What was asked for.
        name: String,
        /// Names of the models that are.
        loaded: String,
    },
    /// No such worker is registered.
    #[error("worker {0:?} is not registered")]
    UnknownWorker(String),
    /// The model name is in use for something else.
    #[error("model {name:?} is loaded already, from another source or with another policy; unload it first")]
    ModelExists {
        /// The name.
        name: String,
    },
    /// What several coordinators share cannot be changed now.
    #[error("the order cannot be taken now: {0}")]
    Store(StoreError),
    /// No replica serves the model.
    #[error("model {model:?} is not ready: {problem}")]
    NotReady {
        /// The model.
        model: String,
        /// What it waits for, or why it cannot be served.
        problem: String,
    },
    /// No API key came with the request.
    #[error("an API key is needed: authorization: Bearer KEY")]
    NoKey,
    /// No tenant has that key.
    #[error("the API key is not known")]
    UnknownKey,
    /// The tenant is no administrator.
    #[error("this is for administrators: the tenant of this API key is none")]
    NotAdmin,
    /// A tenant has too many requests at once.
    #[error("{limit} requests of this tenant are running, which is its limit; try again later")]
    TenantBusy {
        /// Most at once.
        limit: usize,
    },
    /// A tenant has used up its tokens of the minute.
    #[error("the request may take {needed} tokens; the tenant has {per_minute} a minute: try again in {retry_after:?}")]
    TokenRate {
        /// Tokens of the prompt and the longest output.
        needed: u64,
        /// The tenant's rate.
        per_minute: u64,
        /// When there are enough.
        retry_after: Duration,
    },
    /// A tenant's budget does not pay for the request.
    #[error("the request may take {needed} tokens; the tenant has {left} left in its budget{}", renewal(*renewed_in))]
    TokenBudget {
        /// Tokens of the prompt and the longest output.
        needed: u64,
        /// Tokens left, without those that running requests may take.
        left: u64,
        /// When the budget is renewed, if it is.
        renewed_in: Option<Duration>,
    },
    /// Too many requests at once.
    #[error("{limit} requests are running, which is the limit; try again later")]
    Overloaded {
        /// Most requests at once.
        limit: usize,
    },
    /// Admission is closed.
    #[error("the coordinator is shutting down")]
    ShuttingDown,
    /// The replica that ran the request broke.
    #[error("the replica that served the request was lost: {0}")]
    ReplicaLost(BreakCause),
    /// It broke, and no other took the request in time.
    #[error(
        "the replica that served the request was lost ({cause}), and no other took it within {waited:?}: {problem}"
    )]
    NotResumed {
        /// What broke the last one.
        cause: BreakCause,
        /// Longest wait.
        waited: Duration,
        /// What the model waits for.
        problem: String,
    },
    /// Replica after replica broke with the request, which may be the reason.
    #[error("{count} replicas in a row broke while they ran the request; it is given to no other")]
    BrokeReplicas {
        /// How many.
        count: usize,
    },
    /// The model was unloaded while the request waited for a replica.
    #[error("the model was unloaded")]
    ModelGone,
    /// The client took no message for too long.
    #[error("the client took no message for {patience:?}")]
    SlowReader {
        /// Longest that a message may lie.
        patience: Duration,
    },
    /// The client's deadline passed.
    #[error("the request's deadline passed")]
    Deadline,
    /// A worker refused.
    #[error("{message}")]
    Worker {
        /// The worker's class.
        class: Class,
        /// The worker's message.
        message: String,
        /// The worker's retry hint.
        retry_after: Option<Duration>,
    },
    /// Our own fault.
    #[error("{0}")]
    Internal(String),
}

impl RequestError {
    /// A value outside its range.
    pub fn invalid(field: &'static str, problem: impl Into<String>) -> Self {
        Self::Invalid { field, problem: problem.into() }
    }

    /// What a worker answered. What went wrong inside it is not the client's to read.
    pub fn from_worker(status: &Status) -> Self {
        match Class::of(status) {
            Class::Internal => Self::Internal(BreakCause::WorkerFailed.to_string()),
            class => {
                Self::Worker { class, message: status.message().to_owned(), retry_after: Class::retry_after(status) }
            }
        }
    }

    /// Whether a replica failed the request that another one may serve.
    pub fn is_about_the_replica(&self) -> bool {
        matches!(self, Self::ReplicaLost(cause) if !matches!(cause, BreakCause::Unloaded | BreakCause::ShuttingDown))
    }

    /// Whether it may have been the request itself that broke the replica: another plan, a drain or a load is not.
    pub fn may_be_the_requests_fault(&self) -> bool {
        matches!(self, Self::ReplicaLost(BreakCause::WorkerLost | BreakCause::WorkerFailed))
    }

    /// Its class on the wire.
    pub fn class(&self) -> Class {
        match self {
            Self::Invalid { .. } => Class::InvalidRequest,
            Self::UnknownModel { .. } | Self::UnknownWorker(_) => Class::NotFound,
            Self::ModelExists { .. } => Class::AlreadyExists,
            Self::NotReady { .. } | Self::Store(_) => Class::NotReady,
            Self::NoKey | Self::UnknownKey => Class::Unauthenticated,
            Self::NotAdmin => Class::PermissionDenied,
            Self::TenantBusy { .. } | Self::TokenRate { .. } => Class::RateLimited,
            Self::TokenBudget { .. } => Class::QuotaExhausted,
            Self::Overloaded { .. } => Class::Overloaded,
            Self::ShuttingDown => Class::ShuttingDown,
            Self::ReplicaLost(_) | Self::NotResumed { .. } | Self::ModelGone => Class::WorkerLost,
            Self::Deadline | Self::SlowReader { .. } => Class::Deadline,
            Self::Worker { class, .. } => *class,
            Self::BrokeReplicas { .. } | Self::Internal(_) => Class::Internal,
        }
    }

    /// When to try again, if that is known to help.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Overloaded { .. } | Self::TenantBusy { .. } => Some(RETRY_AFTER),
            Self::TokenRate { retry_after, .. } => Some(*retry_after),
            Self::TokenBudget { renewed_in, .. } => *renewed_in,
            Self::Worker { class: Class::Overloaded, retry_after, .. } => Some(retry_after.unwrap_or(RETRY_AFTER)),
            _ => None,
        }
    }
}

impl From<FieldError> for RequestError {
    fn from(FieldError { field, problem }: FieldError) -> Self {
        Self::Invalid { field, problem }
    }
}

impl From<RequestError> for Status {
    fn from(error: RequestError) -> Self {
        match error.retry_after() {
            Some(retry_after) => error.class().status_with_retry(error.to_string(), retry_after),
            None => error.class().status(error.to_string()),
        }
    }
}

fn renewal(renewed_in: Option<Duration>) -> String {
    renewed_in.map_or_else(String::new, |time| format!(", which is renewed in {} s", time.as_secs()))
}
