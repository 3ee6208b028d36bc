//! The worker's key in etcd, and the lease that it goes with.
//! Invariant: a process registers under one session for all its life, so that coordinators know, when etcd has come back,
//! that what it held it still holds. The key of another session is taken over if nobody listens any more where it says;
//! else it is waited for as long as its lease may live, then this worker is refused: two processes have one id.
//! Not here: heartbeats, which coordinators fetch themselves (`Worker.FollowHeartbeats`).

use std::{io::ErrorKind, sync::Arc, time::Duration};

use lockstep_etcd::{
    Connection, Endpoints, EtcdError, EtcdSettings, Lease,
    etcd_client::{Compare, CompareOp, GetOptions, PutOptions, Txn, TxnOp},
};
use lockstep_proto::{Message, v1};
use lockstep_telemetry::rarely::Rarely;
use rand::Rng;
use tokio::{
    net::TcpStream,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{WorkerError, service::WorkerState};

/// The key outlives the worker by so much at most. Coordinators notice its death by its heartbeats, long before.
const TTL: Duration = Duration::from_secs(6);
/// Between two renewals.
const PERIOD: Duration = Duration::from_millis(1500);
/// Longest wait between two rounds over the endpoints; half of it at least.
const BACKOFF: Duration = Duration::from_secs(1);
/// How long the key of another session under our id may still be that of a dead predecessor.
const PREDECESSOR: Duration = Duration::from_secs(15);
/// Longest wait for a predecessor's host to say that nobody listens.
const KNOCK: Duration = Duration::from_secs(1);

/// Registers, and registers again whenever the lease is lost, until `stop`.
pub(super) async fn hold(
    state: Arc<WorkerState>,
    hello: v1::WorkerHello,
    settings: EtcdSettings,
    stop: CancellationToken,
) -> Option<WorkerError> {
    let first = rand::rng().random_range(0..settings.endpoints.len().max(1));
    let mut endpoints = Endpoints::new(&settings, first);
    let entry = v1::WorkerEntry { hello: Some(hello), session: state.session };
    let key = settings.keys().worker(&state.config.worker_id);
    let mut registration = Registration { state, entry, key, lease_id: None, refused_since: None, is_held: false };
    let (mut failures, mut was_held, mut rarely) = (0, false, Rarely::default());
    loop {
        let end = registration.hold_on(&mut endpoints, &stop).await;
        registration.state.set_registered(false);
        let error = match end {
            Ok(()) => return None,
            Err(End::Refused(error)) => return Some(error),
            Err(End::Lost(error)) => error,
        };
        // A predecessor's lease lives longer where etcd was away.
        registration.refused_since = None;
        if std::mem::take(&mut registration.is_held) {
            (failures, was_held) = (0, true);
        }
        failures += 1;
        if failures <= endpoints.len() {
            rarely.clear();
        }
        let setting = error.setting();
        // One member of several may well be away.
        if failures < endpoints.len() {
            tracing::info!(%error, "not registered in etcd, trying again");
        } else if rarely.is_due(setting.unwrap_or_default()) {
            match setting.filter(|_| !was_held) {
                Some(setting) => {
                    tracing::error!(setting, %error, "etcd and this worker do not trust each other: it does not register until that is mended");
                }
                None => tracing::warn!(%error, "not registered in etcd, trying again; what is loaded goes on serving"),
            }
        }
        if failures % endpoints.len() == 0 {
            let wait = BACKOFF.mul_f64(rand::rng().random_range(0.5..1.0));
            tokio::select! {
                () = stop.cancelled() => return None,
                () = tokio::time::sleep(wait) => {}
            }
        }
    }
}

/// Why a registration ended.
enum End {
    /// Try again.
    Lost(EtcdError),
    /// Trying again is no use.
    Refused(WorkerError),
}

impl From<EtcdError> for End {
    fn from(error: EtcdError) -> Self {
        Self::Lost(error)
    }
}

struct Registration {
    state: Arc<WorkerState>,
    entry: v1::WorkerEntry,
    key: String,
    lease_id: Option<i64>,
    /// Since when another session holds the key.
    refused_since: Option<Instant>,
    /// The key was ours in this round.
    is_held: bool,
}

impl Registration {
    /// Registers at one endpoint and renews the lease there until `stop`.
    async fn hold_on(&mut self, endpoints: &mut Endpoints, stop: &CancellationToken) -> Result<(), End> {
        let (connection, mut lease) = tokio::select! {
            () = stop.cancelled() => return Ok(()),
            taken = self.take(endpoints) => taken?,
        };
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep(PERIOD) => {}
            }
            lease.renew(&connection, TTL).await?;
        }
        // If that fails the lease ends by itself.
        if let Err(error) = lease.revoke(&connection).await {
            tracing::info!(%error, "the lease was not given back");
        }
        Ok(())
    }

    async fn take(&mut self, endpoints: &mut Endpoints) -> Result<(Connection, Lease), End> {
        let connection = endpoints.connect().await?;
        let mut lease = Lease::hold(&connection, self.lease_id, TTL).await?;
        self.lease_id = Some(lease.id());
        while !self.write(&connection, &lease).await? {
            let since = *self.refused_since.get_or_insert_with(Instant::now);
            if since.elapsed() > PREDECESSOR {
                let worker_id = &self.state.config.worker_id;
                return Err(End::Refused(WorkerError::Etcd(format!(
                    "worker_id {worker_id:?} is taken by a worker that is alive"
                ))));
            }
            tokio::time::sleep(BACKOFF / 2).await;
            lease.renew(&connection, TTL).await?;
        }
        (self.refused_since, self.is_held) = (None, true);
        self.state.set_registered(true);
        tracing::info!(endpoint = connection.endpoint(), "registered in etcd");
        Ok((connection, lease))
    }

    /// Writes the key under the lease, unless another session that may live has it; says whether it did.
    async fn write(&self, connection: &Connection, lease: &Lease) -> Result<bool, EtcdError> {
        let mut kv = connection.client.kv_client();
        let found = connection.within(kv.get(self.key.as_str(), None::<GetOptions>)).await?;
        let mut revision = 0;
        if let Some(found) = found.kvs().first() {
            let entry = v1::WorkerEntry::decode(found.value()).unwrap_or_default();
            if entry.session != self.entry.session && !self.is_gone(&entry).await {
                return Ok(false);
            }
            revision = found.mod_revision();
        }
        let options = PutOptions::new().with_lease(lease.id());
        let put = TxnOp::put(self.key.as_str(), self.entry.encode_to_vec(), Some(options));
        let is_unchanged = Compare::mod_revision(self.key.as_str(), CompareOp::Equal, revision);
        let written = connection.within(kv.txn(Txn::new().when([is_unchanged]).and_then([put]))).await?;
        Ok(written.succeeded())
    }

    /// Whether nobody can listen any more at the address of another session: it is ours now, or its host refuses. A process
    /// that is only stopped is still there, and of a host that does not answer nothing is known.
    async fn is_gone(&self, other: &v1::WorkerEntry) -> bool {
        let address = |entry: &v1::WorkerEntry| entry.hello.as_ref().map(|hello| hello.address.clone());
        let Some(theirs) = address(other) else { return false };
        let is_gone = Some(&theirs) == address(&self.entry).as_ref()
            || matches!(
                timeout(KNOCK, TcpStream::connect(&theirs)).await,
                Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused
            );
        if is_gone {
            tracing::info!(address = theirs, "taking over from a predecessor that has ended");
        }
        is_gone
    }
}
