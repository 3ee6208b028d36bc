//! Error classes and their gRPC codes: the only code that builds or reads a [`tonic::Status`].
//! For: services map their error enums to a [`Class`] in one `match`; callers decide on retries from the class alone.

use tonic::{Code, Status, metadata::MetadataValue};

/// After so long whoever is overloaded is worth another try.
pub const RETRY_AFTER: std::time::Duration = std::time::Duration::from_millis(500);

/// Metadata key of the stable reason word.
const REASON_KEY: &str = "lockstep-reason";
/// Metadata key of the retry hint, milliseconds.
const RETRY_AFTER_KEY: &str = "lockstep-retry-after-ms";

/// Metadata key of the worker that could not be reached.
const UNREACHABLE_KEY: &str = "lockstep-unreachable-worker-bin";

/// The status of a worker that could not reach another one.
pub fn unreachable(message: impl Into<String>, worker_id: &str) -> Status {
    let mut status = Class::WorkerLost.status(message);
    status.metadata_mut().insert_bin(UNREACHABLE_KEY, MetadataValue::from_bytes(worker_id.as_bytes()));
    status
}

/// The worker that could not be reached, if the status names one.
pub fn unreachable_worker(status: &Status) -> Option<String> {
    let bytes = status.metadata().get_bin(UNREACHABLE_KEY)?.to_bytes().ok()?;
    String::from_utf8(bytes.to_vec()).ok()
}

/// What kind of failure a request met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The request can never succeed as it is.
    InvalidRequest,
    /// The named thing does not exist.
    NotFound,
    /// The named thing exists already.
    AlreadyExists,
    /// Credentials are missing or wrong.
    Unauthenticated,
    /// The caller is known, but may not do this.
    PermissionDenied,
    /// A queue or the KV cache is full; try again later.
    Overloaded,
    /// The caller uses as much at once, or in a short time, as is granted; try again later.
    RateLimited,
    /// The caller has used all that is granted.
    QuotaExhausted,
    /// The request names a plan that is no longer (or not yet) in force.
    StaleEpoch,
    /// Nothing serves the model yet.
    NotReady,
    /// A worker that the request needs was lost.
    WorkerLost,
    /// The server drains and takes nothing new.
    ShuttingDown,
    /// The deadline passed.
    Deadline,
    /// The client went away.
    Cancelled,
    /// Our own fault.
    Internal,
}

impl Class {
    const ALL: [(Self, Code, &'static str); 15] = [
        (Self::InvalidRequest, Code::InvalidArgument, "invalid_request"),
        (Self::NotFound, Code::NotFound, "not_found"),
        (Self::AlreadyExists, Code::AlreadyExists, "already_exists"),
        (Self::Unauthenticated, Code::Unauthenticated, "unauthenticated"),
        (Self::PermissionDenied, Code::PermissionDenied, "permission_denied"),
        (Self::Overloaded, Code::ResourceExhausted, "overloaded"),
        // OpenAI's words, which its clients know.
        (Self::RateLimited, Code::ResourceExhausted, "rate_limit_exceeded"),
        (Self::QuotaExhausted, Code::ResourceExhausted, "insufficient_quota"),
        (Self::StaleEpoch, Code::FailedPrecondition, "stale_epoch"),
        (Self::NotReady, Code::FailedPrecondition, "not_ready"),
        (Self::WorkerLost, Code::Unavailable, "worker_lost"),
        (Self::ShuttingDown, Code::Unavailable, "shutting_down"),
        (Self::Deadline, Code::DeadlineExceeded, "deadline"),
        (Self::Cancelled, Code::Cancelled, "cancelled"),
        (Self::Internal, Code::Internal, "internal"),
    ];

    fn entry(self) -> &'static (Self, Code, &'static str) {
        Self::ALL.iter().find(|entry| entry.0 == self).unwrap_or(&Self::ALL[14])
    }

    /// The stable word for metrics, logs and metadata.
    pub fn reason(self) -> &'static str {
        self.entry().2
    }

    /// A status of this class with a message for people.
    pub fn status(self, message: impl Into<String>) -> Status {
        let mut status = Status::new(self.entry().1, message);
        status.metadata_mut().insert(REASON_KEY, MetadataValue::from_static(self.reason()));
        status
    }

    /// A status of this class that says when to try again.
    pub fn status_with_retry(self, message: impl Into<String>, retry_after: std::time::Duration) -> Status {
        let mut status = self.status(message);
        status.metadata_mut().insert(RETRY_AFTER_KEY, MetadataValue::from(retry_after.as_millis() as u64));
        status
    }

    /// The class of a status, by its reason word, else by its code. What a broken transport makes up (it gives no
    /// reason word and the code UNKNOWN, INTERNAL or UNAVAILABLE) is a lost worker.
    pub fn of(status: &Status) -> Self {
        if let Some(class) = Self::named(status) {
            return class;
        }
        match status.code() {
            Code::Unknown | Code::Internal => Self::WorkerLost,
            code => Self::ALL.iter().find(|entry| entry.1 == code).map_or(Self::Internal, |entry| entry.0),
        }
    }

    /// The class that the status names; `None` if none of our services made it.
    pub fn named(status: &Status) -> Option<Self> {
        let reason = status.metadata().get(REASON_KEY)?.to_str().ok()?;
        Self::ALL.iter().find(|entry| entry.2 == reason).map(|entry| entry.0)
    }

    /// When to try again, if the status says it.
    pub fn retry_after(status: &Status) -> Option<std::time::Duration> {
        let millis = status.metadata().get(RETRY_AFTER_KEY)?.to_str().ok()?.parse().ok()?;
        Some(std::time::Duration::from_millis(millis))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_survives_the_wire() {
        for (class, code, _) in Class::ALL {
            let status = class.status("text");
            assert_eq!(status.code(), code);
            assert_eq!((Class::of(&status), Class::named(&status)), (class, Some(class)));
        }
        for broken in [Status::unavailable("broken"), Status::unknown("broken"), Status::internal("broken")] {
            assert_eq!((Class::of(&broken), Class::named(&broken)), (Class::WorkerLost, None));
        }
        let overloaded = Class::Overloaded.status_with_retry("full", std::time::Duration::from_millis(250));
        assert_eq!(Class::retry_after(&overloaded), Some(std::time::Duration::from_millis(250)));
        let unreachable = super::unreachable("cut", "wörker");
        assert_eq!(unreachable_worker(&unreachable).as_deref(), Some("wörker"));
        assert_eq!((unreachable_worker(&overloaded), Class::of(&unreachable)), (None, Class::WorkerLost));
    }
}
