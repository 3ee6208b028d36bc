//! Failures in OpenAI's shape: a status and `{"error": {"message", "type", "param", "code"}}`.
//! Invariant: the status follows from the error's class alone, and 429 and 503 say when to try again.

use std::time::Duration;

use axum::{
    Json,
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use lockstep_proto::status::{Class, RETRY_AFTER};
use serde::Serialize;

use crate::error::RequestError;

/// The retry hint that OpenAI's clients prefer, as milliseconds.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
/// Whether OpenAI's clients try again, which they do by themselves after every 5xx.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// What a client is told.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    retry_after: Option<Duration>,
    /// It would break more than it broke.
    is_final: bool,
    error: Body,
}

#[derive(Debug, Serialize)]
struct Body {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

/// The JSON of an error, of a response or of an event in a stream.
#[derive(Debug, Serialize)]
pub struct ErrorObject {
    error: Body,
}

impl ApiError {
    /// An error that is no field's.
    pub fn new(status: StatusCode, code: &'static str, message: String) -> Self {
        let kind = match status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        let error = Body { message, kind, param: None, code: Some(code) };
        Self { status, retry_after: None, is_final: false, error }
    }

    /// A value of `param` that cannot be served; `param` may be empty.
    pub fn invalid(param: &str, problem: impl std::fmt::Display) -> Self {
        let (param, message) = match param {
            "" => (None, problem.to_string()),
            param => (Some(param.to_owned()), format!("{param}: {problem}")),
        };
        let error = Body { message, kind: "invalid_request_error", param, code: None };
        Self { status: StatusCode::BAD_REQUEST, retry_after: None, is_final: false, error }
    }

    /// A request's failure, with fields named as in the body of the endpoint whose input is `input`.
    pub fn of(error: &RequestError, input: &'static str) -> Self {
        if let RequestError::Invalid { field, problem } = error {
            let param = match *field {
                "input" | "token_ids" | "chat" => input,
                field if field.starts_with("chat.messages") => "messages",
                field => field.strip_prefix("sampling.").unwrap_or(field),
            };
            return Self::invalid(param, problem);
        }
        let class = error.class();
        let mut answer = Self::new(status_of(class), class.reason(), error.to_string());
        answer.is_final = matches!(error, RequestError::BrokeReplicas { .. });
        if matches!(error, RequestError::UnknownModel { .. }) {
            answer.error.param = Some("model".into());
            answer.error.code = Some("model_not_found");
        }
        if class == Class::Unauthenticated {
            answer.error.code = Some("invalid_api_key");
        }
        if class == Class::QuotaExhausted {
            // Nothing comes back by itself, unless the budget is renewed.
            answer.retry_after = error.retry_after();
        } else if matches!(answer.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            answer.retry_after = Some(error.retry_after().unwrap_or(RETRY_AFTER));
        }
        answer
    }

    /// For a stream that cannot change its status any more.
    pub fn into_object(self) -> ErrorObject {
        ErrorObject { error: self.error }
    }
}

fn status_of(class: Class) -> StatusCode {
    match class {
        Class::InvalidRequest => StatusCode::BAD_REQUEST,
        Class::NotFound => StatusCode::NOT_FOUND,
        Class::AlreadyExists => StatusCode::CONFLICT,
        Class::Unauthenticated => StatusCode::UNAUTHORIZED,
        Class::PermissionDenied => StatusCode::FORBIDDEN,
        Class::Overloaded | Class::RateLimited | Class::QuotaExhausted => StatusCode::TOO_MANY_REQUESTS,
        Class::StaleEpoch | Class::NotReady | Class::WorkerLost | Class::ShuttingDown => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        Class::Deadline => StatusCode::GATEWAY_TIMEOUT,
        // Not registered, but what proxies and logs know for a client that went away.
        Class::Cancelled => StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
        Class::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, retry_after, is_final) = (self.status, self.retry_after, self.is_final);
        let mut response = (status, Json(self.into_object())).into_response();
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if is_final {
            response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if let Some(wait) = retry_after {
            let millis = wait.as_millis() as u64;
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(millis.div_ceil(1000)));
            response.headers_mut().insert(RETRY_AFTER_MS, HeaderValue::from(millis));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_breaks_replicas_is_not_to_be_tried_again() {
        let header = |error: &RequestError| {
            let response = ApiError::of(error, "").into_response();
            (response.status(), response.headers().get(SHOULD_RETRY).cloned())
        };
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        let never = Some(HeaderValue::from_static("false"));
        assert_eq!(header(&RequestError::BrokeReplicas { count: 3 }), (status, never));
        assert_eq!(header(&RequestError::Internal("a bug".into())), (status, None));
    }
}
