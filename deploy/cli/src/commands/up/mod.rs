//! `lockstep up`: a coordinator and its workers as child processes, the embedded default.

mod child;
mod cluster;
mod layout;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context;
use lockstep_coordinator::config::default_model_name;
use lockstep_model::source::is_remote;
use lockstep_proto::v1::LoadModelRequest;
use lockstep_sharding::Dtype;
use lockstep_worker::devices::{DeviceSelection, DeviceSettings, LocalDevices};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use self::{cluster::Cluster, layout::Layout};
use super::{
    coordinator::{Addresses, server_tls, write_json},
    worker::{devices_in, is_on},
};
use crate::{
    UsageError,
    client::{ApiKey, ServerArgs},
    devices::DeviceArgs,
    logging::LogSettings,
    signals,
    tls::ServerTlsArgs,
};

/// Longest wait for a child to listen or to register.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// Start a coordinator and workers on this machine and serve a model until Ctrl-C. A worker that ends is started again.
/// Children log warnings only, unless --log says more.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Two workers, tensor parallel (the default cut over the workers):
  lockstep up --model model.gguf --workers 2
Two GPUs that share each layer:
  lockstep up --model model.gguf --device cuda:0,cuda:1
Two replicas of two pipeline stages each, one thread a worker:
  lockstep up --model model.gguf --pipeline-parallel 2 --replicas 2 --threads-per-worker 1
Clients of other machines, with TLS:
  lockstep up --model model.gguf --host 0.0.0.0 --tls-cert server.pem --tls-key server.key")]
pub struct Args {
    /// Model file or folder, or the URL (https://, s3://, gs://, az://) of a GGUF file that workers read where it lies
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Name of the model for clients [default: the file's name without extension]
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,
    #[command(flatten)]
    layout: layout::LayoutArgs,
    #[command(flatten)]
    devices: DeviceArgs,
    /// Keep the KV blocks of finished requests for others that begin with the same tokens: on or off [default: on]
    #[arg(long, env = "LOCKSTEP_PREFIX_CACHING", value_name = "ON|OFF")]
    prefix_caching: Option<String>,
    /// Threads of each worker on the processor [default: all cores divided by the workers]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    threads_per_worker: Option<u64>,
    /// Address to listen on; 0.0.0.0 serves other machines too
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: std::net::IpAddr,
    #[command(flatten)]
    server_tls: ServerTlsArgs,
    /// Speak clear text with other machines too, as --host makes it without --tls-cert
    #[arg(long, env = "LOCKSTEP_INSECURE")]
    insecure: bool,
    /// Port of the gRPC service; 0: any
    #[arg(long, default_value_t = 7070, value_name = "PORT")]
    grpc_port: u16,
    /// Port of the HTTP service; 0: any
    #[arg(long, default_value_t = 7080, value_name = "PORT")]
    http_port: u16,
    /// Write addresses and process ids here as JSON once the model serves
    #[arg(long, value_name = "FILE")]
    ready_file: Option<PathBuf>,
    /// Tenants with their API keys and limits, TOML [default: no keys, no limits]
    #[arg(long, value_name = "FILE")]
    tenants: Option<PathBuf>,
    /// Folder made by browser/build.sh: serve the page /browser, which computes in the visitor's browser, and to it the
    /// model's file
    #[arg(long, value_name = "FOLDER")]
    browser_dir: Option<PathBuf>,
    /// API key of an administrator, to load the model where there are tenants
    #[arg(long, env = "LOCKSTEP_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<ApiKey>,
    /// TOML file with sections [coordinator] and [worker] for everything else
    #[arg(long, env = "LOCKSTEP_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Stop when standard input closes
    #[arg(long)]
    exit_on_stdin_close: bool,
}

/// What the ready file says.
#[derive(Serialize)]
struct Ready<'a> {
    model: &'a str,
    #[serde(flatten)]
    addresses: &'a Addresses,
    coordinator_pid: u32,
    worker_pids: Vec<u32>,
}

/// Starts the cluster, serves, and stops it.
///
/// # Errors
/// If the model does not exist, a child ends at start, or the model cannot be loaded.
pub async fn run(args: Args, log: &LogSettings) -> anyhow::Result<()> {
    let devices = args.devices.clone().or(devices_in(args.config.as_deref())?);
    let dtype = devices.dtype()?;
    args.prefix_caching.as_deref().map(|value| is_on("prefix_caching", value)).transpose()?;
    let choose = |selection, num_ranks| choose_automatically(selection, num_ranks, dtype);
    let layout = args.layout.layout(devices.selection()?, &choose)?;
    let model = if is_remote(&args.model) { Ok(args.model.clone()) } else { args.model.canonicalize() };
    let model = model.with_context(|| format!("model {}", args.model.display()))?;
    if let Some(path) = args.ready_file.as_deref().filter(|path| path.exists()) {
        std::fs::remove_file(path).with_context(|| format!("old ready file {}", path.display()))?;
    }
    let shutdown = signals::shutdown_token(args.exit_on_stdin_close)?;
    let folder = TemporaryFolder::new()?;
    let listening = folder.0.join("coordinator.json");
    let mut cluster = Cluster::start(&args.coordinator_arguments(&listening), log.or_filter("warn"))?;
    let result = args.serve(&layout, &model, &listening, &mut cluster, &shutdown).await;
    if let Some(path) = &args.ready_file {
        // It may not have been written.
        let _ = std::fs::remove_file(path);
    }
    cluster.stop().await;
    result
}

/// The devices for so many ranks, and why.
fn choose_automatically(
    selection: DeviceSelection,
    num_ranks: usize,
    dtype: Option<Dtype>,
) -> Result<(DeviceSelection, String), UsageError> {
    let settings = DeviceSettings { selection, num_cpu_devices: num_ranks, dtype, ..DeviceSettings::default() };
    let devices = LocalDevices::choose(settings, num_ranks).map_err(|error| usage(error.to_string()))?;
    Ok((devices.selection(), devices.reason().to_owned()))
}

impl Args {
    fn coordinator_arguments(&self, listening: &Path) -> Vec<String> {
        let mut arguments = vec![
            String::from("coordinator"),
            format!("--grpc-listen={}", std::net::SocketAddr::new(self.host, self.grpc_port)),
            format!("--http-listen={}", std::net::SocketAddr::new(self.host, self.http_port)),
            format!("--ready-file={}", listening.display()),
        ];
        arguments.extend(self.server_tls.arguments());
        arguments.extend(self.insecure.then(|| String::from("--insecure")));
        arguments.extend(self.tenants.as_ref().map(|path| format!("--tenants={}", path.display())));
        arguments.extend(self.browser_dir.as_ref().map(|path| format!("--browser-dir={}", path.display())));
        arguments.extend(self.config.as_ref().map(|path| format!("--config={}", path.display())));
        arguments
    }

    fn worker_arguments(&self, index: usize, layout: &Layout, coordinator: &str) -> Vec<String> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self.threads_per_worker.unwrap_or((cores / layout.num_workers).max(1) as u64);
        let mut arguments = vec![
            String::from("worker"),
            format!("--worker-id=worker-{index}"),
            format!("--coordinator={coordinator}"),
            format!("--threads-per-device={threads}"),
            format!("--device={}", layout.device_of(index)),
        ];
        arguments.extend(layout.reason.as_ref().map(|reason| format!("--device-reason={reason}")));
        arguments.extend(self.prefix_caching.as_ref().map(|value| format!("--prefix-caching={value}")));
        arguments.extend(self.devices.dtype.as_ref().map(|dtype| format!("--dtype={dtype}")));
        arguments.extend(self.config.as_ref().map(|path| format!("--config={}", path.display())));
        arguments
    }

    /// Brings the cluster up and watches it until `shutdown`.
    async fn serve(
        &self,
        layout: &Layout,
        model: &Path,
        listening: &Path,
        cluster: &mut Cluster,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<()> {
        let addresses: Addresses = tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            addresses = cluster.wait_for_addresses(listening) => addresses?,
        };
        let reachable = if addresses.grpc.ip().is_unspecified() {
            format!("127.0.0.1:{}", addresses.grpc.port())
        } else {
            addresses.grpc.to_string()
        };
        for index in 0..layout.num_workers {
            let arguments = self.worker_arguments(index, layout, &reachable);
            cluster.start_worker(&format!("worker-{index}"), arguments)?;
        }
        let name = self.model_name.clone().unwrap_or_else(|| default_model_name(&model.to_string_lossy()));
        let request = LoadModelRequest {
            name: name.clone(),
            source: model.to_string_lossy().into(),
            policy: layout.policy.clone(),
        };
        let files = server_tls(&self.server_tls, self.config.as_deref())?;
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            loaded = load(ServerArgs::own(reachable, files, self.api_key.clone()), layout.num_workers, request) => loaded?,
            error = cluster.first_end() => return Err(error),
        }
        let write_ready = |cluster: &Cluster| match &self.ready_file {
            Some(path) => {
                let (coordinator_pid, worker_pids) = cluster.pids();
                write_json(path, &Ready { model: &name, addresses: &addresses, coordinator_pid, worker_pids })
            }
            None => Ok(()),
        };
        write_ready(cluster)?;
        eprintln!("serving {name}: gRPC {}, HTTP {}; Ctrl-C stops", addresses.grpc, addresses.http);
        tokio::select! {
            () = shutdown.cancelled() => Ok(()),
            error = cluster.keep_up(write_ready) => Err(error),
        }
    }
}

/// Waits for the workers to register, then loads the model and draws its progress.
async fn load(server: ServerArgs, num_workers: usize, request: LoadModelRequest) -> anyhow::Result<()> {
    let mut admin = server.admin().await?;
    let registered = async {
        loop {
            let cluster = server.cluster(&mut admin).await?;
            if cluster.workers.len() >= num_workers {
                return anyhow::Ok(());
            }
            tokio::time::sleep(POLL).await;
        }
    };
    tokio::time::timeout(START_TIMEOUT, registered)
        .await
        .map_err(|_| anyhow::anyhow!("not all of {num_workers} workers registered within {START_TIMEOUT:?}"))??;
    super::load::follow(&mut admin, request).await
}

/// A folder of this process, removed when dropped.
struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    fn new() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("lockstep-up-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&path).with_context(|| format!("folder {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // Only a file of a few bytes is left behind if this fails.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A combination of flags that cannot be.
fn usage(problem: String) -> UsageError {
    UsageError(problem)
}
