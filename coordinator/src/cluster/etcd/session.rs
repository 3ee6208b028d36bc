//! The session with etcd: one endpoint at a time, a lease, the election, list and watch, writes.
//! Invariants: it runs on a thread and runtime of its own, so that no load on the process lets the lease end; after every
//! break it lists anew, so that neither a gap nor a compaction hides anything; whoever leads by this clock still leads by
//! etcd's.

use std::time::Duration;

use lockstep_etcd::{
    Connection, Endpoints, EtcdError, EtcdSettings, Lease,
    etcd_client::{Compare, CompareOp, GetOptions, PutOptions, Txn, TxnOp, WatchOptions, WatchStream},
    keys::Keys,
};
use lockstep_proto::{MAX_MESSAGE_BYTES, Message};
use lockstep_telemetry::rarely::Rarely;
use rand::Rng;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    Reply,
    uses::Uses,
    view::{self, Entries},
};
use crate::{
    CoordinatorError,
    cluster::store::{Link, StoreError, StoreState, Versioned, Write},
};

/// After so long without a renewal another coordinator leads.
const TTL: Duration = Duration::from_secs(4);
/// Between two renewals.
const PERIOD: Duration = Duration::from_secs(1);
/// Between two words of what tenants use here.
const USES_PERIOD: Duration = Duration::from_millis(500);
/// Longest wait between two rounds over the endpoints; half of it at least.
const BACKOFF: Duration = Duration::from_millis(500);

/// Everything that talks to etcd.
pub struct Session {
    id: String,
    keys: Keys,
    endpoints: Endpoints,
    state: watch::Sender<StoreState>,
    entries: watch::Sender<Entries>,
    writes: mpsc::Receiver<(Write, Reply)>,
    uses: Uses,
    lease_id: Option<i64>,
    rarely: Rarely,
}

/// What connects it with the rest of the process.
pub struct Ends {
    /// What is known of etcd.
    pub state: watch::Sender<StoreState>,
    /// The workers that are registered there.
    pub entries: watch::Sender<Entries>,
    /// What is to be written.
    pub writes: mpsc::Receiver<(Write, Reply)>,
}

impl Session {
    /// Not connected yet.
    pub fn new(id: String, settings: EtcdSettings, uses: Uses, ends: Ends) -> Self {
        let Ends { state, entries, writes } = ends;
        let first = rand::rng().random_range(0..settings.endpoints.len().max(1));
        let endpoints = Endpoints::new(&settings, first);
        Self {
            id,
            keys: settings.keys(),
            endpoints,
            state,
            entries,
            writes,
            uses,
            lease_id: None,
            rarely: Rarely::default(),
        }
    }

    /// Runs it on a thread until `closing` fires, then says what is left to say; what is returned fails when it has ended.
    ///
    /// # Errors
    /// [`CoordinatorError::Server`] if the thread or its runtime cannot be started.
    pub fn start(mut self, closing: CancellationToken) -> Result<oneshot::Receiver<()>, CoordinatorError> {
        let failed = |error: std::io::Error| CoordinatorError::Server { server: "etcd", reason: error.to_string() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (end, ended) = oneshot::channel();
        let run = move || {
            runtime.block_on(self.run(&closing));
            drop(end);
        };
        std::thread::Builder::new().name("etcd".to_owned()).spawn(run).map_err(failed)?;
        Ok(ended)
    }

    async fn run(&mut self, closing: &CancellationToken) {
        let mut failures = 0;
        loop {
            let error = match self.serve(closing, &mut failures).await {
                Ok(()) => return,
                Err(error) => error,
            };
            failures += 1;
            self.lose(&error, failures);
            if failures % self.endpoints.len() == 0 {
                let wait = BACKOFF.mul_f64(rand::rng().random_range(0.5..1.0));
                if closing.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                    return;
                }
            }
        }
    }

    /// Notes that etcd is away, and says so to whoever waits for a write.
    fn lose(&mut self, error: &EtcdError, failures: usize) {
        let num_endpoints = self.endpoints.len();
        if failures <= num_endpoints {
            self.rarely.clear();
        }
        let (setting, was_read) = (error.setting(), self.state.borrow().is_read);
        if failures < num_endpoints {
            tracing::info!(%error, "the session with etcd ended");
        } else if self.rarely.is_due(setting.unwrap_or_default()) {
            match setting.filter(|_| !was_read) {
                Some(setting) => {
                    tracing::error!(setting, %error, "etcd and this coordinator do not trust each other: nothing is served until that is mended");
                }
                None => tracing::warn!(%error, "etcd is away: what is loaded goes on serving, nothing is planned"),
            }
        }
        self.uses.lose();
        let reason = error.to_string();
        self.state.send_modify(|state| {
            let since = match &state.link {
                Link::Away { since, .. } => *since,
                Link::Connected(_) => Instant::now(),
            };
            state.link = Link::Away { since, reason: reason.clone() };
            if matches!(error, EtcdError::LeaseLost) {
                state.leads_until = None;
            }
        });
        while let Ok((_, reply)) = self.writes.try_recv() {
            // Whoever asked may have left.
            let _ = reply.send(Err(StoreError::Away(reason.clone())));
        }
    }

    /// One connection from its start to its end.
    async fn serve(&mut self, closing: &CancellationToken, failures: &mut usize) -> Result<(), EtcdError> {
        let begun = closing.run_until_cancelled(async {
            let connection = self.endpoints.connect().await?;
            let lease = Lease::hold(&connection, self.lease_id, TTL).await?;
            self.lease_id = Some(lease.id());
            let watch = self.list(&connection).await?;
            Ok::<_, EtcdError>((connection, lease, watch))
        });
        let Some(begun) = begun.await else { return Ok(()) };
        let (connection, mut lease, mut watch) = begun?;
        self.campaign(&connection, &lease).await?;
        if std::mem::take(failures) > 0 {
            tracing::info!(endpoint = connection.endpoint(), "etcd is back");
        }
        let mut renewals = tokio::time::interval(PERIOD);
        renewals.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut words = tokio::time::interval(USES_PERIOD);
        words.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = closing.cancelled() => break,
                _ = renewals.tick() => {
                    lease.renew(&connection, TTL).await?;
                    if self.state.borrow().leads_until.is_some() {
                        self.state.send_modify(|state| state.leads_until = Some(lease.valid_until()));
                    }
                }
                _ = words.tick() => {
                    self.uses.say(&self.keys, &connection, &lease).await?;
                    if self.state.borrow().leads_until.is_some() {
                        self.uses.adopt(&self.keys, &connection, &lease).await?;
                    }
                }
                changes = watch.message() => {
                    let changes = changes.map_err(|error| connection.failed(error))?;
                    let changes = changes.ok_or_else(|| connection.ended("the watch ended"))?;
                    if changes.canceled() {
                        let reason = format!("the watch was cancelled: {}", changes.cancel_reason());
                        return Err(connection.ended(reason));
                    }
                    self.follow(changes.events());
                    if self.state.borrow().leader.is_none() {
                        self.campaign(&connection, &lease).await?;
                    }
                }
                Some((write, reply)) = self.writes.recv() => self.write(&connection, &lease, write, reply).await?,
            }
        }
        // If that fails the lease ends by itself, and what was used in the last moment is not known to others.
        if let Err(error) = self.uses.say(&self.keys, &connection, &lease).await {
            tracing::info!(%error, "the last use of tenants was not told");
        }
        if let Err(error) = lease.revoke(&connection).await {
            tracing::info!(%error, "the lease was not given back");
        }
        Ok(())
    }

    /// Reads everything, and watches it from there on.
    async fn list(&mut self, connection: &Connection) -> Result<WatchStream, EtcdError> {
        let mut kv = connection.client.kv_client().max_decoding_message_size(MAX_MESSAGE_BYTES);
        let all = connection.within(kv.get(self.keys.all(), Some(GetOptions::new().with_prefix()))).await?;
        let revision = all.header().map_or(0, |header| header.revision());
        self.update(|state, entries| {
            view::list(&self.keys, all.kvs(), state, entries);
            state.link = Link::Connected(connection.endpoint().to_owned());
        });
        self.uses.list(&self.keys, all.kvs());
        let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
        let mut client = connection.client.watch_client().max_decoding_message_size(MAX_MESSAGE_BYTES);
        connection.within(client.watch(self.keys.all(), Some(options))).await
    }

    fn follow(&mut self, events: &[lockstep_etcd::etcd_client::Event]) {
        if !events.is_empty() {
            self.update(|state, entries| {
                events.iter().for_each(|event| view::follow(&self.keys, event, state, entries));
            });
            self.uses.follow(&self.keys, events);
        }
    }

    /// Workers first: whoever reads the plan must find those that it names.
    fn update(&self, change: impl FnOnce(&mut StoreState, &mut Entries)) {
        let (mut state, mut entries) = (self.state.borrow().clone(), self.entries.borrow().clone());
        change(&mut state, &mut entries);
        self.entries.send_if_modified(|current| {
            let is_new = *current != entries;
            *current = entries;
            is_new
        });
        self.state.send_replace(state);
    }

    /// Takes the lead if nobody has it.
    async fn campaign(&self, connection: &Connection, lease: &Lease) -> Result<(), EtcdError> {
        let key = self.keys.leader();
        let is_free = Compare::create_revision(key.as_str(), CompareOp::Equal, 0);
        let put = TxnOp::put(key.as_str(), self.id.as_str(), Some(PutOptions::new().with_lease(lease.id())));
        let mut kv = connection.client.kv_client();
        let won = connection.within(kv.txn(Txn::new().when([is_free]).and_then([put]))).await?.succeeded();
        let found = connection.within(kv.get(key.as_str(), None)).await?;
        let holder = found.kvs().first();
        let leads = holder.is_some_and(|kv| kv.lease() == lease.id());
        let leader = holder.and_then(|kv| kv.value_str().ok()).map(str::to_owned);
        if won {
            tracing::info!(id = self.id, "this coordinator leads");
        }
        self.state.send_modify(|state| {
            state.leader = leader;
            state.leads_until = leads.then(|| lease.valid_until());
        });
        Ok(())
    }

    /// Replaces a value if it is still what the writer has seen.
    async fn write(&self, connection: &Connection, lease: &Lease, write: Write, reply: Reply) -> Result<(), EtcdError> {
        let (key, expected, bytes) = match &write {
            Write::Desired { expected, value } => (self.keys.desired(), *expected, value.encode_to_vec()),
            Write::Plan { expected, value } => (self.keys.plan(), *expected, value.encode_to_vec()),
        };
        let mut conditions = vec![Compare::mod_revision(key.as_str(), CompareOp::Equal, expected)];
        if matches!(write, Write::Plan { .. }) {
            conditions.push(Compare::lease(self.keys.leader(), CompareOp::Equal, lease.id()));
        }
        let txn = Txn::new().when(conditions).and_then([TxnOp::put(key, bytes, None)]);
        let outcome = connection.within(connection.client.kv_client().txn(txn)).await;
        let revision = outcome.as_ref().map_or(0, |done| done.header().map_or(0, |header| header.revision()));
        let (answer, result) = match outcome {
            Ok(done) if done.succeeded() => (Ok(()), Ok(())),
            Ok(_) => (Err(StoreError::Conflict), Ok(())),
            // Another member would say the same.
            Err(error) if error.is_refusal() => (Err(StoreError::Refused(error.to_string())), Ok(())),
            Err(error) => (Err(StoreError::Away(error.to_string())), Err(error)),
        };
        if answer.is_ok() {
            self.state.send_modify(|state| match write {
                Write::Desired { value, .. } => state.desired = Versioned { value: value.into(), revision },
                Write::Plan { value, .. } => state.plan = Versioned { value: value.into(), revision },
            });
        }
        // Whoever asked may have left.
        let _ = reply.send(answer);
        result
    }
}
