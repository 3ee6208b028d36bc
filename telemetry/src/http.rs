//! The paths that orchestrators and Prometheus ask: `/healthz`, `/readyz` and `/metrics`.
//! For: the worker, which serves nothing else over HTTP, and the coordinator's front.
//! Invariant: an answer waits for nothing.

use std::sync::Arc;

use axum::{
    Router,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};

/// The content type of the exposition text.
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A process that is asked.
pub trait Probe: Send + Sync + 'static {
    /// Whether it can do its work now.
    ///
    /// # Errors
    /// What is missing, in words.
    fn readiness(&self) -> Result<(), String>;

    /// Its metrics as they are now, in the exposition format.
    fn metrics(&self) -> String;
}

/// The paths of a process, for a server of any state.
pub fn routes<S: Clone + Send + Sync + 'static>(probe: Arc<dyn Probe>) -> Router<S> {
    let for_metrics = Arc::clone(&probe);
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route(
            "/readyz",
            get(move || async move {
                match probe.readiness() {
                    Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
                    Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
                }
            }),
        )
        .route(
            "/metrics",
            get(move || async move { ([(header::CONTENT_TYPE, TEXT_FORMAT)], for_metrics.metrics()).into_response() }),
        )
}
