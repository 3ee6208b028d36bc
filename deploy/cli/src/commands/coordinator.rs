//! `lockstep coordinator`: flags and file → `CoordinatorConfig`.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use anyhow::Context;
use lockstep_coordinator::{
    CoordinatorConfig,
    config::{ModelSpec, default_model_name},
};
use lockstep_model::source::shown;
use lockstep_sharding::PlanOptions;
use lockstep_transport::TlsFiles;
use serde::{Deserialize, Serialize};

use super::{
    plan::parse_policy,
    worker::{seconds, seconds_or_never},
};
use crate::{
    UsageError, settings, signals,
    tls::{ClusterTlsArgs, EtcdArgs, ServerTlsArgs},
};

/// Run a coordinator: workers register with it, clients send it their requests.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Serve a model over four workers, two-way tensor parallel in each of two replicas:
  lockstep coordinator --model /models/m.gguf --min-workers 4 --policy tensor=2,replicas=2
Talk to it with any client of OpenAI's API:
  curl localhost:7080/v1/chat/completions -H 'content-type: application/json' \\
      -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'
Serve other machines, with certificates for clients and workers:
  lockstep coordinator --tls-cert server.pem --tls-key server.key \\
      --cluster-ca ca.pem --cluster-cert member.pem --cluster-key member.key
One of several coordinators of a cluster, each with its own clients:
  lockstep coordinator --etcd https://etcd-a:2379,https://etcd-b:2379 --etcd-ca etcd-ca.pem --model /models/m.gguf
Settings from a file and the environment:
  LOCKSTEP_GRPC_LISTEN=127.0.0.1:9070 lockstep coordinator --config lockstep.toml")]
pub struct Args {
    #[command(flatten)]
    settings: Settings,
    /// TOML file whose section [coordinator] holds the settings above, named with underscores
    #[arg(long, env = "LOCKSTEP_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Write the bound addresses here as JSON once the coordinator listens
    #[arg(long, value_name = "FILE")]
    ready_file: Option<PathBuf>,
    /// Stop when standard input closes (set by `up`, so that the coordinator ends with it)
    #[arg(long)]
    exit_on_stdin_close: bool,
}

/// What can be set by file, environment and flag.
#[derive(Debug, Default, clap::Args, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    /// gRPC address [default: port 7070 on all addresses; without --tls-cert and --insecure, on this machine only]
    #[arg(long, env = "LOCKSTEP_GRPC_LISTEN", value_name = "ADDRESS:PORT")]
    grpc_listen: Option<SocketAddr>,
    /// HTTP address: OpenAI API, status page, health, metrics [default: as --grpc-listen, port 7080]
    #[arg(long, env = "LOCKSTEP_HTTP_LISTEN", value_name = "ADDRESS:PORT")]
    http_listen: Option<SocketAddr>,
    /// Name of this coordinator, unique in the cluster [default: coordinator-<random>]
    #[arg(long, env = "LOCKSTEP_COORDINATOR_ID", value_name = "NAME")]
    coordinator_id: Option<String>,
    #[command(flatten)]
    #[serde(flatten)]
    etcd: EtcdArgs,
    /// Model to serve: a path on the workers, or the URL (https://, s3://, gs://, az://) of a GGUF file that they read
    /// where it lies
    #[arg(long, env = "LOCKSTEP_MODEL", value_name = "PATH")]
    model: Option<String>,
    /// Name of the model for clients [default: the file's name without extension]
    #[arg(long, env = "LOCKSTEP_MODEL_NAME", value_name = "NAME")]
    model_name: Option<String>,
    /// How to cut the model: auto, tensor=N, pipeline=N, hybrid=TPxPP, replicas=N [default: auto]
    #[arg(long, env = "LOCKSTEP_POLICY")]
    policy: Option<String>,
    /// Make the first plan only when so many workers are there [default: 1]
    #[arg(long, env = "LOCKSTEP_MIN_WORKERS", value_name = "N")]
    min_workers: Option<usize>,
    /// Make it with fewer when none has come or gone for so long; 0: never [default: 300]
    #[arg(long, env = "LOCKSTEP_MIN_WORKERS_TIMEOUT_SECS", value_name = "SECONDS")]
    min_workers_timeout_secs: Option<f64>,
    /// Revision of these settings: where coordinators of a cluster want its model otherwise, those with the higher revision
    /// count, of equal ones the coordinator that was the last to reach etcd after its start [default: 0]
    #[arg(long, env = "LOCKSTEP_SETTINGS_REVISION", value_name = "N")]
    settings_revision: Option<u64>,
    /// How long workers that came have to stay before a model that is served is planned anew to use them; 0: it never is
    /// [default: 30]
    #[arg(long, env = "LOCKSTEP_REPLAN_DELAY_SECS", value_name = "SECONDS")]
    replan_delay_secs: Option<f64>,
    /// Longest sequence served, prompt and output together [default: the model's]
    #[arg(long, env = "LOCKSTEP_MAX_SEQUENCE_TOKENS", value_name = "N")]
    max_sequence_tokens: Option<usize>,
    /// Most sequences in one step [default: 64]
    #[arg(long, env = "LOCKSTEP_MAX_NUM_SEQUENCES", value_name = "N")]
    max_num_sequences: Option<usize>,
    /// Most tokens in one step [default: 2048 on GPUs alone, 512 where a processor takes part, fewer where they would keep the
    /// slowest device for more than two seconds]
    #[arg(long, env = "LOCKSTEP_MAX_STEP_TOKENS", value_name = "N")]
    max_step_tokens: Option<usize>,
    /// Tokens in a KV block [default: 32]
    #[arg(long, env = "LOCKSTEP_BLOCK_SIZE", value_name = "N")]
    block_size: Option<usize>,
    /// KV blocks of a replica [default: all memory that is free, up to what --max-num-sequences need]
    #[arg(long, env = "LOCKSTEP_NUM_KV_BLOCKS", value_name = "N")]
    num_kv_blocks: Option<usize>,
    /// A worker is lost when it was silent for so long [default: 2]
    #[arg(long, env = "LOCKSTEP_LEASE_SECS", value_name = "SECONDS")]
    lease_secs: Option<f64>,
    /// Most requests at once; one more is refused as overloaded [default: 1024]
    #[arg(long, env = "LOCKSTEP_MAX_CONCURRENT_REQUESTS", value_name = "N")]
    max_concurrent_requests: Option<usize>,
    /// Tenants with their API keys and limits, TOML; followed when it changes [default: no keys, no limits]
    #[arg(long, env = "LOCKSTEP_TENANTS", value_name = "FILE")]
    tenants: Option<PathBuf>,
    /// Folder made by browser/build.sh: serve the page /browser, which computes in the visitor's browser, and to it the
    /// files of the models, as far as this machine has them [default: neither is served]
    #[arg(long, env = "LOCKSTEP_BROWSER_DIR", value_name = "FOLDER")]
    browser_dir: Option<PathBuf>,
    /// How long a request without a deadline waits for another replica when its own breaks [default: 60]
    #[arg(long, env = "LOCKSTEP_FAILOVER_TIMEOUT_SECS", value_name = "SECONDS")]
    failover_timeout_secs: Option<f64>,
    /// A request is given up when its client takes no message for so long [default: 60]
    #[arg(long, env = "LOCKSTEP_SLOW_READER_TIMEOUT_SECS", value_name = "SECONDS")]
    slow_reader_timeout_secs: Option<f64>,
    /// Longest time that running requests have at shutdown [default: 30]
    #[arg(long, env = "LOCKSTEP_DRAIN_TIMEOUT_SECS", value_name = "SECONDS")]
    drain_timeout_secs: Option<f64>,
    #[command(flatten)]
    #[serde(flatten)]
    server_tls: ServerTlsArgs,
    #[command(flatten)]
    #[serde(flatten)]
    cluster_tls: ClusterTlsArgs,
}

/// Where a coordinator listens, as its ready file says it.
#[derive(Debug, Deserialize, Serialize)]
pub struct Addresses {
    /// gRPC, host:port.
    pub grpc: SocketAddr,
    /// HTTP, host:port.
    pub http: SocketAddr,
}

/// Runs a coordinator until it is told to stop.
///
/// # Errors
/// If a setting is wrong or the coordinator cannot start.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let settings = settings::layered(&args.settings, args.config.as_deref(), "coordinator")?;
    let config = settings.into_config()?;
    announce(&config);
    let shutdown = signals::shutdown_token(args.exit_on_stdin_close)?;
    let mut written = Ok(());
    let ready = |grpc, http| {
        tracing::info!(%grpc, %http, "listening");
        if let Some(path) = &args.ready_file {
            written = write_json(path, &Addresses { grpc, http });
            if written.is_err() {
                shutdown.cancel();
            }
        }
    };
    lockstep_coordinator::run(config, shutdown.clone(), ready).await?;
    written
}

/// Says what the settings come to.
fn announce(config: &CoordinatorConfig) {
    let model = config.model.as_ref();
    tracing::info!(
        coordinator_id = config.coordinator_id,
        model = model.map(|model| &*model.name),
        source = model.map(|model| shown(&model.source)),
        policy = model.map(|model| tracing::field::display(model.policy)),
        min_workers = model.map(|model| model.min_workers),
        etcd = config.etcd.as_ref().map(|etcd| etcd.endpoints.join(",")),
        tenants = config.tenants_file.as_ref().map(|path| tracing::field::display(path.display())),
        clients = if config.client_tls.is_some() { "TLS" } else { "clear text" },
        members = if config.cluster_tls.is_some() { "TLS" } else { "clear text" },
        "starting a coordinator"
    );
    tracing::debug!(?config, "all settings");
}

/// What a coordinator with these flags and this settings file shows to clients.
///
/// # Errors
/// If a setting is wrong.
pub fn server_tls(flags: &ServerTlsArgs, config: Option<&Path>) -> anyhow::Result<Option<TlsFiles>> {
    let flags = Settings { server_tls: flags.clone(), ..Settings::default() };
    Ok(settings::layered(&flags, config, "coordinator")?.server_tls.files()?)
}

/// Writes a JSON file that appears whole or not at all.
///
/// # Errors
/// If it cannot be written, with its path.
pub fn write_json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    std::fs::write(&partial, text)
        .and_then(|()| std::fs::rename(&partial, path))
        .with_context(|| format!("ready file {}", path.display()))
}

impl Settings {
    fn into_config(self) -> Result<CoordinatorConfig, UsageError> {
        let policy = parse_policy(self.policy.as_deref().unwrap_or("auto"))?;
        let min_workers = self.min_workers.unwrap_or(1);
        let model_name = self.model_name;
        let options = PlanOptions::default();
        let plan_options = PlanOptions {
            block_size: self.block_size.unwrap_or(options.block_size),
            max_sequence_tokens: self.max_sequence_tokens.or(options.max_sequence_tokens),
            max_num_sequences: self.max_num_sequences.unwrap_or(options.max_num_sequences),
            max_step_tokens: self.max_step_tokens.or(options.max_step_tokens),
            num_kv_blocks: self.num_kv_blocks.or(options.num_kv_blocks),
        };
        let model = self.model.map(|source| ModelSpec {
            name: model_name.unwrap_or_else(|| default_model_name(&source)),
            source,
            policy,
            min_workers,
            plan_options,
        });
        let min_workers_timeout =
            seconds_or_never("min_workers_timeout_secs", self.min_workers_timeout_secs.unwrap_or(300.0))?;
        let replan_delay = seconds_or_never("replan_delay_secs", self.replan_delay_secs.unwrap_or(30.0))?;
        let client_tls = self.server_tls.files()?;
        let allow_insecure = self.cluster_tls.allow_insecure();
        let is_open = client_tls.is_some() || allow_insecure;
        let any_ip = IpAddr::from(if is_open { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST });
        let grpc_listen = self.grpc_listen.unwrap_or_else(|| SocketAddr::new(any_ip, 7070));
        Ok(CoordinatorConfig {
            grpc_listen,
            http_listen: self.http_listen.unwrap_or_else(|| SocketAddr::new(grpc_listen.ip(), 7080)),
            coordinator_id: self
                .coordinator_id
                .unwrap_or_else(|| format!("coordinator-{:08x}", uuid::Uuid::new_v4().as_fields().0)),
            etcd: self.etcd.settings(allow_insecure)?,
            model,
            settings_revision: self.settings_revision.unwrap_or(0),
            plan_options,
            min_workers_timeout,
            replan_delay,
            lease: seconds("lease_secs", self.lease_secs.unwrap_or(2.0))?,
            max_concurrent_requests: self.max_concurrent_requests.unwrap_or(1024),
            tenants_file: self.tenants,
            browser_folder: self.browser_dir,
            failover_timeout: seconds("failover_timeout_secs", self.failover_timeout_secs.unwrap_or(60.0))?,
            slow_reader_timeout: seconds("slow_reader_timeout_secs", self.slow_reader_timeout_secs.unwrap_or(60.0))?,
            drain_timeout: seconds("drain_timeout_secs", self.drain_timeout_secs.unwrap_or(30.0))?,
            client_tls,
            cluster_tls: self.cluster_tls.files()?,
            allow_insecure,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coordinator_listens_beyond_this_machine_only_if_asked() {
        let listens = |settings: Settings| {
            let config = settings.into_config().unwrap();
            [config.grpc_listen.to_string(), config.http_listen.to_string()]
        };
        assert_eq!(listens(Settings::default()), ["127.0.0.1:7070", "127.0.0.1:7080"]);
        let read = |text: &str| toml::from_str::<Settings>(text).unwrap();
        let insecure = || read("insecure = true");
        assert_eq!(listens(insecure()), ["0.0.0.0:7070", "0.0.0.0:7080"]);
        let grpc_listen = Some("127.0.0.1:9070".parse().unwrap());
        assert_eq!(listens(Settings { grpc_listen, ..insecure() }), ["127.0.0.1:9070", "127.0.0.1:7080"]);
        assert_eq!(listens(read("tls_cert = \"x\"\ntls_key = \"x\""))[0], "0.0.0.0:7070");
    }

    #[test]
    fn an_unknown_key_is_named() {
        let error = toml::from_str::<Settings>("etcd_ca = \"x\"\ncluster_crt = \"x\"").unwrap_err().to_string();
        assert!(error.contains("cluster_crt"), "{error}");
    }

    #[test]
    fn a_ready_file_appears_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ready.json");
        let addresses = Addresses { grpc: ([127, 0, 0, 1], 1).into(), http: ([127, 0, 0, 1], 2).into() };
        write_json(&path, &addresses).unwrap();
        let read: Addresses = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!((read.grpc, read.http), (addresses.grpc, addresses.http));
        assert!(write_json(&folder.path().join("no/ready.json"), &addresses).is_err());
    }
}
