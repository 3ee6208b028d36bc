//! The HTTP front: health, readiness, metrics, the OpenAI API ([`openai`]) and the status page ([`page`]).

use std::{sync::Arc, time::SystemTime};

use axum::{Router as Routes, extract::State, http::StatusCode, routing::get};
use tokio::sync::watch;

use super::{health::readiness, intake::Intake, openai, page, status::engine_status};
use crate::{cluster::Workers, security::Security};

/// What the handlers read.
#[derive(Clone)]
pub struct HttpState {
    /// Admission, models and counters.
    pub intake: Intake,
    /// Live workers.
    pub workers: watch::Receiver<Workers>,
    /// Start of this coordinator, as models' creation time.
    pub started: SystemTime,
    /// Certificates in force.
    pub security: Arc<Security>,
}

/// Every path of the front.
pub fn routes(state: HttpState) -> Routes {
    Routes::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(render_metrics))
        .merge(openai::routes())
        .merge(page::routes())
        .with_state(state)
}

async fn readyz(State(state): State<HttpState>) -> (StatusCode, String) {
    match readiness(&state.intake.admission, &state.intake.router) {
        Ok(()) => (StatusCode::OK, "ready\n".into()),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

async fn render_metrics(State(state): State<HttpState>) -> ([(&'static str, &'static str); 1], String) {
    let models = state.intake.router.models();
    let live = Arc::clone(&state.workers.borrow());
    let engines: Vec<_> = models
        .values()
        .flat_map(|model| &model.replicas)
        .filter_map(|replica| engine_status(replica, &live).map(|engine| (replica.model.clone(), engine)))
        .collect();
    let metrics = &state.intake.metrics;
    metrics.set_expiries(&state.security.expiries());
    let text = metrics.render(state.intake.admission.num_running(), live.len(), &models, &engines);
    ([("content-type", "text/plain; version=0.0.4")], text)
}
