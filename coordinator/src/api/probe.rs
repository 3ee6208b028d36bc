//! What the coordinator answers to orchestrators and Prometheus: whether a request could be served, and what was counted.
//! For: the HTTP front. Invariant: what is gone is in no scrape after it went.
//! Not here: what is counted ([`crate::metrics`]).

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

use lockstep_telemetry::{
    http::Probe,
    metrics::render,
    otlp::{self, ExportMetrics},
};
use tokio::sync::watch;

use super::health::readiness;
use crate::{
    admission::Admission,
    cluster::{PlanStore, Workers, store},
    metrics::Metrics,
    router::Router,
    security::Security,
    tenants::Tenants,
};

/// What the coordinator answers to probes and scrapes.
pub struct CoordinatorProbe {
    /// What was counted.
    pub metrics: Arc<Metrics>,
    /// How many requests run.
    pub admission: Admission,
    /// Whose.
    pub tenants: Tenants,
    /// Models and replicas.
    pub router: Router,
    /// Certificates in force.
    pub security: Arc<Security>,
    /// Live workers.
    pub workers: watch::Receiver<Workers>,
    /// What is shared with other coordinators.
    pub store: Option<Arc<dyn PlanStore>>,
    /// One scrape at a time: gauges of what is gone are taken back before the others are set.
    pub scrape: Mutex<()>,
}

impl Probe for CoordinatorProbe {
    fn readiness(&self) -> Result<(), String> {
        readiness(&self.admission, &self.router)
    }

    fn metrics(&self) -> String {
        let _scrape = self.scrape.lock().unwrap_or_else(PoisonError::into_inner);
        let live = Arc::clone(&self.workers.borrow());
        self.metrics.running_requests.set(self.admission.num_running() as f64);
        self.metrics.max_requests.set(self.admission.limit() as f64);
        self.metrics.live_workers.set(live.len() as f64);
        for (shown_to, expiry) in self.security.expiries() {
            let seconds = expiry.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            self.metrics.certificate_expiry.with_label_values(&[shown_to]).set(seconds);
        }
        self.metrics.describe_tenants(&self.tenants);
        let registry = self.store.as_deref().map(store::status);
        let is_connected = registry.as_ref().is_some_and(|registry| registry.problem.is_empty());
        let plans = registry.is_none_or(|registry| is_connected && registry.leader_id == registry.coordinator_id);
        self.metrics.etcd_connected.set(f64::from(u8::from(is_connected)));
        self.metrics.plans.set(f64::from(u8::from(plans)));
        self.metrics.forget_models();
        for (name, model) in self.router.models().iter() {
            self.metrics.describe(name, model, &live);
        }
        render(&[Some(self.metrics.registry()), otlp::metrics().map(ExportMetrics::registry)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::ModelSpec,
        served::{ModelTable, ServedModel},
    };

    fn probe() -> (CoordinatorProbe, watch::Sender<ModelTable>, watch::Sender<Workers>) {
        let (models, published) = watch::channel(ModelTable::default());
        let (sender, workers) = watch::channel(Workers::default());
        let probe = CoordinatorProbe {
            metrics: Arc::new(Metrics::new().unwrap()),
            admission: Admission::new(3),
            tenants: Tenants::open(None).unwrap(),
            router: Router::new(published, Arc::default()),
            security: Arc::default(),
            workers,
            store: None,
            scrape: Mutex::default(),
        };
        (probe, models, sender)
    }

    #[test]
    fn renders_what_was_counted() {
        let (probe, _models, _workers) = probe();
        probe.metrics.count_request(None, "stop");
        probe.metrics.ttft.observe(0.02);
        let _permit = probe.admission.enter(&probe.tenants, &probe.tenants.authenticate(None).unwrap()).unwrap();
        let text = probe.metrics();
        assert!(text.contains("lockstep_coordinator_requests_total{outcome=\"stop\"} 1"), "{text}");
        assert!(text.contains("lockstep_coordinator_time_to_first_token_seconds_bucket{le=\"0.025\"} 1"), "{text}");
        assert!(text.contains("lockstep_coordinator_running_requests 1"), "{text}");
        assert!(text.contains("lockstep_coordinator_max_concurrent_requests 3"), "{text}");
    }

    #[test]
    fn gauges_go_with_their_model() {
        let spec = ModelSpec {
            name: "m".into(),
            source: "m.gguf".into(),
            policy: lockstep_sharding::Policy::AUTO,
            min_workers: 1,
            plan_options: lockstep_sharding::PlanOptions::default(),
        };
        let model = ServedModel {
            spec,
            description: None,
            plan: None,
            plan_epoch: 7,
            replicas: Vec::new(),
            num_wanted: 2,
            num_ready: 0,
            has_served: false,
            problem: None,
            failed_attempts: 0,
        };
        let (probe, models, _workers) = probe();
        models.send_replace(Arc::new([("m".to_owned(), Arc::new(model))].into()));
        for _ in 0..3 {
            let text = probe.metrics();
            assert!(text.contains("lockstep_coordinator_replicas{model=\"m\",state=\"ready\"} 0"), "{text}");
            assert!(text.contains("lockstep_coordinator_wanted_replicas{model=\"m\"} 2"), "{text}");
            assert!(text.contains("lockstep_coordinator_plan_epoch{model=\"m\"} 7"), "{text}");
        }
        models.send_replace(ModelTable::default());
        let text = probe.metrics();
        assert!(!text.contains("model=\"m\"") && text.contains("lockstep_coordinator_live_workers 0"), "{text}");
    }
}
