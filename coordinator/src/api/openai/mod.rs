//! The OpenAI HTTP API, over the same path as gRPC Generate.
//!
//! - [`request`] ([`prompt`], [`messages`], [`texts`], [`unserved`]): what clients send, read and refused by field.
//! - [`completions`], [`chat`], [`models`]: the endpoints and the wording of their answers.
//! - [`choices`]: the sequences of a request; [`answer`]: one JSON object of them; [`stream`]: server-sent events.
//! - [`error`]: failures in OpenAI's shape.
//!
//! Invariant: nothing here decides what is admitted, valid or routed where: that is [`intake`](super::intake).

use std::time::Duration;

use axum::{
    Router as Routes,
    body::BodyDataStream,
    extract::Request,
    http::{StatusCode, Uri, header},
    middleware::{Next, from_fn},
    response::Response,
    routing::{any, get, post},
};
use futures::StreamExt;
use lockstep_telemetry::trace::generate_span;
use tracing::Instrument;

use self::error::ApiError;
use super::{MAX_REQUEST_BYTES, http::HttpState};

pub mod answer;
pub mod chat;
pub mod choices;
pub mod completions;
pub mod error;
pub mod messages;
pub mod models;
pub mod prompt;
pub mod request;
pub mod stream;
pub mod texts;
pub mod unserved;

/// Longest that a client may take to send a request.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// So much of a body that is too long is still read, since many clients look for an answer only when they have sent all.
const MAX_DISCARDED_BYTES: usize = 4 * MAX_REQUEST_BYTES;

/// Everything under `/v1`.
pub fn routes() -> Routes<HttpState> {
    Routes::new()
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/completions", post(completions::create).layer(from_fn(traced)))
        .route("/v1/chat/completions", post(chat::create).layer(from_fn(traced)))
        .route("/v1", any(unknown))
        .route("/v1/", any(unknown))
        .route("/v1/{*path}", any(unknown))
        .method_not_allowed_fallback(wrong_method)
}

/// Answers within the span of the request, which streams take along.
async fn traced(request: Request, next: Next) -> Response {
    let span = generate_span(request.headers());
    next.run(request).instrument(span).await
}

async fn unknown(uri: Uri) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", format!("{} is not served", uri.path()))
}

async fn wrong_method(uri: Uri) -> ApiError {
    let message = format!("{} is not served with this method", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// The body of a request that says it is JSON.
///
/// # Errors
/// 415 if it says something else, 413 if it is too long, 408 if it does not come, 400 if it breaks off.
async fn json_body(request: Request) -> Result<Vec<u8>, ApiError> {
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence != "application/json" && !essence.ends_with("+json") {
        let message = format!("content-type is {:?}, expected application/json", content_type.unwrap_or_default());
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_content_type", message));
    }
    let read = tokio::time::timeout(BODY_TIMEOUT, read_body(request.into_body().into_data_stream()));
    read.await.unwrap_or_else(|_| {
        let message = format!("the body did not come within {} s", BODY_TIMEOUT.as_secs());
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message))
    })
}

async fn read_body(mut chunks: BodyDataStream) -> Result<Vec<u8>, ApiError> {
    let (mut body, mut num_bytes) = (Vec::new(), 0);
    while let Some(chunk) = chunks.next().await {
        let broken = |error: axum::Error| ApiError::new(StatusCode::BAD_REQUEST, "invalid_body", error.to_string());
        let chunk = chunk.map_err(broken)?;
        num_bytes += chunk.len();
        if num_bytes <= MAX_REQUEST_BYTES {
            body.extend_from_slice(&chunk);
        } else if num_bytes <= MAX_DISCARDED_BYTES {
            body = Vec::new();
        } else {
            break;
        }
    }
    if num_bytes > MAX_REQUEST_BYTES {
        let message = format!("the body is longer than {MAX_REQUEST_BYTES} bytes");
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message));
    }
    Ok(body)
}
