//! What the worker answers to orchestrators and Prometheus.
//! Invariant: ready is a worker that has loaded what it was given and whose steps come back; one that could not load it is
//! not, for as long as `failures` says. Whether a model serves is the coordinator's answer.

use std::time::SystemTime;

use lockstep_telemetry::{
    http::Probe,
    metrics::render,
    otlp::{self, ExportMetrics},
};

use super::{WorkerState, replicas::PartState};
use crate::config::RegistryAddress;

impl Probe for WorkerState {
    fn readiness(&self) -> Result<(), String> {
        if self.is_draining() {
            return Err("the worker is draining".to_owned());
        }
        if !self.is_registered() {
            let missing = match self.config.registry {
                RegistryAddress::Etcd(_) if self.is_entered() => {
                    "the worker is registered in etcd, but no coordinator has reached it: their logs say why"
                }
                RegistryAddress::Etcd(_) => "the worker is not registered in etcd",
                RegistryAddress::Coordinator(_) => "the worker is not registered with its coordinator",
            };
            return Err(missing.to_owned());
        }
        let states = self.replicas.states();
        if states.contains(&PartState::Loading) {
            return Err("a part of a replica is being loaded".to_owned());
        }
        if states.contains(&PartState::Stalled) {
            return Err("a replica that the worker leads does not answer".to_owned());
        }
        self.replicas.failure().map_or(Ok(()), Err)
    }

    fn metrics(&self) -> String {
        let metrics = &self.metrics;
        metrics.registered.set(f64::from(u8::from(self.is_registered())));
        if let Some(tls) = self.links.tls() {
            let expiry = tls.not_after().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            metrics.certificate_expiry.with_label_values(&["cluster"]).set(expiry.as_secs_f64());
        }
        metrics.draining.set(f64::from(u8::from(self.is_draining())));
        let states = self.replicas.states();
        for state in PartState::ALL {
            let count = states.iter().filter(|found| **found == state).count();
            metrics.replica_parts.with_label_values(&[state.word()]).set(count as f64);
        }
        render(&[Some(metrics.registry()), otlp::metrics().map(ExportMetrics::registry)])
    }
}
