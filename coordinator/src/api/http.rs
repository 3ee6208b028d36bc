//! The HTTP front: health, readiness, metrics, the OpenAI API ([`openai`]) and the status page ([`page`]).

use std::{
    sync::{Arc, Mutex},
    time::SystemTime,
};

use axum::{Json, Router as Routes, extract::State, routing::get};
use lockstep_proto::v1::WorkerHello;
use lockstep_telemetry::http::Probe;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{
    auth,
    browser::{self, BrowserFolder},
    intake::Intake,
    openai, page,
    probe::CoordinatorProbe,
};
use crate::{
    cluster::{PlanStore, WorkerRecord, Workers},
    security::Security,
};

/// What the handlers read.
#[derive(Clone)]
pub struct HttpState {
    /// Admission, models and counters.
    pub intake: Intake,
    /// Live workers.
    pub workers: watch::Receiver<Workers>,
    /// What is shared with other coordinators.
    pub store: Option<Arc<dyn PlanStore>>,
    /// Start of this coordinator, as models' creation time.
    pub started: SystemTime,
    /// Certificates in force.
    pub security: Arc<Security>,
    /// The files of the page `/browser`, if it is served.
    pub browser: Option<BrowserFolder>,
}

/// Every path of the front.
pub fn routes(state: HttpState) -> Routes {
    let probe: Arc<dyn Probe> = Arc::new(CoordinatorProbe {
        metrics: Arc::clone(&state.intake.metrics),
        admission: state.intake.admission.clone(),
        tenants: state.intake.tenants.clone(),
        router: state.intake.router.clone(),
        store: state.store.clone(),
        security: Arc::clone(&state.security),
        workers: state.workers.clone(),
        scrape: Mutex::default(),
    });
    let browser = state
        .browser
        .as_ref()
        .map(|folder| browser::routes(folder).merge(auth::http(browser::model_routes(), &state.intake)));
    Routes::new()
        .route("/prometheus/workers", get(worker_targets))
        .merge(lockstep_telemetry::http::routes(probe))
        .merge(auth::http(openai::routes(), &state.intake))
        .merge(page::routes())
        .merge(browser.unwrap_or_default())
        .merge(auth::http_admin(page::status_routes(), &state.intake))
        .with_state(state)
}

/// Where Prometheus finds the metrics of the live workers, in the form of its `http_sd_configs`.
async fn worker_targets(State(state): State<HttpState>) -> Json<Value> {
    let live = Arc::clone(&state.workers.borrow());
    let scheme = state.security.workers_scheme();
    let group = |record: &WorkerRecord| {
        let WorkerHello { worker_id, http_address, .. } = &*record.hello;
        json!({"targets": [http_address], "labels": {"worker": worker_id, "__scheme__": scheme}})
    };
    Json(live.values().filter(|record| !record.hello.http_address.is_empty()).map(|record| group(record)).collect())
}
