//! Spans of the steps in which traced sequences take part: one on the leader, linked to the sequences' spans, and below it
//! one on each rank, at times with one for each exchange between hosts.
//! Invariant: a step without a traced sequence costs a look whether there is any.

use std::collections::HashMap;

use lockstep_executor::step::{StepPlan, StepTrace};
use lockstep_telemetry::trace::{KeyValue, Moment, OpenSpan, SpanContext, StepSpan, numbers, open, remote};

use super::ReplicaSpec;
use crate::{engine::SequenceId, metrics::StepMark, rank::Traffic};

/// Beside the first step of each traced sequence every so many traced steps show their exchanges.
const DETAIL_INTERVAL: u64 = 64;

/// The traced sequences of an engine.
pub(super) struct TracedSequences {
    sequences: HashMap<SequenceId, Traced>,
    num_steps: u64,
    attributes: Vec<KeyValue>,
}

struct Traced {
    context: SpanContext,
    has_run: bool,
}

/// What a replica's spans have in common.
fn attributes_of(spec: &ReplicaSpec) -> Vec<KeyValue> {
    vec![
        KeyValue::new("gen_ai.request.model", spec.model.clone()),
        KeyValue::new("lockstep.replica", spec.index as i64),
        KeyValue::new("lockstep.plan_epoch", spec.plan_epoch as i64),
    ]
}

impl TracedSequences {
    /// None yet.
    pub fn new(spec: &ReplicaSpec) -> Self {
        Self { sequences: HashMap::new(), num_steps: 0, attributes: attributes_of(spec) }
    }

    /// Notes a sequence whose span is sampled.
    pub fn add(&mut self, id: SequenceId, context: SpanContext) {
        self.sequences.insert(id, Traced { context, has_run: false });
    }

    /// Forgets a sequence.
    pub fn remove(&mut self, id: SequenceId) {
        self.sequences.remove(&id);
    }

    /// Begins the span of a step in which any of them takes part, and tells the ranks.
    pub fn begin(&mut self, plan: &mut StepPlan, mark: &StepMark) -> Option<StepSpan> {
        if self.sequences.is_empty() {
            return None;
        }
        let mut links = Vec::new();
        let mut is_detailed = self.num_steps.is_multiple_of(DETAIL_INTERVAL);
        for part in &plan.sequences {
            if let Some(traced) = self.sequences.get_mut(&part.sequence_id) {
                is_detailed |= !traced.has_run;
                traced.has_run = true;
                links.push(traced.context.clone());
            }
        }
        let parent = links.first()?;
        self.num_steps += 1;
        let mut attributes = self.attributes.clone();
        attributes.extend([
            KeyValue::new("lockstep.step_id", plan.step_id as i64),
            KeyValue::new("lockstep.num_sequences", plan.sequences.len() as i64),
            KeyValue::new("lockstep.num_prefill_tokens", mark.num_prefill_tokens as i64),
            KeyValue::new("lockstep.num_decode_tokens", mark.num_decode_tokens as i64),
        ]);
        let span = open("step", parent, Moment::now().time, &links, attributes);
        let (trace_id, span_id) = numbers(span.span_context());
        plan.trace = Some(StepTrace { trace_id, span_id, is_detailed });
        Some(span)
    }
}

/// Makes a rank's spans.
pub(super) struct RankTracer {
    attributes: Vec<KeyValue>,
}

impl RankTracer {
    /// Spans of this rank.
    pub fn new(spec: &ReplicaSpec, rank: usize) -> Self {
        let mut attributes = attributes_of(spec);
        attributes.push(KeyValue::new("lockstep.rank", rank as i64));
        attributes.push(KeyValue::new("lockstep.worker_id", spec.worker_id.clone()));
        Self { attributes }
    }

    /// The span of a step that began at `start` and has just ended.
    pub fn record(&self, trace: StepTrace, step_id: u64, start: Moment, traffic: &Traffic) {
        let parent = remote(trace.trace_id, trace.span_id);
        let mut attributes = self.attributes.clone();
        attributes.extend([
            KeyValue::new("lockstep.step_id", step_id as i64),
            KeyValue::new("lockstep.collective.host_bytes", traffic.host_bytes as i64),
            KeyValue::new("lockstep.collective.host_ms", traffic.host_time.as_secs_f64() * 1e3),
            KeyValue::new("lockstep.collective.device_bytes", traffic.device_bytes as i64),
        ]);
        let mut span = open("rank_step", &parent, start.time, &[], attributes);
        let end = Moment::now();
        for call in traffic.calls.iter().flatten() {
            let bytes = KeyValue::new("lockstep.collective.bytes", call.num_bytes as i64);
            let mut exchange = open(call.operation, span.span_context(), start.time_of(call.started), &[], vec![bytes]);
            exchange.end_with_timestamp(start.time_of(call.started + call.duration));
        }
        span.end_with_timestamp(start.time_of(end.instant));
    }
}
