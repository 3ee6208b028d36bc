//! Settings of a coordinator process.

use std::{ffi::OsStr, fmt, net::SocketAddr, path::Path, time::Duration};

use lockstep_etcd::EtcdSettings;
use lockstep_model::source::shown;
use lockstep_sharding::{PlanOptions, Policy};
use lockstep_transport::TlsFiles;

/// Checked settings.
#[derive(Clone, Debug)]
pub struct CoordinatorConfig {
    /// gRPC address (default port 7070; 0: any).
    pub grpc_listen: SocketAddr,
    /// HTTP address (default port 7080; 0: any).
    pub http_listen: SocketAddr,
    /// Name of this coordinator among those of the cluster.
    pub coordinator_id: String,
    /// Where workers are found and the plan is kept, for several coordinators; without it workers register here.
    pub etcd: Option<EtcdSettings>,
    /// Model to load at start.
    pub model: Option<ModelSpec>,
    /// Of these settings: where coordinators share a registry and want a model otherwise, the higher one counts, of equal
    /// ones the coordinator that was the last to reach it after its start.
    pub settings_revision: u64,
    /// Sizes that plans of models leave room for that are loaded by an order.
    pub plan_options: PlanOptions,
    /// How long no worker has to come or go before a first plan is made without the `min_workers` of its model; `None`: it
    /// never is.
    pub min_workers_timeout: Option<Duration>,
    /// Workers that came have to stay so long before a model that is served is planned anew to use them; `None`: it never is.
    pub replan_delay: Option<Duration>,
    /// A worker is lost when no heartbeat came for so long.
    pub lease: Duration,
    /// Most requests in the coordinator at once; one more is refused as overloaded.
    pub max_concurrent_requests: usize,
    /// Who may use it, and how much; without it everybody, without limits.
    pub tenants_file: Option<std::path::PathBuf>,
    /// Files of the page `/browser`, which is then served, and the models' files to it.
    pub browser_folder: Option<std::path::PathBuf>,
    /// Longest wait of a request without a deadline for another replica, when its own breaks.
    pub failover_timeout: Duration,
    /// Longest time that a message may wait for its client to take it; then the request is given up.
    pub slow_reader_timeout: Duration,
    /// Longest drain at shutdown.
    pub drain_timeout: Duration,
    /// Certificate and key for clients, and the authorities of theirs if they need one; `None`: clear text.
    pub client_tls: Option<TlsFiles>,
    /// Certificate, key and authority of this member of the cluster; `None`: clear text between members.
    pub cluster_tls: Option<TlsFiles>,
    /// Clear text is spoken with other machines too.
    pub allow_insecure: bool,
}

/// A model to serve.
#[derive(Clone, PartialEq, Eq)]
pub struct ModelSpec {
    /// Name for clients.
    pub name: String,
    /// Path on the workers, or a URL that they read; that may hold a secret and is shown by [`shown`] only.
    pub source: String,
    /// How to cut it.
    pub policy: Policy,
    /// Make the first plan only when so many workers are there.
    pub min_workers: usize,
    /// Sizes that plans leave room for.
    pub plan_options: PlanOptions,
}

impl fmt::Debug for ModelSpec {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, source, policy, min_workers, plan_options } = self;
        let mut shown_spec = formatter.debug_struct("ModelSpec");
        shown_spec.field("name", name).field("source", &shown(source)).field("policy", policy);
        shown_spec.field("min_workers", min_workers).field("plan_options", plan_options).finish()
    }
}

/// The name under which a model is served if none is given: the file's or folder's, without the ending of a format.
pub fn default_model_name(source: &str) -> String {
    let source = shown(source);
    let path = Path::new(&source);
    let is_format = |ending: &OsStr| ending == "gguf" || ending == "safetensors";
    let name = if path.extension().is_some_and(is_format) { path.file_stem() } else { path.file_name() };
    name.map_or_else(|| source.clone(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_named_after_its_file_and_shown_without_secrets() {
        let names = [
            ("/models/SmolLM2-135M.Q4_1.gguf", "SmolLM2-135M.Q4_1"),
            ("/models/Llama-3.1-8B/", "Llama-3.1-8B"),
            ("https://user:secret@h/x@y.gguf?sig=a/secret.gguf", "x@y"),
        ];
        for (source, name) in names {
            assert_eq!(default_model_name(source), name);
        }
        let (source, policy) = (names[2].0.to_owned(), Policy::AUTO);
        let spec = ModelSpec { name: "m".into(), source, policy, min_workers: 1, plan_options: PlanOptions::default() };
        assert!(!format!("{spec:?}").contains("secret"), "{spec:?}");
    }
}
