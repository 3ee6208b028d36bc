//! The worker's gRPC service and its life: bind, register, serve, drain.
//!
//! - `grpc`: the service itself. `replicas`: the parts held. `wire`: validation and conversion. `probe`: what HTTP asks.
//! - `followers`: who listens to its heartbeats. `failures`: which loads failed.

mod failures;
mod followers;
mod grpc;
mod probe;
mod replicas;
pub(crate) mod wire;

use std::{
    convert::Infallible,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use lockstep_kernels::device::DeviceInfo;
use lockstep_proto::{
    MAX_MESSAGE_BYTES,
    status::Class,
    v1::{self, worker_server::WorkerServer},
};
use lockstep_sharding::{format_bytes, usable_bytes};
use lockstep_transport::{
    ClusterTls, Gate, Incoming, ServerTls, TlsFiles,
    http::{self, HttpLimits},
    is_local,
};
use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Status, transport::Server};

use self::{followers::Followers, grpc::WorkerService, replicas::Replicas};
use crate::{
    WorkerConfig, WorkerError, collective::LinkListener, config::RegistryAddress, devices::LocalDevices,
    metrics::Metrics, registration::Registration,
};

/// How often the end of a drain is looked for.
const DRAIN_POLL: Duration = Duration::from_millis(50);
/// After the drain timeout, so long the coordinator has to move what still runs and to take the parts back.
const HANDOVER: Duration = Duration::from_secs(3);
/// So long a coordinator that follows the heartbeats no more may only have lost the connection.
const ABSENCE: Duration = Duration::from_secs(3);
/// How long connections may take to close after the drain.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// What the service and the registration share.
pub(crate) struct WorkerState {
    pub config: WorkerConfig,
    pub devices: LocalDevices,
    pub links: Arc<LinkListener>,
    pub replicas: Replicas,
    pub metrics: Arc<Metrics>,
    /// Of this process, for coordinators that find it in etcd.
    pub session: u64,
    /// One token for each running sequence.
    pub running: TaskTracker,
    /// Fires when the service ends.
    pub closing: CancellationToken,
    /// The highest term of a coordinator that was obeyed.
    leader_term: AtomicU64,
    drain_started: OnceLock<Instant>,
    is_registered: AtomicBool,
    /// Coordinators that found it in etcd.
    pub followers: Arc<Followers>,
}

impl WorkerState {
    fn new(config: WorkerConfig, devices: LocalDevices, links: Arc<LinkListener>) -> Result<Self, WorkerError> {
        Ok(Self {
            config,
            devices,
            links,
            replicas: Replicas::default(),
            metrics: Arc::new(Metrics::new()?),
            session: rand::random(),
            running: TaskTracker::new(),
            closing: CancellationToken::new(),
            leader_term: AtomicU64::new(0),
            drain_started: OnceLock::new(),
            is_registered: AtomicBool::new(false),
            followers: Arc::default(),
        })
    }

    /// Lets the coordinator that leads in `term` change what is held here.
    ///
    /// # Errors
    /// `StaleEpoch` if one of a later term was here: whoever asks leads no more and may not know it.
    pub fn obey(&self, term: u64) -> Result<(), Status> {
        let highest = self.leader_term.fetch_max(term, Ordering::SeqCst);
        if term < highest {
            let refusal = format!("leader_term is {term}, but the coordinator of term {highest} leads now");
            return Err(Class::StaleEpoch.status(refusal));
        }
        Ok(())
    }

    /// Whether it is to be relieved of its parts, and gets no new ones.
    pub fn is_draining(&self) -> bool {
        self.drain_started.get().is_some()
    }

    /// Asks to be relieved from now on. Sequences are still taken: coordinators stop to send them when others can.
    pub fn start_draining(&self) {
        self.drain_started.get_or_init(|| {
            tracing::info!(timeout = ?self.config.drain_timeout, "draining");
            Instant::now()
        });
    }

    /// While it drains: how long sequences may still run.
    pub fn drain_left(&self) -> Option<Duration> {
        self.drain_started.get().map(|started| self.config.drain_timeout.saturating_sub(started.elapsed()))
    }

    /// What it holds and how it does.
    pub fn heartbeat(&self) -> v1::Heartbeat {
        let drain_left = self.drain_left();
        v1::Heartbeat {
            replicas: self.replicas.reports(),
            draining: drain_left.is_some(),
            drain_left_ms: drain_left.map_or(0, |left| left.as_millis() as u64),
        }
    }

    /// Whether a coordinator has taken this worker: it holds the registration, or has found it in etcd and reached it.
    pub fn is_registered(&self) -> bool {
        let is_reached = match self.config.registry {
            RegistryAddress::Coordinator(_) => true,
            RegistryAddress::Etcd(_) => self.followers.are_there(ABSENCE),
        };
        self.is_entered() && is_reached
    }

    /// Whether the coordinator, or etcd, holds this worker's registration.
    pub fn is_entered(&self) -> bool {
        self.is_registered.load(Ordering::Relaxed)
    }

    /// Notes whether the coordinator, or etcd, holds this worker's registration.
    pub fn set_registered(&self, is_registered: bool) {
        let was_registered = self.is_registered.swap(is_registered, Ordering::Relaxed);
        if is_registered && !was_registered {
            self.replicas.forget_failures();
        }
    }
}

/// Runs a worker until `shutdown` fires; then drains and returns.
///
/// # Errors
/// [`WorkerError`] if it cannot start or lost its registration for good.
pub async fn run(config: WorkerConfig, shutdown: CancellationToken) -> Result<(), WorkerError> {
    config.check()?;
    let tls = config.cluster_tls.clone().map(ClusterTls::open).transpose()?;
    // Prometheus and orchestrators are no members: they see the certificate and show none.
    let http_files = config.cluster_tls.clone().map(|files| TlsFiles { ca: None, ..files });
    let http_tls = http_files.map(ServerTls::open).transpose()?;
    let (listener, address) = bind(config.listen).await?;
    let (http_listener, http_address) = bind(config.http_listen).await?;
    let links = Arc::new(LinkListener::bind(config.rank_listen, tls.clone())?);
    let (devices, infos) = open_devices(&config).await?;
    check_memory(&config, &devices, &infos)?;
    let addresses = [address, links.local_addr(), http_address];
    let hello = hello(&config, &devices, &infos, addresses);
    let names: Vec<&str> = infos.iter().map(|info| info.name.as_str()).collect();
    let reason = devices.reason();
    tracing::info!(worker_id = config.worker_id, %address, rank_address = %links.local_addr(), %http_address, devices = ?names, reason, "worker listens");

    let state = Arc::new(WorkerState::new(config, devices, links)?);
    let closing = state.closing.clone();
    // However this function is left, the tasks that it started end.
    let _closing_guard = closing.clone().drop_guard();
    if let Some(tls) = tls.clone() {
        tokio::spawn(closing.clone().run_until_cancelled_owned(tls.watch()));
    }
    if let Some(tls) = http_tls.clone() {
        tokio::spawn(closing.clone().run_until_cancelled_owned(tls.watch()));
    }
    let incoming = Incoming::new(listener, Gate::Members(tls.clone()));
    let mut server = tokio::spawn(serve(state.clone(), incoming));
    let http_incoming = Incoming::new(http_listener, Gate::Http(http_tls));
    let routes = lockstep_telemetry::http::routes(Arc::clone(&state) as _);
    let mut probes = tokio::spawn(http::serve(http_incoming, routes, HttpLimits::DEFAULT, closing.clone()));
    let mut registration = Registration::start(state.clone(), hello, tls)?;

    let outcome = tokio::select! {
        () = shutdown.cancelled() => {
            state.start_draining();
            drain(&state).await;
            Ok(())
        }
        error = registration.lost() => Err(error),
        ended = &mut server => Err(server_error(ended)),
        ended = &mut probes => Err(server_error(ended.map(Ok::<_, Infallible>))),
    };
    state.closing.cancel();
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, &mut server).await;
    server.abort();
    probes.abort();
    registration.stop().await;
    state.replicas.unload_all().await;
    outcome
}

async fn serve(state: Arc<WorkerState>, incoming: Incoming) -> Result<(), tonic::transport::Error> {
    let closing = state.closing.clone();
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<WorkerServer<WorkerService>>().await;
    let service = WorkerServer::new(WorkerService(state))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(5)))
        .add_service(health_service)
        .add_service(service)
        .serve_with_incoming_shutdown(incoming.into_stream(), closing.cancelled_owned())
        .await
}

async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), WorkerError> {
    let refused = |source| WorkerError::Bind { address, source };
    let listener = TcpListener::bind(address).await.map_err(refused)?;
    let local = listener.local_addr().map_err(refused)?;
    Ok((listener, local))
}

fn server_error<E: std::fmt::Display>(ended: Result<Result<(), E>, tokio::task::JoinError>) -> WorkerError {
    let what = match ended {
        Ok(Ok(())) => "it ended".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    WorkerError::Server(what)
}

/// Waits until the running sequences are done and the coordinator, which the next heartbeat tells of the drain, has taken
/// back the parts held here. It does so when their requests have finished or, after the drain timeout, gone on elsewhere.
/// Until then it may send requests, also where another worker leads. Without a registration, or with no coordinator left,
/// nobody sends any.
async fn drain(state: &WorkerState) {
    let timeout = state.config.drain_timeout + HANDOVER;
    let withdrawn = async {
        while !state.running.is_empty() || (state.is_registered() && !state.replicas.is_empty()) {
            tokio::time::sleep(DRAIN_POLL).await;
        }
    };
    if tokio::time::timeout(timeout, withdrawn).await.is_err() {
        match state.running.len() {
            0 => tracing::warn!(?timeout, "drain timed out: nothing runs, but no coordinator took the parts back"),
            running => tracing::warn!(?timeout, running, "drain timed out, sequences are cut off"),
        }
    }
}

/// Chooses the devices and opens each to learn what it can do.
async fn open_devices(config: &WorkerConfig) -> Result<(LocalDevices, Vec<DeviceInfo>), WorkerError> {
    let settings = config.devices.clone();
    let open = move || {
        let devices = LocalDevices::choose(settings, 1)?;
        let infos = devices.infos()?;
        Ok((devices, infos))
    };
    tokio::task::spawn_blocking(open).await.map_err(|error| WorkerError::Server(error.to_string()))?
}

/// Refuses to promise memory that devices with memory of their own do not have. On the processor a claim beyond what is
/// free is warned of: what will be free depends on what else runs there.
fn check_memory(config: &WorkerConfig, devices: &LocalDevices, infos: &[DeviceInfo]) -> Result<(), WorkerError> {
    let Some(limit) = config.memory_bytes else { return Ok(()) };
    let asked = limit / infos.len().max(1) as u64;
    for info in infos {
        let is_shared = devices.shared_memory_bytes(info).is_some();
        match excess(asked, info) {
            Some(problem) if is_shared => tracing::warn!(problem, "memory is asked for that may not be there"),
            Some(problem) => return Err(WorkerError::Config { field: "memory", problem }),
            None => {}
        }
    }
    Ok(())
}

/// What to say of a device that is asked for more memory than a plan may use there.
fn excess(asked: u64, info: &DeviceInfo) -> Option<String> {
    let usable = usable_bytes(info.memory_bytes);
    (asked > usable).then(|| {
        let [asked, usable, free] = [asked, usable, info.memory_bytes].map(format_bytes);
        format!(
            "{asked} are asked for of {}, expected at most {usable}, nine tenths of the {free} that are free",
            info.name
        )
    })
}

fn hello(
    config: &WorkerConfig,
    devices: &LocalDevices,
    infos: &[DeviceInfo],
    [address, rank_address, http_address]: [SocketAddr; 3],
) -> v1::WorkerHello {
    let num_devices = infos.len().max(1) as u64;
    let limit = |(name, value): &(String, u64)| v1::DeviceLimit { name: name.clone(), value: *value };
    let memory_limit = config.memory_bytes;
    let device = |info: &DeviceInfo| {
        // The devices of the processor share the machine's memory; a GPU takes its own, or its part of that. What the
        // host's other workers claim is known to the coordinator only.
        let shared = devices.shared_memory_bytes(info);
        let own = memory_limit.map(|limit| limit / num_devices);
        v1::WorkerDevice {
            name: info.name.clone(),
            reason: devices.reason().to_owned(),
            memory_bytes: match (own, shared) {
                (Some(own), Some(_)) => own,
                (None, Some(shared)) => shared / num_devices,
                (own, None) => own.unwrap_or_else(|| usable_bytes(info.memory_bytes)),
            },
            host_memory_bytes: info
                .host_memory_bytes
                .map_or(0, |free| usable_bytes(free).max(memory_limit.unwrap_or(0))),
            memory_bytes_per_second: info.memory_bytes_per_second,
            operations_per_second: info.operations_per_second,
            dtype: config.devices.dtype.map_or_else(String::new, |dtype| dtype.to_string()),
            peer_link: info.peer_link.map_or_else(String::new, |link| link.to_string()),
            features: info.abilities.features.clone(),
            limits: info.abilities.limits.iter().map(limit).collect(),
        }
    };
    let reached_at = |port: u16| reached_at(&config.advertise_host, port);
    // Others cannot reach what listens for this machine only, unless they are on it.
    let is_reached = !is_local(http_address.ip()) || is_local(address.ip());
    v1::WorkerHello {
        worker_id: config.worker_id.clone(),
        address: reached_at(address.port()),
        rank_address: reached_at(rank_address.port()),
        host: config.advertise_host.clone(),
        devices: infos.iter().map(device).collect(),
        http_address: if is_reached { reached_at(http_address.port()) } else { String::new() },
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// A host and port as one address.
fn reached_at(host: &str, port: u16) -> String {
    host.parse().map_or_else(|_| format!("{host}:{port}"), |ip: IpAddr| SocketAddr::new(ip, port).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_ipv6_addresses_are_told_from_them() {
        let addresses = ["host", "10.0.0.1", "fe80::1"].map(|host| reached_at(host, 7));
        assert_eq!(addresses, ["host:7", "10.0.0.1:7", "[fe80::1]:7"]);
    }

    #[test]
    fn memory_that_a_device_does_not_have_is_named_with_both_numbers() {
        let info = DeviceInfo {
            name: "cuda:0 test".to_owned(),
            memory_bytes: 100 << 30,
            host_memory_bytes: None,
            memory_bytes_per_second: 1.0,
            operations_per_second: 1.0,
            peer_link: None,
            abilities: Default::default(),
        };
        assert_eq!(excess(90 << 30, &info), None);
        let problem = excess(500 << 30, &info).unwrap();
        assert_eq!(
            problem,
            "500.0 GiB are asked for of cuda:0 test, expected at most 90.0 GiB, nine tenths of the 100.0 GiB that are free"
        );
    }
}
