//! The coordinator's Prometheus metrics. One registry a coordinator, no global state.
//! Invariant: labels come from fixed sets (outcome words, loaded models, states, tenants of the tenants' file);
//! request ids and texts never appear.

use lockstep_proto::v1;
use lockstep_telemetry::{
    define_metrics,
    metrics::{Counters, Gauge, Gauges, Histogram, Histograms, IntCounter},
};

use crate::{
    cluster::Workers,
    served::{Replica, ReplicaState, ServedModel},
    tenants::{Tenant, Tenants, tenant::TenantUse},
};

/// Buckets of times that a client sees, seconds.
const LATENCY_BUCKETS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// Buckets of times between tokens, seconds.
const TOKEN_BUCKETS: &[f64] =
    &[0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5];
/// Buckets of whole requests, seconds.
const REQUEST_BUCKETS: &[f64] = &[0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0];

define_metrics! {
    /// The metrics of one coordinator.
    pub struct Metrics {
        requests: Counters = "lockstep_coordinator_requests_total" ["outcome"],
            "Generate requests that ended, by finish reason or class of error";
        running_requests: Gauge = "lockstep_coordinator_running_requests",
            "Generate requests in the coordinator";
        max_requests: Gauge = "lockstep_coordinator_max_concurrent_requests",
            "Most requests that are admitted at once";
        prompt_tokens: IntCounter = "lockstep_coordinator_prompt_tokens_total",
            "Prompt tokens of admitted requests";
        cached_prompt_tokens: IntCounter = "lockstep_coordinator_cached_prompt_tokens_total",
            "Prompt tokens whose KV blocks were already there when their request began to run";
        completion_tokens: IntCounter = "lockstep_coordinator_completion_tokens_total",
            "Tokens received from workers";
        request_seconds: Histogram = "lockstep_coordinator_request_seconds" in REQUEST_BUCKETS,
            "From acceptance of a request to its end";
        queue_seconds: Histogram = "lockstep_coordinator_queue_seconds" in LATENCY_BUCKETS,
            "How long a finished request waited for its first step";
        ttft: Histogram = "lockstep_coordinator_time_to_first_token_seconds" in LATENCY_BUCKETS,
            "From acceptance of a request to its first token";
        inter_token: Histogram = "lockstep_coordinator_inter_token_seconds" in TOKEN_BUCKETS,
            "Between two messages with tokens of a stream";
        time_per_output_token: Histogram = "lockstep_coordinator_time_per_output_token_seconds" in TOKEN_BUCKETS,
            "Mean time between the tokens of a finished request of two tokens or more";
        tenant_requests: Counters = "lockstep_coordinator_tenant_requests_total" ["tenant", "outcome"],
            "Generate requests that ended, by finish reason or class of error, of a tenant";
        tenant_prompt_tokens: Counters = "lockstep_coordinator_tenant_prompt_tokens_total" ["tenant"],
            "Prompt tokens of a tenant's admitted requests";
        tenant_completion_tokens: Counters = "lockstep_coordinator_tenant_completion_tokens_total" ["tenant"],
            "Tokens received from workers for a tenant";
        tenant_queue_seconds: Histograms = "lockstep_coordinator_tenant_queue_seconds" ["tenant"] in LATENCY_BUCKETS,
            "How long a tenant's sequences waited for their first step";
        tenant_running_requests: Gauges = "lockstep_coordinator_tenant_running_requests" ["tenant"],
            "Generate requests of a tenant in the coordinator";
        tenant_budget_left: Gauges = "lockstep_coordinator_tenant_budget_left_tokens" ["tenant"],
            "Tokens left of a tenant's budget, without those that running requests may use";
        tenants_file_valid: Gauge = "lockstep_coordinator_tenants_file_valid",
            "1 while the tenants' file as it is now is in force, else 0";
        moved_requests: IntCounter = "lockstep_coordinator_moved_requests_total",
            "Moves of requests to another replica after theirs broke";
        stream_gap: Histogram = "lockstep_coordinator_stream_gap_seconds" in LATENCY_BUCKETS,
            "From the last token of a stream that was moved, or else its acceptance, to the next";
        certificate_expiry: Gauges = "lockstep_coordinator_certificate_expiry_timestamp_seconds" ["certificate"],
            "Unix time at which a certificate in force expires, by whom it is shown to: clients, cluster";
        etcd_connected: Gauge = "lockstep_coordinator_etcd_connected",
            "1 while etcd answers, 0 while it is away and nothing is planned, or where it is not used";
        plans: Gauge = "lockstep_coordinator_plans",
            "1 in the coordinator that plans, 0 in the others";
        live_workers: Gauge = "lockstep_coordinator_live_workers",
            "Registered workers";
        plan_epoch: Gauges = "lockstep_coordinator_plan_epoch" ["model"],
            "Version of the plan that is carried out";
        replicas: Gauges = "lockstep_coordinator_replicas" ["model", "state"],
            "Replicas of the present plan by state: loading, ready, stalled, draining, broken";
        wanted_replicas: Gauges = "lockstep_coordinator_wanted_replicas" ["model"],
            "Replicas that a model is to have, by its policy or else by its first plan";
        outstanding_tokens: Gauges = "lockstep_coordinator_outstanding_tokens" ["model", "replica"],
            "Tokens that a replica may still have to compute for the requests that it was given";
        engine_waiting: Gauges = "lockstep_coordinator_engine_waiting_sequences" ["model", "replica"],
            "Sequences that wait in an engine, as its worker last reported";
        engine_running: Gauges = "lockstep_coordinator_engine_running_sequences" ["model", "replica"],
            "Sequences that run in an engine, as its worker last reported";
        engine_kv_blocks: Gauges = "lockstep_coordinator_engine_kv_blocks" ["model", "replica"],
            "KV blocks of an engine, as its worker last reported";
        engine_free_kv_blocks: Gauges = "lockstep_coordinator_engine_free_kv_blocks" ["model", "replica"],
            "Free KV blocks of an engine, as its worker last reported";
    }
}

impl Metrics {
    /// Counts an ended request, of a tenant if it is known of whom, under `outcome`: a finish reason or an error class's
    /// word.
    pub fn count_request(&self, tenant: Option<&Tenant>, outcome: &'static str) {
        self.requests.with_label_values(&[outcome]).inc();
        if let Some(tenant) = tenant {
            self.tenant_requests.with_label_values(&[&**tenant.name(), outcome]).inc();
        }
    }

    /// Where a tenant's tokens are counted.
    pub fn of_tenant(&self, tenant: &Tenant) -> TenantMetrics {
        let label = &[&**tenant.name()];
        TenantMetrics {
            prompt_tokens: self.tenant_prompt_tokens.with_label_values(label),
            completion_tokens: self.tenant_completion_tokens.with_label_values(label),
            queue_seconds: self.tenant_queue_seconds.with_label_values(label),
        }
    }

    /// Sets the gauges of the tenants that there are.
    pub fn describe_tenants(&self, tenants: &Tenants) {
        self.tenants_file_valid.set(f64::from(u8::from(tenants.is_file_valid())));
        [&self.tenant_running_requests, &self.tenant_budget_left].into_iter().for_each(|gauges| gauges.reset());
        for tenant in tenants.all() {
            let (label, TenantUse { num_running, budget_left }) = (&[&**tenant.name()], tenant.in_use());
            self.tenant_running_requests.with_label_values(label).set(num_running as f64);
            if let Some(budget_left) = budget_left {
                self.tenant_budget_left.with_label_values(label).set(budget_left as f64);
            }
        }
    }

    /// Takes the gauges of all models back.
    pub fn forget_models(&self) {
        let of_models = [
            &self.plan_epoch,
            &self.replicas,
            &self.wanted_replicas,
            &self.outstanding_tokens,
            &self.engine_waiting,
            &self.engine_running,
            &self.engine_kv_blocks,
            &self.engine_free_kv_blocks,
        ];
        of_models.into_iter().for_each(|gauges| gauges.reset());
    }

    /// Sets those of a model.
    pub fn describe(&self, name: &str, model: &ServedModel, live: &Workers) {
        self.plan_epoch.with_label_values(&[name]).set(model.plan_epoch as f64);
        self.wanted_replicas.with_label_values(&[name]).set(model.num_wanted as f64);
        for state in STATES {
            let num_replicas = model.replicas.iter().filter(|replica| word(replica) == state).count();
            self.replicas.with_label_values(&[name, state]).set(num_replicas as f64);
        }
        for replica in &model.replicas {
            let index = replica.index.to_string();
            let set = |gauges: &Gauges, value: f64| gauges.with_label_values(&[name, &index]).set(value);
            set(&self.outstanding_tokens, replica.outstanding_tokens() as f64);
            let Some(engine) = replica.engine(live) else { continue };
            let v1::EngineStatus { num_waiting_sequences, num_running_sequences, .. } = engine;
            set(&self.engine_waiting, num_waiting_sequences.into());
            set(&self.engine_running, num_running_sequences.into());
            set(&self.engine_kv_blocks, engine.num_kv_blocks.into());
            set(&self.engine_free_kv_blocks, engine.num_free_kv_blocks.into());
        }
    }
}

/// Handles of a tenant's metrics.
pub struct TenantMetrics {
    /// Of admitted requests.
    pub prompt_tokens: IntCounter,
    /// Received from workers.
    pub completion_tokens: IntCounter,
    /// To the first step of a sequence.
    pub queue_seconds: Histogram,
}

/// Every [`word`].
const STATES: [&str; 5] = ["loading", "ready", "stalled", "draining", "broken"];

/// A replica's state as a label.
fn word(replica: &Replica) -> &'static str {
    match replica.state() {
        ReplicaState::Loading => "loading",
        ReplicaState::Ready if replica.is_stalled() => "stalled",
        ReplicaState::Ready => "ready",
        ReplicaState::Draining => "draining",
        ReplicaState::Broken(_) => "broken",
    }
}
