//! The coordinator's Prometheus metrics. One recorder a coordinator, no global state.
//! Invariant: labels come from fixed sets (outcome words, loaded models); request ids and texts never appear.

use std::time::{Duration, SystemTime};

use lockstep_proto::v1;
use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, Unit};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};
use metrics_util::MetricKindMask;
use tokio_util::sync::CancellationToken;

use crate::served::ModelTable;

const REQUESTS: &str = "lockstep_coordinator_requests_total";
const RUNNING: &str = "lockstep_coordinator_running_requests";
const PROMPT_TOKENS: &str = "lockstep_coordinator_prompt_tokens_total";
const CACHED_PROMPT_TOKENS: &str = "lockstep_coordinator_cached_prompt_tokens_total";
const COMPLETION_TOKENS: &str = "lockstep_coordinator_completion_tokens_total";
const TTFT: &str = "lockstep_coordinator_time_to_first_token_seconds";
const INTER_TOKEN: &str = "lockstep_coordinator_inter_token_seconds";
const MOVED_REQUESTS: &str = "lockstep_coordinator_moved_requests_total";
const STREAM_GAP: &str = "lockstep_coordinator_stream_gap_seconds";
const WORKERS: &str = "lockstep_coordinator_live_workers";
const READY_REPLICAS: &str = "lockstep_coordinator_ready_replicas";
const CERTIFICATE_EXPIRY: &str = "lockstep_coordinator_certificate_expiry_timestamp_seconds";
const WAITING: &str = "lockstep_worker_waiting_sequences";
const ENGINE_RUNNING: &str = "lockstep_worker_running_sequences";
const KV_BLOCKS: &str = "lockstep_worker_kv_blocks";
const FREE_KV_BLOCKS: &str = "lockstep_worker_free_kv_blocks";

/// Every metric with its help text.
const DESCRIPTIONS: [(&str, &str); 16] = [
    (REQUESTS, "Generate requests that ended, by outcome"),
    (RUNNING, "Generate requests in the coordinator"),
    (PROMPT_TOKENS, "Prompt tokens of admitted requests"),
    (CACHED_PROMPT_TOKENS, "Prompt tokens whose KV blocks were already there when their request began to run"),
    (COMPLETION_TOKENS, "Tokens received from workers"),
    (TTFT, "From acceptance of a request to its first token"),
    (INTER_TOKEN, "Between two messages with tokens of a stream"),
    (MOVED_REQUESTS, "Moves of requests to another replica after theirs broke"),
    (STREAM_GAP, "From the last token of a stream that was moved, or else its acceptance, to the next"),
    (WORKERS, "Registered workers"),
    (READY_REPLICAS, "Replicas that take requests, by model"),
    (CERTIFICATE_EXPIRY, "Unix time at which a certificate in force expires, by whom it is shown to"),
    (WAITING, "Sequences that wait in the engines, by model"),
    (ENGINE_RUNNING, "Sequences that run in the engines, by model"),
    (KV_BLOCKS, "KV blocks of the engines, by model"),
    (FREE_KV_BLOCKS, "Free KV blocks of the engines, by model"),
];

/// Buckets of the latency histograms, seconds.
const LATENCY_BUCKETS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 60.0];

/// How often samples are put into the buckets; until then each of them is kept.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

const METADATA: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

/// The metrics of one coordinator.
pub struct Metrics {
    recorder: PrometheusRecorder,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: Counter,
    /// Prompt tokens that workers had computed before.
    pub cached_prompt_tokens: Counter,
    /// Tokens received from workers.
    pub completion_tokens: Counter,
    /// Seconds to the first token.
    pub ttft: Histogram,
    /// Seconds between messages with tokens.
    pub inter_token: Histogram,
    /// Moves of requests to another replica.
    pub moved_requests: Counter,
    /// Seconds without a token around a move.
    pub stream_gap: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        // The buckets are a constant that is not empty, the only thing that can be refused.
        let builder = PrometheusBuilder::new().set_buckets(&LATENCY_BUCKETS).unwrap_or_default();
        // `render` sets every gauge that stands for something: the others go at once.
        let recorder = builder.idle_timeout(MetricKindMask::GAUGE, Some(Duration::ZERO)).build_recorder();
        for (name, help) in DESCRIPTIONS {
            let unit = if name.ends_with("_seconds") { Unit::Seconds } else { Unit::Count };
            match name {
                TTFT | INTER_TOKEN | STREAM_GAP => recorder.describe_histogram(name.into(), Some(unit), help.into()),
                _ if name.ends_with("_total") => recorder.describe_counter(name.into(), Some(unit), help.into()),
                _ => recorder.describe_gauge(name.into(), Some(unit), help.into()),
            }
        }
        let counter = |name| recorder.register_counter(&Key::from_static_name(name), &METADATA);
        let histogram = |name| recorder.register_histogram(&Key::from_static_name(name), &METADATA);
        Self {
            prompt_tokens: counter(PROMPT_TOKENS),
            cached_prompt_tokens: counter(CACHED_PROMPT_TOKENS),
            completion_tokens: counter(COMPLETION_TOKENS),
            ttft: histogram(TTFT),
            inter_token: histogram(INTER_TOKEN),
            moved_requests: counter(MOVED_REQUESTS),
            stream_gap: histogram(STREAM_GAP),
            recorder,
        }
    }
}

impl Metrics {
    /// Keeps the memory of the samples bounded, also if nobody reads them, until `closing` fires.
    pub async fn keep_up(&self, closing: CancellationToken) {
        let mut interval = tokio::time::interval(UPKEEP_INTERVAL);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while closing.run_until_cancelled(interval.tick()).await.is_some() {
            self.recorder.handle().run_upkeep();
        }
    }

    /// Counts an ended request under `outcome`: a finish reason or an error class's word.
    pub fn count_request(&self, outcome: &'static str) {
        let key = Key::from_parts(REQUESTS, vec![Label::from_static_parts("outcome", outcome)]);
        self.recorder.register_counter(&key, &METADATA).increment(1);
    }

    fn gauge(&self, name: &'static str, model: Option<&str>) -> Gauge {
        let labels = model.map(|model| Label::new("model", model.to_owned())).into_iter().collect::<Vec<_>>();
        self.recorder.register_gauge(&Key::from_parts(name, labels), &METADATA)
    }

    /// Notes when the certificates in force expire, by whom they are shown to; until the next `render`.
    pub fn set_expiries(&self, expiries: &[(&'static str, SystemTime)]) {
        for (shown_to, expiry) in expiries {
            let labels = vec![Label::from_static_parts("certificate", shown_to)];
            let seconds = expiry.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            self.recorder.register_gauge(&Key::from_parts(CERTIFICATE_EXPIRY, labels), &METADATA).set(seconds);
        }
    }

    /// The exposition text, with the gauges as they are now. `engines` gives each ready replica's model and numbers.
    pub fn render(
        &self,
        num_running: usize,
        num_workers: usize,
        models: &ModelTable,
        engines: &[(String, v1::EngineStatus)],
    ) -> String {
        self.gauge(RUNNING, None).set(num_running as f64);
        self.gauge(WORKERS, None).set(num_workers as f64);
        for (name, model) in models.iter() {
            let num_ready = model.replicas.iter().filter(|replica| replica.is_ready()).count();
            self.gauge(READY_REPLICAS, Some(name)).set(num_ready as f64);
            let sum = |field: fn(&v1::EngineStatus) -> u32| -> f64 {
                engines.iter().filter(|(model, _)| model == name).map(|(_, engine)| f64::from(field(engine))).sum()
            };
            self.gauge(WAITING, Some(name)).set(sum(|engine| engine.num_waiting_sequences));
            self.gauge(ENGINE_RUNNING, Some(name)).set(sum(|engine| engine.num_running_sequences));
            self.gauge(KV_BLOCKS, Some(name)).set(sum(|engine| engine.num_kv_blocks));
            self.gauge(FREE_KV_BLOCKS, Some(name)).set(sum(|engine| engine.num_free_kv_blocks));
        }
        self.recorder.handle().render()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{config::ModelSpec, served::ServedModel};

    #[test]
    fn renders_what_was_counted() {
        let metrics = Metrics::default();
        metrics.count_request("stop");
        metrics.ttft.record(0.02);
        let text = metrics.render(3, 2, &ModelTable::default(), &[]);
        assert!(text.contains("lockstep_coordinator_requests_total{outcome=\"stop\"} 1"), "{text}");
        assert!(text.contains("lockstep_coordinator_time_to_first_token_seconds_bucket{le=\"0.025\"} 1"), "{text}");
        assert!(text.contains("lockstep_coordinator_running_requests 3"), "{text}");
    }

    #[test]
    fn gauges_go_with_their_model() {
        let spec = ModelSpec {
            name: "m".into(),
            source: "m.gguf".into(),
            policy: lockstep_sharding::Policy::AUTO,
            min_workers: 1,
        };
        let model = ServedModel {
            spec,
            description: None,
            plan: None,
            plan_epoch: 0,
            replicas: Vec::new(),
            num_ready: 0,
            problem: None,
            failed_attempts: 0,
        };
        let models: ModelTable = Arc::new([("m".to_owned(), Arc::new(model))].into());
        let metrics = Metrics::default();
        let gauge = "lockstep_coordinator_ready_replicas{model=\"m\"} 0";
        for _ in 0..3 {
            let text = metrics.render(1, 1, &models, &[]);
            assert!(text.contains(gauge) && text.contains("lockstep_coordinator_live_workers 1"), "{text}");
        }
        let text = metrics.render(1, 1, &ModelTable::default(), &[]);
        assert!(!text.contains(gauge) && text.contains("lockstep_coordinator_live_workers 1"), "{text}");
    }
}
