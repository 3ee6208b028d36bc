//! The page at `/`: the cluster's state and a chat, in one HTML document that loads nothing from elsewhere.
//! Invariant: its policy lets run and style only what is in the document, and lets it talk to this server alone.
//! Not here: the numbers ([`status`](super::status)) and the chat's endpoint ([`openai`](super::openai)).

use std::sync::Arc;

use axum::{
    Json, Router as Routes,
    extract::State,
    http::{HeaderValue, header},
    response::{Html, IntoResponse, Response},
    routing::get,
};
use serde_json::{Value, json};

use super::{
    http::HttpState,
    status::{cluster, to_json},
};

/// `{nonce}` stands where the policy's word goes, `{browser}` where [`BROWSER`] does if that page is served.
const PAGE: &str = include_str!("page.html");
const BROWSER: &str = r#"<p><a href="/browser/">Compute a model in this browser</a></p>"#;

/// The page.
pub fn routes() -> Routes<HttpState> {
    Routes::new().route("/", get(page))
}

/// What it polls.
pub fn status_routes() -> Routes<HttpState> {
    Routes::new().route("/status.json", get(status))
}

async fn page(State(state): State<HttpState>) -> Response {
    let nonce = uuid::Uuid::new_v4().simple().to_string();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let link = state.browser.as_ref().map_or("", |_| BROWSER);
    let mut response = Html(PAGE.replace("{nonce}", &nonce).replace("{browser}", link)).into_response();
    let headers = response.headers_mut();
    // A nonce is hexadecimal, so the policy is always a header's value.
    headers.extend(HeaderValue::from_str(&policy).ok().map(|policy| (header::CONTENT_SECURITY_POLICY, policy)));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// What `lockstep status --json` prints, with each model's plan as `lockstep plan --json` prints it, and what is running.
async fn status(State(state): State<HttpState>) -> Json<Value> {
    let models = state.intake.router.models();
    let live = Arc::clone(&state.workers.borrow());
    let mut status = to_json(&cluster(&live, &models, state.store.as_deref()));
    for model in status["models"].as_array_mut().into_iter().flatten() {
        let served = model["name"].as_str().and_then(|name| models.get(name));
        let plan = served.and_then(|served| served.plan.as_deref());
        model["ready"] = json!(served.is_some_and(|served| served.is_ready()));
        // Numbers and strings can always be written.
        model["plan"] = serde_json::to_value(plan).unwrap_or_default();
    }
    status["num_running_requests"] = json!(state.intake.admission.num_running());
    status["version"] = json!(env!("CARGO_PKG_VERSION"));
    Json(status)
}
