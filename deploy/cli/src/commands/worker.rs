//! `lockstep worker`: flags and file → `WorkerConfig`.

use std::{
    net::{Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use lockstep_worker::{WorkerConfig, config::RegistryAddress, devices::DeviceSettings};
use serde::{Deserialize, Serialize};

use crate::{
    UsageError,
    devices::DeviceArgs,
    settings, signals,
    tls::{ClusterTlsArgs, EtcdArgs},
    units::ByteSize,
};

/// Run a worker: it offers this machine's devices to a coordinator and runs the parts of models that it is given.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Offer this machine's processor to the coordinator on host-a:
  lockstep worker --coordinator host-a:7070 --advertise-host host-b \\
      --cluster-ca ca.pem --cluster-cert member.pem --cluster-key member.key
Two GPUs, a rank each:
  lockstep worker --device cuda:0,cuda:1
One of a cluster with several coordinators, which find it in etcd:
  lockstep worker --etcd https://etcd-a:2379,https://etcd-b:2379 --etcd-ca etcd-ca.pem --advertise-host host-b
Two devices of four threads each, settings from a file:
  lockstep worker --config lockstep.toml --device cpu --num-devices 2 --threads-per-device 4")]
pub struct Args {
    #[command(flatten)]
    settings: Settings,
    /// TOML file whose section [worker] holds the settings above, named with underscores
    #[arg(long, env = "LOCKSTEP_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Why --device names these devices (set by `up`, which chose them)
    #[arg(long, hide = true)]
    device_reason: Option<String>,
    /// Stop when standard input closes (set by `up`, so that workers end with it)
    #[arg(long)]
    exit_on_stdin_close: bool,
}

/// What can be set by file, environment and flag.
#[derive(Debug, Default, clap::Args, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    /// Name of this worker, unique in the cluster [default: worker-<random>]
    #[arg(long, env = "LOCKSTEP_WORKER_ID", value_name = "NAME")]
    worker_id: Option<String>,
    /// gRPC address of the coordinator [default: 127.0.0.1:7070]
    #[arg(long, env = "LOCKSTEP_COORDINATOR", value_name = "HOST:PORT")]
    coordinator: Option<String>,
    #[command(flatten)]
    #[serde(flatten)]
    etcd: EtcdArgs,
    /// Host name or address under which the coordinator and other workers reach this worker [default: 127.0.0.1]
    #[arg(long, env = "LOCKSTEP_ADVERTISE_HOST", value_name = "HOST")]
    advertise_host: Option<String>,
    /// Where the gRPC service listens [default: any port; on this machine only, unless --advertise-host is given]
    #[arg(long, env = "LOCKSTEP_WORKER_LISTEN", value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Where links from other ranks are accepted [default: as --listen, another port]
    #[arg(long, env = "LOCKSTEP_RANK_LISTEN", value_name = "ADDRESS:PORT")]
    rank_listen: Option<SocketAddr>,
    /// Where /healthz, /readyz and /metrics are served over HTTP, with --cluster-cert over HTTPS [default: any port, on this machine only; the
    /// coordinator's /prometheus/workers lists where it can be reached]
    #[arg(long, env = "LOCKSTEP_WORKER_HTTP_LISTEN", value_name = "ADDRESS:PORT")]
    http_listen: Option<SocketAddr>,
    #[command(flatten)]
    #[serde(flatten)]
    devices: DeviceArgs,
    /// Folder of compiled GPU kernels, shared by workers; it may be deleted at any time [default: lockstep/kernels in $XDG_CACHE_HOME or ~/.cache]
    #[arg(long, env = "LOCKSTEP_KERNEL_CACHE", value_name = "FOLDER")]
    kernel_cache: Option<PathBuf>,
    /// Devices (ranks) to make of the processor, where it is used [default: 1]
    #[arg(long, env = "LOCKSTEP_NUM_DEVICES", value_name = "N")]
    num_devices: Option<usize>,
    /// Threads of each of them [default: all cores divided by the devices]
    #[arg(long, env = "LOCKSTEP_THREADS_PER_DEVICE", value_name = "N")]
    threads_per_device: Option<usize>,
    /// Memory for weights, KV blocks and activations of all devices, such as 16GiB [default: 90 % of what is free at
    /// start, of a GPU or of the machine; what workers of one host claim of it beyond what it has is divided among them]
    #[arg(long, env = "LOCKSTEP_MEMORY", value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Longest wait for the other ranks that share a layer, inside a step [default: 30]
    #[arg(long, env = "LOCKSTEP_COLLECTIVE_TIMEOUT_SECS", value_name = "SECONDS")]
    collective_timeout_secs: Option<f64>,
    /// Most sequences that wait in an engine; one more is refused as overloaded [default: 256]
    #[arg(long, env = "LOCKSTEP_MAX_WAITING_SEQUENCES", value_name = "N")]
    max_waiting_sequences: Option<usize>,
    /// Keep the KV blocks of finished requests for others that begin with the same tokens: on or off [default: on]
    #[arg(long, env = "LOCKSTEP_PREFIX_CACHING", value_name = "ON|OFF")]
    prefix_caching: Option<String>,
    /// Longest time that running requests have at shutdown [default: 30]
    #[arg(long, env = "LOCKSTEP_DRAIN_TIMEOUT_SECS", value_name = "SECONDS")]
    drain_timeout_secs: Option<f64>,
    #[command(flatten)]
    #[serde(flatten)]
    cluster_tls: ClusterTlsArgs,
}

/// Runs a worker until it is told to stop.
///
/// # Errors
/// If a setting is wrong or the worker fails.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let settings = settings::layered(&args.settings, args.config.as_deref(), "worker")?;
    let mut config = settings.into_config()?;
    config.devices.reason = args.device_reason;
    let registry = match &config.registry {
        RegistryAddress::Coordinator(address) => address.clone(),
        RegistryAddress::Etcd(settings) => settings.endpoints.join(","),
    };
    let members = if config.cluster_tls.is_some() { "TLS" } else { "clear text" };
    let (worker_id, advertise_host) = (&config.worker_id, &config.advertise_host);
    tracing::info!(worker_id, registry, advertise_host, members, "starting a worker");
    tracing::debug!(?config, "all settings");
    let shutdown = signals::shutdown_token(args.exit_on_stdin_close)?;
    Ok(lockstep_worker::run(config, shutdown).await?)
}

/// Seconds as a duration, or what is wrong with them.
pub fn seconds(name: &str, value: f64) -> Result<Duration, UsageError> {
    Duration::try_from_secs_f64(value)
        .ok()
        .filter(|duration| !duration.is_zero())
        .ok_or_else(|| UsageError(format!("{name}: {value} is not a number of seconds above 0")))
}

/// The same, where 0 stands for never.
pub fn seconds_or_never(name: &str, value: f64) -> Result<Option<Duration>, UsageError> {
    if value == 0.0 { Ok(None) } else { seconds(name, value).map(Some) }
}

/// An address of IPv6 as it stands before a port, also where it came without brackets, as a pod's does.
fn in_brackets(host: String) -> String {
    if host.parse::<Ipv6Addr>().is_ok() { format!("[{host}]") } else { host }
}

/// A switch that is `on` or `off`.
pub fn is_on(name: &str, value: &str) -> Result<bool, UsageError> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(UsageError(format!("{name}: {value:?} is neither on nor off"))),
    }
}

/// The devices that a settings file names for workers.
///
/// # Errors
/// If the file cannot be read or its section \[worker\] is wrong.
pub fn devices_in(file: Option<&Path>) -> anyhow::Result<DeviceArgs> {
    let settings: Settings = settings::layered(&Settings::default(), file, "worker")?;
    Ok(settings.devices)
}

impl Settings {
    fn into_config(self) -> Result<WorkerConfig, UsageError> {
        let any_port = if self.advertise_host.is_some() { [0, 0, 0, 0] } else { [127, 0, 0, 1] };
        let listen = self.listen.unwrap_or_else(|| SocketAddr::from((any_port, 0)));
        let allow_insecure = self.cluster_tls.allow_insecure();
        Ok(WorkerConfig {
            worker_id: self.worker_id.unwrap_or_else(|| format!("worker-{:08x}", uuid::Uuid::new_v4().as_fields().0)),
            registry: match self.etcd.settings(allow_insecure)? {
                Some(_) if self.coordinator.is_some() => {
                    return Err(UsageError(String::from("coordinator and etcd are both given, one of them is needed")));
                }
                Some(settings) => RegistryAddress::Etcd(settings),
                None => {
                    RegistryAddress::Coordinator(self.coordinator.unwrap_or_else(|| String::from("127.0.0.1:7070")))
                }
            },
            listen,
            rank_listen: self.rank_listen.unwrap_or_else(|| SocketAddr::new(listen.ip(), 0)),
            http_listen: self.http_listen.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0))),
            advertise_host: self.advertise_host.map_or_else(|| String::from("127.0.0.1"), in_brackets),
            devices: DeviceSettings {
                selection: self.devices.selection()?,
                reason: None,
                num_cpu_devices: self.num_devices.unwrap_or(1),
                threads_per_device: self.threads_per_device.unwrap_or(0),
                dtype: self.devices.dtype()?,
                kernel_cache: self.kernel_cache.or_else(settings::default_kernel_cache),
            },
            memory_bytes: self.memory.map(|size| size.0),
            collective_timeout: seconds("collective_timeout_secs", self.collective_timeout_secs.unwrap_or(30.0))?,
            max_waiting_sequences: self.max_waiting_sequences.unwrap_or(256),
            is_prefix_caching: is_on("prefix_caching", self.prefix_caching.as_deref().unwrap_or("on"))?,
            drain_timeout: seconds("drain_timeout_secs", self.drain_timeout_secs.unwrap_or(30.0))?,
            cluster_tls: self.cluster_tls.files()?,
            allow_insecure,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_can_stand_before_a_port() {
        let advertised = |host: &str| {
            let settings = Settings { advertise_host: Some(host.to_owned()), ..Settings::default() };
            settings.into_config().unwrap().advertise_host
        };
        for (given, expected) in
            [("fd00::7", "[fd00::7]"), ("[fd00::7]", "[fd00::7]"), ("10.0.0.7", "10.0.0.7"), ("host-b", "host-b")]
        {
            assert_eq!(advertised(given), expected);
        }
    }

    #[test]
    fn a_worker_listens_beyond_this_machine_only_if_asked() {
        let config = Settings::default().into_config().unwrap();
        assert!(config.listen.ip().is_loopback() && config.rank_listen.ip().is_loopback());
        let settings = Settings { advertise_host: Some(String::from("host-b")), ..Settings::default() };
        assert!(settings.into_config().unwrap().listen.ip().is_unspecified());
        let devices = DeviceArgs { dtype: Some(String::from("f8")), ..DeviceArgs::default() };
        let settings = Settings { devices, ..Settings::default() };
        assert!(settings.into_config().unwrap_err().to_string().contains("\"f8\" is none of auto, f16"));
        let settings = Settings { prefix_caching: Some(String::from("no")), ..Settings::default() };
        assert!(
            settings.into_config().unwrap_err().to_string().contains("prefix_caching: \"no\" is neither on nor off")
        );
        let settings = Settings { drain_timeout_secs: Some(-1.0), ..Settings::default() };
        assert!(settings.into_config().unwrap_err().to_string().contains("drain_timeout_secs"));
    }
}
