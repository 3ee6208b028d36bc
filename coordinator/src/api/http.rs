//! The HTTP front: health, readiness, metrics and the list of models.
//! Not here yet: the OpenAI completion endpoints.

use std::{sync::Arc, time::SystemTime};

use axum::{Json, Router as Routes, extract::State, http::StatusCode, routing::get};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{admin::engine_status, health::readiness, intake::Intake};
use crate::cluster::Workers;

/// What the handlers read.
#[derive(Clone)]
pub struct HttpState {
    /// Admission, models and counters.
    pub intake: Intake,
    /// Live workers.
    pub workers: watch::Receiver<Workers>,
    /// Start of this coordinator, as models' creation time.
    pub started: SystemTime,
}

/// Every path of the front.
pub fn routes(state: HttpState) -> Routes {
    Routes::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(render_metrics))
        .route("/v1/models", get(models))
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
    let text = state.intake.metrics.render(state.intake.admission.num_running(), live.len(), &models, &engines);
    ([("content-type", "text/plain; version=0.0.4")], text)
}

async fn models(State(state): State<HttpState>) -> Json<Value> {
    let created = state.started.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    let models = state.intake.router.models();
    let data: Vec<Value> = models
        .iter()
        .map(|(name, model)| {
            json!({
                "id": name, "object": "model", "created": created, "owned_by": "lockstep",
                "max_model_len": model.max_sequence_tokens(), "ready": model.is_ready(),
            })
        })
        .collect();
    Json(json!({ "object": "list", "data": data }))
}
