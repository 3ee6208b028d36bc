//! `GET /v1/models` and `/v1/models/{id}`: what is loaded, ready or not.

use std::time::SystemTime;

use axum::{
    Json,
    extract::{Path, State},
};
use serde::Serialize;

use super::error::ApiError;
use crate::{api::http::HttpState, served::ServedModel};

/// A model; the last two fields are ours (`max_model_len` is vLLM's name for it).
#[derive(Debug, Serialize)]
pub struct ModelObject {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    max_model_len: usize,
    ready: bool,
}

/// All of them.
#[derive(Debug, Serialize)]
pub struct ModelList {
    object: &'static str,
    data: Vec<ModelObject>,
}

/// `GET /v1/models`.
pub async fn list(State(state): State<HttpState>) -> Json<ModelList> {
    let created = unix_seconds(state.started);
    let models = state.intake.router.models();
    let data = models.values().map(|model| describe(model, created)).collect();
    Json(ModelList { object: "list", data })
}

/// `GET /v1/models/{id}`; an id may contain slashes.
///
/// # Errors
/// 404 if no such model is loaded.
pub async fn one(State(state): State<HttpState>, Path(id): Path<String>) -> Result<Json<ModelObject>, ApiError> {
    let model = state.intake.router.model(&id).map_err(|error| ApiError::of(&error, "model"))?;
    Ok(Json(describe(&model, unix_seconds(state.started))))
}

fn describe(model: &ServedModel, created: u64) -> ModelObject {
    ModelObject {
        id: model.spec.name.clone(),
        object: "model",
        created,
        owned_by: "lockstep",
        max_model_len: model.max_sequence_tokens(),
        ready: model.is_ready(),
    }
}

/// Seconds since 1970.
pub fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
