//! Where a request's trace comes from, how it goes on to the next process, and spans that are made beside `tracing`.
//! For: the front and the worker's service (a span a request), the engine and the ranks (spans of sampled steps).
//! Invariant: without an exporter ([`otlp`](crate::otlp)) no context is sampled, so nothing is made for a step.
//! Not here: what spans say of a request or a step.

use std::time::{Duration, Instant, SystemTime};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
pub use opentelemetry::{
    Array, KeyValue, Value,
    trace::{Span as OpenSpan, SpanContext, SpanId, Status, TraceId},
};
use opentelemetry::{
    Context,
    global::{self, BoxedSpan},
    propagation::{Extractor, Injector, TextMapPropagator},
    trace::{Link, SpanBuilder, SpanKind, TraceContextExt, TraceFlags, TraceState, Tracer},
};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::{Span, field};
pub use tracing_opentelemetry::OpenTelemetrySpanExt;

/// A span that is made beside `tracing`.
pub type StepSpan = BoxedSpan;

/// The library that spans say they are made by.
pub(crate) const SCOPE: &str = "lockstep";

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

struct HeadersMut<'a>(&'a mut HeaderMap);

impl Injector for HeadersMut<'_> {
    fn set(&mut self, key: &str, value: String) {
        // A trace's identity and state are always a header.
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(key), HeaderValue::try_from(value)) {
            self.0.insert(name, value);
        }
    }
}

/// The span of a client's request that came with these headers (W3C `traceparent`), for traces and for the lines that are
/// logged within it; the request's id is filled in with [`set_request_id`].
pub fn generate_span(headers: &HeaderMap) -> Span {
    // Of the highest level, so that no filter takes it from the lines of a request.
    let span =
        tracing::error_span!("generate", otel.kind = "server", request_id = field::Empty, trace_id = field::Empty);
    below(span, headers)
}

/// The span of a sequence that a coordinator gives to a worker, as [`generate_span`].
pub fn sequence_span(headers: &HeaderMap) -> Span {
    let span =
        tracing::error_span!("run_sequence", otel.kind = "server", request_id = field::Empty, trace_id = field::Empty);
    below(span, headers)
}

/// Puts a new span below the one that the headers name.
fn below(span: Span, headers: &HeaderMap) -> Span {
    let parent = TraceContextPropagator::new().extract(&Headers(headers));
    let remote = parent.span().span_context().clone();
    // Only without an exporter is there nothing to set it on.
    let _ = span.set_parent(parent);
    let own = span.context().span().span_context().clone();
    let context = if own.is_valid() { own } else { remote };
    if context.is_valid() {
        span.record("trace_id", field::display(context.trace_id()));
    }
    span
}

/// The span of one of several sequences of a request.
pub fn choice_span(request_id: &str, index: usize) -> Span {
    tracing::error_span!("choice", request_id, index)
}

/// Names the request that a span is of.
pub fn set_request_id(span: &Span, request_id: &str) {
    span.record("request_id", request_id);
}

/// Writes the present span's context into the headers of a call.
pub fn inject(headers: &mut HeaderMap) {
    TraceContextPropagator::new().inject_context(&Span::current().context(), &mut HeadersMut(headers));
}

/// What a span is known by elsewhere, if it is sampled.
pub fn sampled(span: &Span) -> Option<SpanContext> {
    let context = span.context().span().span_context().clone();
    context.is_sampled().then_some(context)
}

/// What a sampled span of another process is known by.
pub fn remote(trace_id: u128, span_id: u64) -> SpanContext {
    let (trace_id, span_id) = (TraceId::from(trace_id), SpanId::from(span_id));
    SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, true, TraceState::NONE)
}

/// The two numbers of [`remote`].
pub fn numbers(context: &SpanContext) -> (u128, u64) {
    (u128::from_be_bytes(context.trace_id().to_bytes()), u64::from_be_bytes(context.span_id().to_bytes()))
}

/// A span of work that has been done, or is under way since `start`.
pub fn open(
    name: &'static str,
    parent: &SpanContext,
    start: SystemTime,
    links: &[SpanContext],
    attributes: Vec<KeyValue>,
) -> StepSpan {
    let links = links.iter().map(|context| Link::with_context(context.clone())).collect();
    let builder = SpanBuilder::from_name(name)
        .with_kind(SpanKind::Internal)
        .with_start_time(start)
        .with_links(links)
        .with_attributes(attributes);
    let parent = Context::new().with_remote_span_context(parent.clone());
    global::tracer(SCOPE).build_with_context(builder, &parent)
}

/// Both clocks at one moment: intervals are measured with the one that never jumps.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// For intervals.
    pub instant: Instant,
    /// For spans.
    pub time: SystemTime,
}

impl Moment {
    /// This one.
    pub fn now() -> Self {
        Self { instant: Instant::now(), time: SystemTime::now() }
    }

    /// The time of a later `instant`.
    pub fn time_of(&self, instant: Instant) -> SystemTime {
        self.time + instant.saturating_duration_since(self.instant)
    }

    /// The time after a `duration`.
    pub fn after(&self, duration: Duration) -> SystemTime {
        self.time + duration
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_keep_their_numbers() {
        let context = remote(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10, 0x1112_1314_1516_1718);
        assert!(context.is_sampled() && context.is_remote());
        assert_eq!(numbers(&context), (0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10, 0x1112_1314_1516_1718));
        let mut headers = HeaderMap::new();
        let carried = Context::new().with_remote_span_context(context.clone());
        TraceContextPropagator::new().inject_context(&carried, &mut HeadersMut(&mut headers));
        assert_eq!(headers["traceparent"], "00-0102030405060708090a0b0c0d0e0f10-1112131415161718-01");
        let read = TraceContextPropagator::new().extract(&Headers(&headers));
        assert_eq!(read.span().span_context().span_id(), context.span_id());
    }

    #[test]
    fn without_an_exporter_nothing_is_sampled() {
        let mut headers = HeaderMap::new();
        let parent = "00-0102030405060708090a0b0c0d0e0f10-1112131415161718-01";
        headers.insert("traceparent", HeaderValue::from_static(parent));
        let span = generate_span(&headers);
        assert_eq!(sampled(&span), None);
    }
}
