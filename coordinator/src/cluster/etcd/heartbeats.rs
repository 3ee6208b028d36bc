//! The workers that are registered in etcd, as each tells of itself.
//! Invariants: a worker is live while its heartbeats come; one whose key is gone is given [`GRACE`] to register again as
//! long as they do, since its lease may have ended only because etcd was away. A worker that comes back after it was
//! lost is entered again.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lockstep_proto::{status::Class, v1};
use lockstep_telemetry::rarely::Rarely;
use lockstep_transport::{Outbound, explain};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Streaming;

use super::view::Entries;
use crate::cluster::{WorkerRecord, Workers, worker_client};

/// How long a worker is kept whose key is gone but who lives.
const GRACE: Duration = Duration::from_secs(15);
/// How often those are looked at.
const TICK: Duration = Duration::from_millis(250);
/// Waits before a worker that does not answer is asked again, doubled from the first to the last.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// A worker that could not be reached for so long is said to be out of reach.
const PERSISTENT: Duration = Duration::from_secs(2);
/// Silence is counted in so many parts, so that a pause of this process counts as one of them and not as the worker's.
const PARTS: u32 = 4;

/// The workers by id that are registered and cannot be reached, and why.
pub type Unreachable = Arc<Mutex<BTreeMap<String, (Arc<v1::WorkerHello>, String)>>>;

/// A worker that is followed until this is dropped.
struct Followed {
    entry: v1::WorkerEntry,
    /// Since when its key is gone.
    orphaned: Option<Instant>,
    _stop: DropGuard,
}

/// Follows every registered worker.
pub struct Heartbeats {
    entries: watch::Receiver<Entries>,
    workers: watch::Sender<Workers>,
    unreachable: Unreachable,
    silence: Duration,
    outbound: Outbound,
    followed: BTreeMap<String, Followed>,
}

impl Heartbeats {
    /// Nobody followed yet.
    pub fn new(
        entries: watch::Receiver<Entries>,
        workers: watch::Sender<Workers>,
        unreachable: Unreachable,
        silence: Duration,
        outbound: Outbound,
    ) -> Self {
        Self { entries, workers, unreachable, silence, outbound, followed: BTreeMap::new() }
    }

    /// Follows them until `closing` fires.
    pub async fn follow(mut self, closing: CancellationToken) {
        loop {
            self.match_entries(Instant::now());
            tokio::select! {
                () = closing.cancelled() => return,
                changed = self.entries.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                () = tokio::time::sleep(TICK) => {}
            }
        }
    }

    fn match_entries(&mut self, now: Instant) {
        let entries = Arc::clone(&self.entries.borrow_and_update());
        let workers = Arc::clone(&self.workers.borrow());
        let is_live = |id: &str, session: u64| workers.get(id).is_some_and(|record| record.session == session);
        let mut gone = Vec::new();
        for (worker_id, followed) in &mut self.followed {
            match entries.get(worker_id) {
                Some(entry) if *entry == followed.entry => followed.orphaned = None,
                Some(_) => gone.push(worker_id.clone()),
                None => {
                    let since = *followed.orphaned.get_or_insert(now);
                    if now >= since + GRACE || !is_live(worker_id, followed.entry.session) {
                        gone.push(worker_id.clone());
                    }
                }
            }
        }
        for worker_id in gone {
            tracing::info!(worker_id, "registration ended");
            self.followed.remove(&worker_id);
            forget(&self.workers, &worker_id);
            self.unreachable.lock().unwrap_or_else(PoisonError::into_inner).remove(&worker_id);
        }
        for (worker_id, entry) in entries.iter() {
            if !self.followed.contains_key(worker_id) {
                let followed = self.start(entry.clone());
                self.followed.insert(worker_id.clone(), followed);
            }
        }
    }

    fn start(&self, entry: v1::WorkerEntry) -> Followed {
        let stop = CancellationToken::new();
        let follower = Follower {
            hello: Arc::new(entry.hello.clone().unwrap_or_default()),
            session: entry.session,
            workers: self.workers.clone(),
            unreachable: Arc::clone(&self.unreachable),
            silence: self.silence,
            outbound: self.outbound.clone(),
            stop: stop.clone(),
        };
        tokio::spawn(follower.run());
        Followed { entry, orphaned: None, _stop: stop.drop_guard() }
    }
}

fn forget(workers: &watch::Sender<Workers>, worker_id: &str) {
    workers.send_if_modified(|workers| Arc::make_mut(workers).remove(worker_id).is_some());
}

/// Follows one registration of one worker.
struct Follower {
    hello: Arc<v1::WorkerHello>,
    session: u64,
    workers: watch::Sender<Workers>,
    unreachable: Unreachable,
    silence: Duration,
    outbound: Outbound,
    stop: CancellationToken,
}

impl Follower {
    async fn run(self) {
        let stop = self.stop.clone();
        let (mut backoff, mut since, mut rarely) = (BACKOFF.0, None, Rarely::default());
        let worker_id = &self.hello.worker_id;
        let follow = async {
            loop {
                // A connection may break while the worker lives: it is lost if it cannot be reached at once.
                let reason = loop {
                    match self.connect().await {
                        Ok(heartbeats) => {
                            (backoff, since) = (BACKOFF.0, None);
                            if self.listen(heartbeats).await.is_break() {
                                break "no heartbeats come from it".to_owned();
                            }
                            tokio::time::sleep(BACKOFF.0).await;
                        }
                        Err(reason) => break reason,
                    }
                };
                if self.forget() {
                    tracing::info!(worker_id, reason, "no heartbeats come from the worker");
                }
                let address = &self.hello.address;
                let failing_since = *since.get_or_insert_with(Instant::now);
                // One that ends well takes its key back by then.
                if failing_since.elapsed() >= PERSISTENT {
                    if rarely.is_due(&reason) {
                        tracing::warn!(
                            worker_id,
                            address,
                            reason,
                            "a worker that is registered in etcd cannot be reached"
                        );
                    }
                    self.note_unreachable(reason);
                }
                tokio::time::sleep(backoff).await;
                backoff = (backoff * 2).min(BACKOFF.1);
            }
        };
        stop.run_until_cancelled(follow).await;
    }

    /// Opens the stream of heartbeats and takes the first.
    async fn connect(&self) -> Result<Streaming<v1::Heartbeat>, String> {
        let mut client = worker_client(&self.hello.address, &self.outbound)?;
        let period_ms = u32::try_from((self.silence / 3).as_millis()).unwrap_or(u32::MAX).clamp(50, 10_000);
        let request = v1::FollowHeartbeatsRequest { session: self.session, period_ms };
        let first = async {
            let mut heartbeats = client.follow_heartbeats(request).await?.into_inner();
            let first = heartbeats.message().await?;
            Ok::<_, tonic::Status>((heartbeats, first.ok_or_else(|| Class::Cancelled.status("it ended"))?))
        };
        let first = tokio::time::timeout(self.silence, first).await.map_err(|_| "it does not answer".to_owned())?;
        let words = |status: tonic::Status| explain(&status).unwrap_or_else(|| status.message().to_owned());
        let (heartbeats, first) = first.map_err(words)?;
        self.note(first);
        self.unreachable.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.hello.worker_id);
        Ok(heartbeats)
    }

    /// Takes heartbeats: breaks when the worker has fallen silent, continues when the stream has ended.
    async fn listen(&self, mut heartbeats: Streaming<v1::Heartbeat>) -> std::ops::ControlFlow<()> {
        let mut num_silent = 0;
        while num_silent < PARTS {
            match tokio::time::timeout(self.silence / PARTS, heartbeats.message()).await {
                Err(_) => num_silent += 1,
                Ok(Ok(Some(heartbeat))) => {
                    num_silent = 0;
                    self.note(heartbeat);
                }
                Ok(Ok(None) | Err(_)) => return std::ops::ControlFlow::Continue(()),
            }
        }
        std::ops::ControlFlow::Break(())
    }

    fn note_unreachable(&self, reason: String) {
        let mut unreachable = self.unreachable.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever stopped this has taken the worker out.
        if !self.stop.is_cancelled() {
            unreachable.insert(self.hello.worker_id.clone(), (Arc::clone(&self.hello), reason));
        }
    }

    fn note(&self, heartbeat: v1::Heartbeat) {
        self.workers.send_if_modified(|workers| {
            // Whoever stopped this has taken the worker out, and perhaps entered its successor.
            if self.stop.is_cancelled() {
                return false;
            }
            let record = WorkerRecord {
                hello: Arc::clone(&self.hello),
                session: self.session,
                last_heartbeat: Instant::now(),
                draining: heartbeat.draining,
                drain_left: Duration::from_millis(heartbeat.drain_left_ms),
                has_reported: true,
                replicas: heartbeat.replicas,
            };
            if Arc::make_mut(workers).insert(self.hello.worker_id.clone(), Arc::new(record)).is_none() {
                let (worker_id, num_devices) = (&self.hello.worker_id, self.hello.devices.len());
                tracing::info!(worker_id, num_devices, "worker found");
            }
            true
        });
    }

    /// Takes the worker out; says whether it was in.
    fn forget(&self) -> bool {
        self.workers.send_if_modified(|workers| {
            !self.stop.is_cancelled() && Arc::make_mut(workers).remove(&self.hello.worker_id).is_some()
        })
    }
}
