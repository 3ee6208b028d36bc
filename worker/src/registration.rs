//! The worker's lease: its registration stream at a coordinator, or its key in etcd.
//! Invariant: heartbeats and renewals run on a thread and runtime of their own, so no load on the process delays them. Losing the
//! coordinator or etcd stops nothing: replicas keep running and the registration is tried again for ever.

#[cfg(feature = "etcd")]
mod etcd;

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, future::BoxFuture};
use lockstep_proto::{
    status::Class,
    v1::{self, cluster_client::ClusterClient, worker_report::Report},
};
use lockstep_transport::{ClusterTls, Connector, Outbound, explain};
use rand::Rng;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;

use crate::{WorkerError, config::RegistryAddress, service::WorkerState};

/// Heartbeat period until the coordinator has named its lease.
const FIRST_PERIOD: Duration = Duration::from_millis(500);
/// Shortest heartbeat period, whatever the lease.
const LEAST_PERIOD: Duration = Duration::from_millis(50);
/// Waits between attempts: doubled from the first to the last, with jitter.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Reports that may wait for the connection; when it takes no more, it is stuck.
const OUTBOUND_REPORTS: usize = 8;

/// A running registration.
pub(crate) struct Registration {
    stop: CancellationToken,
    outcome: oneshot::Receiver<Option<WorkerError>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Registration {
    /// Starts registering.
    ///
    /// # Errors
    /// [`WorkerError::Config`] if the coordinator's address is none; [`WorkerError::Server`] if no thread can be started.
    pub fn start(
        state: Arc<WorkerState>,
        hello: v1::WorkerHello,
        tls: Option<ClusterTls>,
    ) -> Result<Self, WorkerError> {
        let stop = CancellationToken::new();
        let (sender, outcome) = oneshot::channel();
        let lease = lease(state, hello, tls, stop.clone())?;
        let run = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let result = match runtime {
                Ok(runtime) => runtime.block_on(lease),
                Err(error) => Some(WorkerError::Server(format!("registration runtime: {error}"))),
            };
            // Nobody listens any more after `stop`.
            let _ = sender.send(result);
        };
        let thread = std::thread::Builder::new()
            .name("registration".to_owned())
            .spawn(run)
            .map_err(|error| WorkerError::Server(format!("registration thread: {error}")))?;
        Ok(Self { stop, outcome, thread: Some(thread) })
    }

    /// Resolves when the coordinator has refused this worker for good.
    pub async fn lost(&mut self) -> WorkerError {
        match (&mut self.outcome).await {
            Ok(Some(error)) => error,
            _ => WorkerError::Server("the registration thread ended".to_owned()),
        }
    }

    /// Gives the lease back.
    pub async fn stop(mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

/// Holds the lease until `stop`; ends earlier if this worker is refused for good.
fn lease(
    state: Arc<WorkerState>,
    hello: v1::WorkerHello,
    tls: Option<ClusterTls>,
    stop: CancellationToken,
) -> Result<BoxFuture<'static, Option<WorkerError>>, WorkerError> {
    match state.config.registry.clone() {
        RegistryAddress::Coordinator(address) => {
            let outbound = tls.map_or(Outbound::ClearText, Outbound::Member);
            let (endpoint, connector) = endpoint(&address, outbound)?;
            let mut session = Session { state, hello, address, endpoint, connector, stop, was_registered: false };
            Ok(async move { session.run_for_ever().await }.boxed())
        }
        #[cfg(feature = "etcd")]
        RegistryAddress::Etcd(settings) => Ok(etcd::hold(state, hello, settings, stop).boxed()),
        // `WorkerConfig::check` has refused it.
        #[cfg(not(feature = "etcd"))]
        RegistryAddress::Etcd(_) => Err(WorkerError::Etcd("this build has no etcd client".to_owned())),
    }
}

fn endpoint(coordinator: &str, outbound: Outbound) -> Result<(Endpoint, Connector), WorkerError> {
    let (endpoint, connector) = Connector::new(coordinator, outbound)
        .map_err(|error| WorkerError::Config { field: "coordinator", problem: error.to_string() })?;
    let endpoint = endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(Duration::from_secs(2))
        .keep_alive_timeout(Duration::from_secs(3))
        .keep_alive_while_idle(true);
    Ok((endpoint, connector))
}

/// Why a registration stream ended.
enum End {
    /// We were told to stop.
    Stopped,
    /// The coordinator said that it stops; another may take its place.
    Farewell(String),
    /// Try again.
    Lost(String),
    /// Trying again is no use.
    Refused(String),
}

struct Session {
    state: Arc<WorkerState>,
    hello: v1::WorkerHello,
    address: String,
    endpoint: Endpoint,
    connector: Connector,
    stop: CancellationToken,
    was_registered: bool,
}

impl Session {
    async fn run_for_ever(&mut self) -> Option<WorkerError> {
        let mut backoff = BACKOFF.0;
        // After a farewell nobody needs a warning before the longest wait.
        let mut is_expected = false;
        let address = self.address.clone();
        loop {
            let was_registered = std::mem::take(&mut self.was_registered);
            let end = self.register(was_registered).await;
            if self.was_registered {
                (backoff, is_expected) = (BACKOFF.0, false);
            }
            self.was_registered |= was_registered;
            match end {
                End::Stopped => return None,
                End::Refused(what) => return Some(WorkerError::Coordinator { address, what }),
                End::Farewell(what) => {
                    is_expected = true;
                    tracing::info!(%address, what, "not registered, trying again");
                }
                End::Lost(what) if is_expected && backoff < BACKOFF.1 => {
                    tracing::info!(%address, what, "not registered, trying again");
                }
                End::Lost(what) => tracing::warn!(%address, what, "not registered, trying again"),
            }
            let jitter = rand::rng().random_range(0.5..1.0);
            tokio::select! {
                () = self.stop.cancelled() => return None,
                () = tokio::time::sleep(backoff.mul_f64(jitter)) => backoff = (backoff * 2).min(BACKOFF.1),
            }
        }
    }

    /// One registration stream from its hello to its end.
    async fn register(&mut self, was_registered_before: bool) -> End {
        let stop = self.stop.clone();
        let end = tokio::select! {
            () = stop.cancelled() => End::Stopped,
            end = self.hold_lease(was_registered_before) => end,
        };
        self.state.set_registered(false);
        end
    }

    async fn hold_lease(&mut self, was_registered_before: bool) -> End {
        let channel = match self.endpoint.connect_with_connector(self.connector.clone()).await {
            Ok(channel) => channel,
            Err(error) => return End::Lost(format!("cannot connect: {}", with_causes(&error))),
        };
        let (reports, outbound) = mpsc::channel(OUTBOUND_REPORTS);
        let hello = v1::WorkerReport { report: Some(Report::Hello(self.hello.clone())) };
        if reports.try_send(hello).is_err() {
            return End::Lost("the hello cannot be queued".to_owned());
        }
        let refused = |status: tonic::Status| match Class::of(&status) {
            // Right after a break the coordinator may still hold our own old lease: that passes.
            Class::AlreadyExists if was_registered_before => End::Lost(status.message().to_owned()),
            Class::AlreadyExists | Class::InvalidRequest | Class::Unauthenticated => {
                End::Refused(status.message().to_owned())
            }
            Class::ShuttingDown => End::Farewell(status.message().to_owned()),
            _ => End::Lost(explain(&status).unwrap_or_else(|| status.to_string())),
        };
        let replies = ClusterClient::new(channel).register(ReceiverStream::new(outbound)).await;
        let mut replies = match replies {
            Ok(replies) => replies.into_inner(),
            Err(status) => return refused(status),
        };
        let mut heartbeats = tokio::time::interval(FIRST_PERIOD);
        heartbeats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = heartbeats.tick() => {
                    if reports.try_send(self.heartbeat()).is_err() {
                        return End::Lost("the connection takes no heartbeats".to_owned());
                    }
                }
                reply = replies.message() => match reply {
                    Ok(Some(v1::RegistrationReply { lease_ms })) => {
                        if !self.was_registered {
                            tracing::info!(lease_ms, "registered");
                        }
                        self.was_registered = true;
                        self.state.set_registered(true);
                        let period = (Duration::from_millis(lease_ms.into()) / 3).max(LEAST_PERIOD);
                        if period != heartbeats.period() {
                            heartbeats = tokio::time::interval(period);
                            heartbeats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
                        }
                    }
                    Ok(None) => return End::Lost("the coordinator closed the stream".to_owned()),
                    Err(status) => return refused(status),
                },
            }
        }
    }

    fn heartbeat(&self) -> v1::WorkerReport {
        v1::WorkerReport { report: Some(Report::Heartbeat(self.state.heartbeat())) }
    }
}

fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    if let Some(reason) = explain(error) {
        return reason;
    }
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
