//! Why a fetch failed.

use std::path::{Path, PathBuf};

/// A source that cannot be fetched, by its name or by the file that is concerned.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The source is not written as one.
    #[error("{source_name}: {problem}")]
    InvalidSource {
        /// As it may be shown.
        source_name: String,
        /// What is wrong.
        problem: String,
    },
    /// Another process fetches to the same place.
    #[error("{path}: another process is fetching this file")]
    Locked {
        /// Lock file.
        path: PathBuf,
    },
    /// The disk refuses, for example because it is full.
    #[error("{path}: cannot {what}: {source}")]
    Io {
        /// File.
        path: PathBuf,
        /// What was to be done.
        what: &'static str,
        /// Cause.
        source: std::io::Error,
    },
    /// No client can be set up.
    #[error("http client: {0}")]
    Client(#[source] reqwest::Error),
    /// The server refuses.
    #[error("{url}: status {status}{hint}")]
    Status {
        /// As it may be shown.
        url: String,
        /// HTTP status.
        status: u16,
        /// What may help, or nothing.
        hint: &'static str,
    },
    /// The server's answer makes no sense.
    #[error("{url}: {problem}")]
    Response {
        /// As it may be shown.
        url: String,
        /// What is wrong, expected and got.
        problem: String,
    },
    /// The connection broke or stalled.
    #[error("{url}: connection: {source}")]
    Connection {
        /// As it may be shown.
        url: String,
        /// Cause.
        source: reqwest::Error,
    },
    /// The file is another one by now.
    #[error("{url}: the file changed while it was read")]
    Changed {
        /// As it may be shown.
        url: String,
    },
    /// The store of the object refuses or fails.
    #[error("{url}: {problem}")]
    Object {
        /// As it may be shown.
        url: String,
        /// What it said, as it may be shown.
        problem: String,
        /// Cause, which may name the URL's query.
        cause: Box<object_store::Error>,
    },
    /// The environment names no credentials, and the machine has no identity that it could show instead.
    #[error("{url}: no credentials: {hint} ({source})")]
    Credentials {
        /// As it may be shown.
        url: String,
        /// What to set.
        hint: &'static str,
        /// What the machine's service of identities said.
        source: Box<object_store::Error>,
    },
    /// Nothing came for too long.
    #[error("{url}: nothing came for {seconds} s")]
    Stalled {
        /// As it may be shown.
        url: String,
        /// How long was waited.
        seconds: f64,
    },
    /// It failed too often in a row.
    #[error("gave up after {attempts} attempts without progress: {last}")]
    GaveUp {
        /// Attempts since the last byte won.
        attempts: u32,
        /// Why the last of them failed.
        #[source]
        last: Box<FetchError>,
    },
    /// The file is another than expected.
    #[error("{path}: sha256 is {got}, expected {expected}")]
    Hash {
        /// File.
        path: PathBuf,
        /// Hexadecimal.
        expected: String,
        /// Hexadecimal.
        got: String,
    },
}

impl FetchError {
    /// For `map_err` on file operations.
    pub(super) fn io(path: &Path, what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, what, source }
    }
}
