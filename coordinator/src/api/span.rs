//! What the span of a request says of it, in the words of OpenTelemetry's conventions for generative models where they
//! have one.
//! For: [`generation`](super::generation). Invariant: texts and tokens never appear, only their numbers.

use lockstep_proto::v1;
use lockstep_telemetry::trace::{Array, KeyValue, OpenTelemetrySpanExt, Status, Value};
use tracing::Span;

use crate::served::Replica;

/// Says what was asked for; `operation` is the conventions' word for it.
pub fn describe(span: &Span, operation: &'static str, request: &v1::RunSequenceRequest) {
    let sampling = request.sampling.clone().unwrap_or_default();
    span.set_attribute("gen_ai.provider.name", "lockstep");
    span.set_attribute("gen_ai.operation.name", operation);
    span.set_attribute("gen_ai.request.model", request.model.clone());
    span.set_attribute("gen_ai.request.max_tokens", i64::from(sampling.max_tokens()));
    span.set_attribute("gen_ai.request.temperature", f64::from(sampling.temperature.unwrap_or(1.0)));
    span.set_attribute("gen_ai.response.id", request.request_id.clone());
    span.set_attribute("gen_ai.usage.input_tokens", request.token_ids.len() as i64);
    span.set_attribute("lockstep.tenant", request.tenant.clone());
}

/// Says where it runs.
pub fn on_replica(span: &Span, replica: &Replica) {
    span.set_attribute("lockstep.replica", replica.index as i64);
    span.set_attribute("lockstep.plan_epoch", replica.plan_epoch as i64);
}

/// Notes that the request of the present span runs on another replica now.
pub fn moved(replica: &Replica) {
    let span = Span::current();
    on_replica(&span, replica);
    let attributes = [("lockstep.replica", replica.index as i64), ("lockstep.plan_epoch", replica.plan_epoch as i64)];
    span.add_event("moved", attributes.map(|(key, value)| KeyValue::new(key, value)).into());
}

/// How a request ended.
pub struct Ending<'a> {
    /// Finish reason or class of error.
    pub outcome: &'static str,
    /// The last message, unless an error came first.
    pub finish: Option<&'a v1::Finish>,
    /// Tokens that were received for it.
    pub num_tokens: u64,
    /// Times that it changed replicas.
    pub num_moves: u64,
}

/// Says how it ended.
pub fn end(span: &Span, ending: &Ending<'_>) {
    let Ending { outcome, finish, num_tokens, num_moves } = *ending;
    span.set_attribute("lockstep.outcome", outcome);
    span.set_attribute("lockstep.moves", num_moves as i64);
    span.set_attribute("gen_ai.usage.output_tokens", num_tokens as i64);
    if let Some(v1::Finish { usage, timings, .. }) = finish {
        let v1::Timings { queue_ms, ttft_ms, decode_ms } = timings.unwrap_or_default();
        // One for each choice by the conventions; this span has one.
        let finish_reasons = Value::Array(Array::String(vec![outcome.into()]));
        span.set_attribute("gen_ai.response.finish_reasons", finish_reasons);
        span.set_attribute("lockstep.cached_tokens", i64::from(usage.unwrap_or_default().cached_tokens));
        span.set_attribute("lockstep.queue_ms", queue_ms);
        span.set_attribute("lockstep.ttft_ms", ttft_ms);
        span.set_attribute("lockstep.decode_ms", decode_ms);
    } else if outcome != "cancelled" {
        span.set_attribute("error.type", outcome);
        span.set_status(Status::error(outcome));
    }
    span.in_scope(|| tracing::debug!(outcome, num_tokens, num_moves, "request ended"));
}
