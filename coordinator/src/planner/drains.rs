//! Replicas that must go: when they cease to take requests, and when they are let go.
//! Invariant: what runs ends where it is or goes on elsewhere, and the last replica that takes requests does so for as long as
//! another one is on its way, both within a limit.
//! Not here: what comes in their place ([`replacing`](super::replacing)), how their memory is freed
//! ([`unloads`](super::unloads)).

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::reconciler::Reconciler;
use crate::{
    cluster::{WorkerRecord, Workers},
    served::{BreakCause, Replica, ReplicaState},
};

/// After a replica ceased to take requests, so long the numbers of its engine may be older than the last of them.
const ENGINE_GRACE: Duration = Duration::from_secs(2);

impl Reconciler {
    /// Stops admission to replicas that must go, and lets go of those that have finished. One of a draining worker goes on
    /// as before for as long as it is the last and another one is planned or loaded; at the worker's deadline what still
    /// runs goes on elsewhere. For one that drained while nobody led nobody could plan, so that who leads then has the drain
    /// timeout to find a successor of the last replica. One whose plan is superseded goes on until another one serves.
    pub(super) fn drain_replicas(&mut self, live: &Workers, now: Instant) {
        for model in self.models.values() {
            for replica in &model.replicas {
                let (broken, deadline, holds_out) = match (&model.removal, self.draining_worker(replica)) {
                    (Some(removal), _) => {
                        let broken = ReplicaState::broken(BreakCause::Unloaded, "the model was unloaded");
                        (broken, Some(removal.deadline), false)
                    }
                    (None, Some(worker_id)) => {
                        replica.leave();
                        let detail = format!("worker {worker_id} was drained");
                        let deadline = live.get(worker_id).and_then(|record| record.drain_deadline());
                        let is_unled = |(_, drains): &&(Instant, BTreeSet<String>)| drains.contains(worker_id);
                        let unled = self.leads_since.as_ref().filter(|_| model.holds_out()).filter(is_unled);
                        let earliest = unled.map(|(since, _)| *since + self.config.drain_timeout);
                        let deadline = deadline.map(|deadline| earliest.map_or(deadline, |it| deadline.max(it)));
                        (ReplicaState::broken(BreakCause::WorkerDrained, detail), deadline, model.holds_out())
                    }
                    (None, None) if model.is_superseded(replica) => {
                        replica.leave();
                        let broken = ReplicaState::broken(BreakCause::Replanned, "another plan took its place");
                        let deadline = replica.draining_at().map(|at| at + self.config.drain_timeout);
                        (broken, deadline, model.lacks_successor())
                    }
                    (None, None) => continue,
                };
                let is_overdue = deadline.is_some_and(|deadline| deadline <= now);
                match replica.state() {
                    ReplicaState::Ready if holds_out && !is_overdue => {}
                    ReplicaState::Ready => drop(replica.advance(ReplicaState::Draining)),
                    ReplicaState::Draining if self.is_idle(replica, live) || is_overdue => {
                        replica.advance(broken);
                    }
                    ReplicaState::Loading => drop(replica.advance(broken)),
                    ReplicaState::Draining | ReplicaState::Broken(_) => {}
                }
            }
        }
    }

    /// Whether nobody has requests on a replica that takes none: neither this coordinator nor, as its engine tells, others.
    fn is_idle(&self, replica: &Replica, live: &Workers) -> bool {
        let is_newer = |record: &Arc<WorkerRecord>| {
            replica.draining_at().is_some_and(|at| record.last_heartbeat > at + ENGINE_GRACE)
        };
        let engine_is_idle = || {
            let is_known = replica.members.first().and_then(|leader| live.get(&leader.worker_id)).is_some_and(is_newer);
            let engine = replica.engine(live);
            is_known && engine.is_some_and(|engine| engine.num_running_sequences + engine.num_waiting_sequences == 0)
        };
        replica.num_requests() == 0 && (!self.ledger.is_shared() || engine_is_idle())
    }

    /// Where another coordinator leads: stops admission to replicas that it is about to let go.
    pub(super) fn withhold(&self) {
        let desired = &self.ledger.state().desired.value.models;
        for model in self.models.values() {
            let is_desired = desired.iter().any(|desired| desired.name == model.spec.name);
            for replica in model.replicas.iter().filter(|replica| replica.is_ready()) {
                let is_superseded = model.is_superseded(replica);
                if is_superseded || self.draining_worker(replica).is_some() {
                    replica.leave();
                }
                let holds_out = model.holds_out() || (is_superseded && model.lacks_successor());
                if !is_desired || (replica.is_leaving() && !holds_out) {
                    replica.advance(ReplicaState::Draining);
                }
            }
        }
    }

    /// The first of its workers that drains.
    fn draining_worker<'a>(&self, replica: &'a Replica) -> Option<&'a String> {
        let mut worker_ids = replica.members.iter().map(|member| &member.worker_id);
        worker_ids.find(|id| self.workers.get(*id).is_some_and(|known| known.is_draining))
    }
}
