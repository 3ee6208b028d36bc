//! The worker's Prometheus metrics, and the meters with which its threads count.
//! Invariant: a meter holds handles that are atomics, so that counting a step takes neither a lock nor memory. Series
//! are named by model, replica and rank alone, which plans bound; gauges go when what they describe is gone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use lockstep_executor::step::{StepPlan, StepSequence};
use lockstep_kernels::device::Scratch;
use lockstep_sharding::RankPlan;
use lockstep_telemetry::{
    define_metrics,
    metrics::{Counter, Counters, Gauge, Gauges, Histogram, Histograms, IntCounter, Seconds},
};

use crate::{
    engine::{EngineStatus, FinishReason, SequenceOutput},
    rank::Traffic,
};

/// Buckets of a step, seconds.
const STEP_BUCKETS: &[f64] = &[
    0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0,
    2.5, 10.0,
];
/// Buckets of waits for the first step, seconds.
const QUEUE_BUCKETS: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];
/// Buckets of loads, seconds.
const LOAD_BUCKETS: &[f64] = &[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0];

define_metrics! {
    /// The metrics of one worker.
    #[derive(Debug)]
    pub struct Metrics {
        registered: Gauge = "lockstep_worker_registered",
            "1 while a coordinator holds the registration or, with etcd, reaches the worker, else 0";
        draining: Gauge = "lockstep_worker_draining",
            "1 from the order to stop on, else 0";
        certificate_expiry: Gauges = "lockstep_worker_certificate_expiry_timestamp_seconds" ["certificate"],
            "Unix time at which the certificate in force expires, where there is one: cluster";
        replica_parts: Gauges = "lockstep_worker_replica_parts" ["state"],
            "Parts of replicas held here by state: loading, ready, stalled, broken, freeing";
        loads: Counters = "lockstep_worker_loads_total" ["model", "outcome"],
            "Loads of parts that ended, by outcome: ready, failed";
        load_seconds: Histograms = "lockstep_worker_load_seconds" ["model"] in LOAD_BUCKETS,
            "Loads of parts that are ready, from the order to the first possible step";
        waiting_sequences: Gauges = "lockstep_worker_waiting_sequences" ["model", "replica"],
            "Sequences that wait for admission to the steps of a replica led here, preempted ones included";
        running_sequences: Gauges = "lockstep_worker_running_sequences" ["model", "replica"],
            "Sequences that hold KV blocks and take part in steps";
        kv_blocks: Gauges = "lockstep_worker_kv_blocks" ["model", "replica"],
            "KV blocks of a replica";
        used_kv_blocks: Gauges = "lockstep_worker_used_kv_blocks" ["model", "replica"],
            "KV blocks that sequences hold, not those that are kept for later sequences alone";
        preemptions: Counters = "lockstep_worker_preemptions_total" ["model", "replica"],
            "Times that a sequence lost its KV blocks to an older one";
        prefix_query_tokens: Counters = "lockstep_worker_prefix_query_tokens_total" ["model", "replica"],
            "Tokens of sequences that began to run, where prefixes are cached";
        prefix_hit_tokens: Counters = "lockstep_worker_prefix_hit_tokens_total" ["model", "replica"],
            "Of these, tokens whose KV blocks were already there";
        sequences: Counters = "lockstep_worker_sequences_total" ["model", "replica", "outcome"],
            "Sequences that ended, by outcome: stop, length, error, cancelled";
        queue_seconds: Histograms = "lockstep_worker_queue_seconds" ["model", "replica"] in QUEUE_BUCKETS,
            "How long a sequence waited for its first step";
        step_seconds: Histograms = "lockstep_worker_step_seconds" ["model", "replica", "kind"] in STEP_BUCKETS,
            "From the order of a step to its result, by what it computes: prefill, decode, mixed";
        tokens: Counters = "lockstep_worker_tokens_total" ["model", "replica", "kind"],
            "Tokens computed, by kind: prefill, decode";
        rank_step_seconds: Histograms = "lockstep_worker_rank_step_seconds" ["model", "replica", "rank"] in STEP_BUCKETS,
            "A step on one rank, with its waits for other ranks";
        collective_bytes: Counters = "lockstep_worker_collective_bytes_total" ["model", "replica", "rank", "peers"],
            "Bytes of the vectors that a rank summed with others or handed over, by who exchanged them: hosts (TCP), devices (NCCL, direct; as f32)";
        collective_seconds: Seconds = "lockstep_worker_collective_seconds_total" ["model", "replica", "rank", "peers"],
            "Time that a rank spent in sums and hand-overs between hosts, waits for the others included";
        rank_weight_bytes: Gauges = "lockstep_worker_rank_weight_bytes" ["model", "replica", "rank"],
            "Memory of a rank's weights by the plan";
        rank_kv_bytes: Gauges = "lockstep_worker_rank_kv_bytes" ["model", "replica", "rank"],
            "Memory of a rank's KV blocks by the plan";
        rank_scratch_bytes: Gauges = "lockstep_worker_rank_scratch_bytes" ["model", "replica", "rank"],
            "Scratch memory of operations in use on a rank's GPU after its last step";
        rank_scratch_high_water_bytes: Gauges = "lockstep_worker_rank_scratch_high_water_bytes" ["model", "replica", "rank"],
            "Most scratch memory that was ever in use at a time on a rank's GPU";
        rank_scratch_requests: Counters = "lockstep_worker_rank_scratch_requests_total" ["model", "replica", "rank", "outcome"],
            "Times that an operation took scratch memory on a rank's GPU, by outcome: reused, allocated";
    }
}

/// A step under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepMark {
    started: Instant,
    /// Tokens that complete or continue prompts.
    pub num_prefill_tokens: usize,
    /// Tokens of sequences that decode.
    pub num_decode_tokens: usize,
}

impl StepMark {
    /// A step that is given out now.
    pub fn new(plan: &StepPlan, now: Instant) -> Self {
        let is_decode = |part: &&StepSequence| part.sample.is_some() && part.token_ids.len() == 1;
        let num_decode_tokens = plan.sequences.iter().filter(is_decode).count();
        Self { started: now, num_prefill_tokens: plan.num_tokens() - num_decode_tokens, num_decode_tokens }
    }
}

/// Gauges of one replica or rank; they go with it.
struct OwnGauges<const N: usize> {
    families: [Gauges; N],
    labels: Vec<String>,
    values: [Gauge; N],
}

impl<const N: usize> OwnGauges<N> {
    fn new(families: [&Gauges; N], labels: Vec<String>) -> Self {
        let names: Vec<&str> = labels.iter().map(String::as_str).collect();
        let values = families.map(|family| family.with_label_values(&names));
        Self { families: families.map(Gauges::clone), values, labels }
    }

    fn set(&self, values: [f64; N]) {
        self.values.iter().zip(values).for_each(|(gauge, value)| gauge.set(value));
    }
}

impl<const N: usize> Drop for OwnGauges<N> {
    fn drop(&mut self) {
        let names: Vec<&str> = self.labels.iter().map(String::as_str).collect();
        for family in &self.families {
            // It was there; nobody else takes it away.
            let _ = family.remove_label_values(&names);
        }
    }
}

/// A counter of what an engine counts itself, from its beginning.
struct Total {
    counter: IntCounter,
    counted: u64,
}

impl Total {
    fn new(counters: &Counters, labels: &[&str]) -> Self {
        Self { counter: counters.with_label_values(labels), counted: 0 }
    }

    fn reach(&mut self, total: u64) {
        self.counter.inc_by(total.saturating_sub(self.counted));
        self.counted = total;
    }
}

/// Counts for the engine's thread of a replica.
pub(crate) struct EngineMeter {
    gauges: OwnGauges<4>,
    preemptions: Total,
    prefix_queries: Total,
    prefix_hits: Total,
    queue_seconds: Histogram,
    prefill_seconds: Histogram,
    decode_seconds: Histogram,
    mixed_seconds: Histogram,
    prefill_tokens: IntCounter,
    decode_tokens: IntCounter,
    stopped: IntCounter,
    at_length: IntCounter,
    failed: IntCounter,
    /// Sequences that nobody waited for any more.
    pub cancelled: IntCounter,
}

impl EngineMeter {
    /// Counts for replica number `replica` of `model`.
    pub fn new(metrics: &Metrics, model: &str, replica: usize) -> Self {
        let index = replica.to_string();
        let labels = [model, &index];
        let of_kind = |kind| metrics.step_seconds.with_label_values(&[model, &index, kind]);
        let tokens = |kind| metrics.tokens.with_label_values(&[model, &index, kind]);
        let ended = |outcome| metrics.sequences.with_label_values(&[model, &index, outcome]);
        let Metrics { waiting_sequences, running_sequences, kv_blocks, used_kv_blocks, .. } = metrics;
        let families = [waiting_sequences, running_sequences, kv_blocks, used_kv_blocks];
        Self {
            gauges: OwnGauges::new(families, vec![model.to_owned(), index.clone()]),
            preemptions: Total::new(&metrics.preemptions, &labels),
            prefix_queries: Total::new(&metrics.prefix_query_tokens, &labels),
            prefix_hits: Total::new(&metrics.prefix_hit_tokens, &labels),
            queue_seconds: metrics.queue_seconds.with_label_values(&labels),
            prefill_seconds: of_kind("prefill"),
            decode_seconds: of_kind("decode"),
            mixed_seconds: of_kind("mixed"),
            prefill_tokens: tokens("prefill"),
            decode_tokens: tokens("decode"),
            stopped: ended("stop"),
            at_length: ended("length"),
            failed: ended("error"),
            cancelled: ended("cancelled"),
        }
    }

    /// Takes the engine's numbers.
    pub fn observe(&mut self, status: &EngineStatus) {
        let num_used_blocks = status.num_kv_blocks - status.num_free_kv_blocks;
        let counts =
            [status.num_waiting_sequences, status.num_running_sequences, status.num_kv_blocks, num_used_blocks];
        self.gauges.set(counts.map(|count| count as f64));
        self.preemptions.reach(status.num_preemptions);
        self.prefix_queries.reach(status.prefix_query_tokens);
        self.prefix_hits.reach(status.prefix_hit_tokens);
    }

    /// Counts a step whose result is there.
    pub fn step(&self, step: StepMark, now: Instant) {
        let seconds = match (step.num_prefill_tokens, step.num_decode_tokens) {
            (_, 0) => &self.prefill_seconds,
            (0, _) => &self.decode_seconds,
            _ => &self.mixed_seconds,
        };
        seconds.observe(now.saturating_duration_since(step.started).as_secs_f64());
        self.prefill_tokens.inc_by(step.num_prefill_tokens as u64);
        self.decode_tokens.inc_by(step.num_decode_tokens as u64);
    }

    /// Counts what a sequence yields.
    pub fn output(&self, output: &SequenceOutput) {
        match output {
            SequenceOutput::Token { beginning: Some(it), .. } => self.queue_seconds.observe(it.queue_ms / 1e3),
            SequenceOutput::Token { beginning: None, .. } => {}
            SequenceOutput::Finished { reason, .. } => match reason {
                FinishReason::Stop => self.stopped.inc(),
                FinishReason::Length => self.at_length.inc(),
                FinishReason::Error => self.failed.inc(),
            },
        }
    }
}

/// Scratch memory of a rank's device after its last step: written by the rank's thread, read by whoever reports it.
#[derive(Debug, Default)]
pub(crate) struct LastScratch {
    used_bytes: AtomicUsize,
    high_water_bytes: AtomicUsize,
    num_requests: AtomicU64,
    num_hits: AtomicU64,
}

impl LastScratch {
    fn set(&self, scratch: Scratch) {
        self.used_bytes.store(scratch.used_bytes, Ordering::Relaxed);
        self.high_water_bytes.store(scratch.high_water_bytes, Ordering::Relaxed);
        self.num_requests.store(scratch.num_requests, Ordering::Relaxed);
        self.num_hits.store(scratch.num_hits, Ordering::Relaxed);
    }

    /// The numbers, of which some may be those of the step before.
    pub fn get(&self) -> Scratch {
        Scratch {
            used_bytes: self.used_bytes.load(Ordering::Relaxed),
            high_water_bytes: self.high_water_bytes.load(Ordering::Relaxed),
            num_requests: self.num_requests.load(Ordering::Relaxed),
            num_hits: self.num_hits.load(Ordering::Relaxed),
        }
    }
}

/// Counts for a rank's thread.
pub(crate) struct RankMeter {
    gauges: OwnGauges<4>,
    weight_bytes: f64,
    kv_bytes: f64,
    step_seconds: Histogram,
    host_bytes: IntCounter,
    host_seconds: Counter,
    device_bytes: IntCounter,
    scratch_reused: Total,
    scratch_allocated: Total,
    last_scratch: Arc<LastScratch>,
}

impl RankMeter {
    /// Counts for the rank that `plan` describes, and keeps `last_scratch` up to date.
    pub fn new(
        metrics: &Metrics,
        model: &str,
        replica: usize,
        plan: &RankPlan,
        last_scratch: Arc<LastScratch>,
    ) -> Self {
        let (index, rank) = (replica.to_string(), plan.rank.to_string());
        let Metrics { rank_weight_bytes, rank_kv_bytes, rank_scratch_bytes, rank_scratch_high_water_bytes, .. } =
            metrics;
        let families = [rank_weight_bytes, rank_kv_bytes, rank_scratch_bytes, rank_scratch_high_water_bytes];
        let (hosts, devices) = ([model, &index, &rank, "hosts"], [model, &index, &rank, "devices"]);
        let scratch = |outcome| Total::new(&metrics.rank_scratch_requests, &[model, &index, &rank, outcome]);
        let mut meter = Self {
            gauges: OwnGauges::new(families, vec![model.to_owned(), index.clone(), rank.clone()]),
            weight_bytes: plan.weight_bytes as f64,
            kv_bytes: plan.kv_bytes as f64,
            step_seconds: metrics.rank_step_seconds.with_label_values(&[model, &index, &rank]),
            host_bytes: metrics.collective_bytes.with_label_values(&hosts),
            host_seconds: metrics.collective_seconds.with_label_values(&hosts),
            device_bytes: metrics.collective_bytes.with_label_values(&devices),
            scratch_reused: scratch("reused"),
            scratch_allocated: scratch("allocated"),
            last_scratch,
        };
        meter.memory(Scratch::default());
        meter
    }

    /// Counts an executed step.
    pub fn step(&mut self, duration: Duration, traffic: &Traffic, scratch: Scratch) {
        self.step_seconds.observe(duration.as_secs_f64());
        self.host_bytes.inc_by(traffic.host_bytes);
        self.host_seconds.inc_by(traffic.host_time.as_secs_f64());
        self.device_bytes.inc_by(traffic.device_bytes);
        self.memory(scratch);
    }

    fn memory(&mut self, scratch: Scratch) {
        let Scratch { used_bytes, high_water_bytes, num_requests, num_hits } = scratch;
        self.scratch_reused.reach(num_hits);
        self.scratch_allocated.reach(num_requests.saturating_sub(num_hits));
        self.last_scratch.set(scratch);
        self.gauges.set([self.weight_bytes, self.kv_bytes, used_bytes as f64, high_water_bytes as f64]);
    }
}

#[cfg(test)]
mod tests {
    use lockstep_telemetry::metrics::render;

    use super::*;

    #[test]
    fn scratch_memory_is_counted_and_reported() {
        let (metrics, last) = (Metrics::new().unwrap(), Arc::new(LastScratch::default()));
        let plan = RankPlan { rank: 3, ..RankPlan::default() };
        let mut meter = RankMeter::new(&metrics, "m", 0, &plan, Arc::clone(&last));
        for (num_requests, num_hits) in [(10, 7), (30, 27)] {
            let scratch = Scratch { used_bytes: 0, high_water_bytes: 4096, num_requests, num_hits };
            meter.step(Duration::from_millis(1), &Traffic::default(), scratch);
            assert_eq!(last.get(), scratch);
        }
        let text = render(&[Some(metrics.registry())]);
        let labels = "model=\"m\"";
        for line in [
            format!("lockstep_worker_rank_scratch_high_water_bytes{{{labels},rank=\"3\",replica=\"0\"}} 4096"),
            format!("requests_total{{{labels},outcome=\"reused\",rank=\"3\",replica=\"0\"}} 27"),
            format!("requests_total{{{labels},outcome=\"allocated\",rank=\"3\",replica=\"0\"}} 3"),
        ] {
            assert!(text.contains(&line), "{line}: {text}");
        }
    }

    #[test]
    fn gauges_go_with_the_replica_and_counters_stay() {
        let metrics = Metrics::new().unwrap();
        let mut meter = EngineMeter::new(&metrics, "m", 1);
        let status = EngineStatus {
            num_waiting_sequences: 2,
            num_kv_blocks: 10,
            num_free_kv_blocks: 7,
            num_preemptions: 4,
            ..EngineStatus::default()
        };
        meter.observe(&status);
        meter.observe(&status);
        let started = Instant::now();
        let step = StepMark { started, num_prefill_tokens: 5, num_decode_tokens: 1 };
        meter.step(step, started + Duration::from_millis(4));
        let text = render(&[Some(metrics.registry())]);
        for line in [
            "lockstep_worker_used_kv_blocks{model=\"m\",replica=\"1\"} 3",
            "lockstep_worker_preemptions_total{model=\"m\",replica=\"1\"} 4",
            "lockstep_worker_tokens_total{kind=\"prefill\",model=\"m\",replica=\"1\"} 5",
            "lockstep_worker_step_seconds_bucket{kind=\"mixed\",model=\"m\",replica=\"1\",le=\"0.003\"} 0",
            "lockstep_worker_step_seconds_bucket{kind=\"mixed\",model=\"m\",replica=\"1\",le=\"0.005\"} 1",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        drop(meter);
        let text = render(&[Some(metrics.registry())]);
        assert!(!text.contains("used_kv_blocks{") && text.contains("preemptions_total{"), "{text}");
    }
}
