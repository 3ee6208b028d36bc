//! The planner's task: compares what is wanted with what is there and starts the work that closes the gap.
//! Invariants: plan epochs only grow, also over restarts; a device never holds two live replicas of one model;
//! nothing is planned while a call that frees a part runs, nor with the devices of a worker that did not free one; what a
//! worker holds and nobody wants is freed.

use std::{collections::BTreeMap, future::Future, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures::FutureExt;
use lockstep_sharding::{Explanation, PlanError, Topology};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    Command, PlannerConfig,
    deploy::Planned,
    ledger::Ledger,
    model_state::ModelState,
    reports, topology,
    unloads::{Part, Unloads},
    worker_calls::{self, KnownWorker},
};
use crate::{
    cluster::{PlanStore, Workers, store::StoreError},
    served::{BreakCause, Member, ModelDescription, ModelTable, Replica, ReplicaState},
};

/// How often waits (backoff, draining) are looked at.
const TICK: Duration = Duration::from_millis(100);
/// After a replica ceased to take requests, so long the numbers of its engine may be older than the last of them.
const ENGINE_GRACE: Duration = Duration::from_secs(2);

/// What a task of the reconciler came to.
pub(super) enum Event {
    Described { model: String, outcome: Result<Arc<ModelDescription>, String> },
    Planned { model: String, outcome: Result<Box<Planned>, PlanError> },
    Loaded { replica: Arc<Replica>, outcome: Result<(), String> },
    Unloaded { part: Part, is_freed: bool },
    Written(Result<(), StoreError>),
    Drained,
}

/// All state of the planner.
pub struct Reconciler {
    pub(super) config: PlannerConfig,
    pub(super) registry: watch::Receiver<Workers>,
    published: watch::Sender<ModelTable>,
    pub(super) workers: BTreeMap<String, KnownWorker>,
    pub(super) models: BTreeMap<String, ModelState>,
    pub(super) ledger: Ledger,
    unloads: Unloads,
    pub(super) last_epoch: u64,
    /// Replicas whose load was not started.
    pub(super) to_load: Vec<Arc<Replica>>,
    is_leading: bool,
    /// Since when this coordinator plans and there is no worker.
    pub(super) deserted_since: Option<Instant>,
    tasks: JoinSet<Event>,
}

impl Reconciler {
    /// Nothing served yet.
    pub fn new(
        config: PlannerConfig,
        registry: watch::Receiver<Workers>,
        store: Option<Arc<dyn PlanStore>>,
        published: watch::Sender<ModelTable>,
    ) -> Self {
        // Where there is a store, that says what is desired.
        let specs = config.model.iter().filter(|_| store.is_none());
        let models = specs.map(|spec| (spec.name.clone(), ModelState::new(spec.clone()))).collect();
        Self {
            config,
            registry,
            published,
            workers: BTreeMap::new(),
            models,
            ledger: Ledger::new(store),
            unloads: Unloads::default(),
            last_epoch: 0,
            to_load: Vec::new(),
            is_leading: false,
            deserted_since: None,
            tasks: JoinSet::new(),
        }
    }

    /// Reconciles until `closing`; then breaks what is left, so that no request waits for it.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>, closing: CancellationToken) {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let live = Arc::clone(&self.registry.borrow_and_update());
            // Registrations end after `closing`: whoever is missing then was not lost.
            if closing.is_cancelled() {
                break;
            }
            self.reconcile(&live, Instant::now());
            tokio::select! {
                () = closing.cancelled() => break,
                Some(command) = commands.recv() => self.obey(command, Instant::now()),
                Some(done) = self.tasks.join_next() => match done {
                    Ok(event) => self.take(event, Instant::now()),
                    Err(error) => tracing::error!(%error, "a planner task ended without an event"),
                },
                Ok(()) = self.registry.changed() => {}
                () = self.ledger.changed() => {}
                _ = tick.tick() => {}
            }
        }
        for replica in self.models.values().flat_map(|model| &model.replicas) {
            replica.advance(ReplicaState::broken(BreakCause::ShuttingDown, "the coordinator is shutting down"));
        }
    }

    fn reconcile(&mut self, live: &Workers, now: Instant) {
        self.ledger.refresh();
        self.follow_workers(live);
        reports::break_reported(&self.models, live);
        let leads = self.leads(live, now);
        self.note_desertion(leads, now);
        if leads {
            self.drain_replicas(live, now);
            self.free_unwanted(live, now);
            self.remove_unloaded();
            if self.agree(now) {
                self.start_loads();
                self.start_attempts(live, now);
            }
        } else {
            self.mirror(live);
            self.withhold();
            self.describe_models(now);
        }
        self.publish();
    }

    /// Whether this coordinator plans. One among several does so once it has taken over the plan as it stands.
    fn leads(&mut self, live: &Workers, now: Instant) -> bool {
        if !self.ledger.is_shared() {
            return true;
        }
        let since = self.ledger.lead(now);
        if since.is_some() && !self.is_leading {
            self.mirror(live);
        }
        let leads = since.is_some_and(|since| self.is_leading || self.ledger.is_settled(since, &self.models, now));
        if leads && !self.is_leading {
            tracing::info!("planning");
            let replicas = self.models.values().flat_map(|model| &model.replicas);
            self.to_load = replicas.filter(|replica| replica.state() == ReplicaState::Loading).cloned().collect();
        }
        if !leads && self.is_leading {
            tracing::info!("no longer planning");
            self.to_load.clear();
        }
        self.is_leading = leads;
        if leads {
            self.follow_desired(now);
        }
        leads
    }

    /// Writes what is to be agreed; says whether all is.
    fn agree(&mut self, now: Instant) -> bool {
        if let Some(write) = self.ledger.write(&self.models, now) {
            let failed = |problem| Event::Written(Err(StoreError::Away(problem)));
            self.spawn(async { Event::Written(write.await) }, failed);
        }
        self.ledger.is_agreed(&self.models)
    }

    /// Notices lost, new and draining workers.
    fn follow_workers(&mut self, live: &Workers) {
        let lost: Vec<(String, u64)> = self
            .workers
            .iter()
            .filter(|(id, known)| live.get(*id).is_none_or(|record| record.session != known.session))
            .map(|(id, known)| (id.clone(), known.session))
            .collect();
        let mut has_changed = !lost.is_empty();
        for (worker_id, session) in lost {
            self.workers.remove(&worker_id);
            self.ledger.note_lost(&worker_id, session);
            self.unloads.forget(&worker_id, session);
            for replica in self.models.values().flat_map(|model| &model.replicas) {
                if replica.uses(&worker_id, session) {
                    let detail = format!("worker {worker_id} was lost");
                    replica.advance(ReplicaState::broken(BreakCause::WorkerLost, detail));
                }
            }
        }
        for (worker_id, record) in live.iter() {
            match self.workers.get_mut(worker_id) {
                Some(known) => {
                    known.has_reported |= record.has_reported;
                    known.is_draining |= record.draining;
                }
                None => match worker_calls::client(&record.hello.address, &self.config.outbound) {
                    Ok(client) => {
                        let known = KnownWorker {
                            session: record.session,
                            client,
                            has_reported: record.has_reported,
                            is_draining: record.draining,
                        };
                        self.workers.insert(worker_id.clone(), known);
                        self.ledger.note_found(worker_id, record.session);
                        has_changed = true;
                    }
                    Err(problem) => tracing::error!(worker_id, problem, "worker cannot be used"),
                },
            }
        }
        if has_changed {
            self.models.values_mut().for_each(|model| model.retry_at = None);
        }
    }

    /// Stops admission to replicas that must go, and lets go of those that have finished. One of a draining worker goes on
    /// as before for as long as it is the last and another one is planned or loaded; at the worker's deadline what still
    /// runs goes on elsewhere.
    fn drain_replicas(&mut self, live: &Workers, now: Instant) {
        for model in self.models.values() {
            for replica in &model.replicas {
                let leaves = replica
                    .members
                    .iter()
                    .find(|member| self.workers.get(&member.worker_id).is_some_and(|known| known.is_draining));
                let (broken, deadline, holds_out) = match (&model.removal, leaves) {
                    (Some(removal), _) => {
                        let broken = ReplicaState::broken(BreakCause::Unloaded, "the model was unloaded");
                        (broken, Some(removal.deadline), false)
                    }
                    (None, Some(Member { worker_id, .. })) => {
                        replica.leave();
                        let detail = format!("worker {worker_id} was drained");
                        let deadline = live.get(worker_id).and_then(|record| record.drain_deadline());
                        (ReplicaState::broken(BreakCause::WorkerDrained, detail), deadline, model.holds_out())
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
        let is_newer = |record: &Arc<crate::cluster::WorkerRecord>| {
            replica.draining_at().is_some_and(|at| record.last_heartbeat > at + ENGINE_GRACE)
        };
        let engine_is_idle = || {
            let is_known = replica.members.first().and_then(|leader| live.get(&leader.worker_id)).is_some_and(is_newer);
            let engine = crate::api::status::engine_status(replica, live);
            is_known && engine.is_some_and(|engine| engine.num_running_sequences + engine.num_waiting_sequences == 0)
        };
        replica.num_requests() == 0 && (!self.ledger.is_shared() || engine_is_idle())
    }

    /// Unloads what broken replicas held, and every part that a worker reports and no replica needs: another coordinator
    /// or an unload that failed left it there.
    fn free_unwanted(&mut self, live: &Workers, now: Instant) {
        let mut unwanted = self.forget_broken(now);
        unwanted.extend(reports::unwanted_parts(&self.models, live));
        unwanted.retain(|part| !self.ledger.has_part(part));
        // What is left now the workers' heartbeats go on to list.
        let Some(leader_term) = self.ledger.term() else { return };
        for part in unwanted {
            let known = self.workers.get(&part.worker_id).filter(|known| known.session == part.session);
            let Some(client) = known.map(|known| known.client.clone()) else { continue };
            if self.unloads.start(&part, now) {
                let unloaded = part.clone();
                let unload = async move {
                    let is_freed = worker_calls::unload(client, &part, leader_term).await;
                    Event::Unloaded { part, is_freed }
                };
                self.spawn(unload, |_| Event::Unloaded { part: unloaded, is_freed: false });
            }
        }
    }

    /// Takes broken replicas out of their models; returns their parts.
    fn forget_broken(&mut self, now: Instant) -> Vec<Part> {
        let mut parts = Vec::new();
        for model in self.models.values_mut() {
            let (live, broken): (Vec<_>, Vec<_>) = model.replicas.drain(..).partition(|replica| replica.is_live());
            model.replicas = live;
            for replica in &broken {
                if let ReplicaState::Broken(breakage) = replica.state() {
                    model.note_break(replica, &breakage, now);
                }
                parts.extend(replica.members.iter().map(|member| Part {
                    worker_id: member.worker_id.clone(),
                    session: member.session,
                    model: replica.model.clone(),
                    plan_epoch: replica.plan_epoch,
                    replica: replica.load.replica,
                }));
            }
        }
        parts
    }

    /// Forgets models whose removal is complete.
    fn remove_unloaded(&mut self) {
        self.models.retain(|name, model| {
            let is_unloading = self.unloads.running().any(|part| part.model == *name);
            let is_empty = model.replicas.is_empty() && !is_unloading && !model.is_busy;
            if let Some(removal) = model.removal.as_mut().filter(|_| is_empty) {
                removal.replies.drain(..).for_each(|reply| drop(reply.send(Ok(()))));
                return false;
            }
            true
        });
    }

    /// Describes or plans every model that is short of replicas, once all memory that should be free is.
    fn start_attempts(&mut self, live: &Workers, now: Instant) {
        if self.unloads.running().next().is_some() {
            return;
        }
        let due: Vec<String> =
            self.models.iter().filter(|(_, model)| model.needs_attempt(now)).map(|(name, _)| name.clone()).collect();
        for name in due {
            let usable = || self.workers.iter().filter(|(_, known)| known.has_reported && !known.is_draining);
            let num_usable = usable().count();
            let Some(model) = self.models.get(&name) else { continue };
            let needed = model.num_needed_workers();
            if num_usable < needed {
                self.note(&name, |model| model.note_waiting_for_workers(num_usable, needed));
                continue;
            }
            match (&model.description, usable().next()) {
                (None, Some(_)) => self.describe(&name),
                // One plan at a time: the next must see what this one takes.
                (Some(_), _) if self.models.values().any(|model| model.is_busy && model.description.is_some()) => {}
                (Some(description), _) => {
                    let replicas: Vec<&Replica> =
                        self.models.values().flat_map(|model| &model.replicas).map(Arc::as_ref).collect();
                    let cluttered = self.unloads.cluttered(reports::unwanted_parts(&self.models, live));
                    let is_usable = |id: &String| usable().any(|(other, _)| other == id) && !cluttered.contains(id);
                    let topology = topology::topology(&name, live, is_usable, &replicas);
                    if topology.devices.is_empty() {
                        self.note(&name, |model| model.note_waiting_for_devices(&"none is free", now));
                        continue;
                    }
                    let (description, policy) = (Arc::clone(description), model.missing_policy());
                    let (options, avoided) = (self.config.plan_options, model.avoided.clone());
                    self.attempt(name.clone(), async move {
                        let plan = move |topology: Topology| {
                            let plan = lockstep_sharding::plan(&description.shape, &topology, &policy, &options)?;
                            let explanation = Explanation::new(&plan, &topology);
                            Ok(Box::new(Planned { plan, topology, explanation }))
                        };
                        let planned = tokio::task::spawn_blocking(move || {
                            let planned = avoided.and_then(|id| plan(topology::without(&topology, &id)).ok());
                            planned.map_or_else(|| plan(topology), Ok)
                        });
                        match planned.await {
                            Ok(outcome) => Event::Planned { model: name, outcome },
                            Err(error) => {
                                Event::Described { model: name, outcome: Err(format!("planning failed: {error}")) }
                            }
                        }
                    });
                }
                (None, None) => {}
            }
        }
    }

    /// Describes the models of which only the plan is known here.
    fn describe_models(&mut self, now: Instant) {
        let due = self.models.iter().filter(|(_, model)| model.needs_description(now));
        let due: Vec<String> = due.map(|(name, _)| name.clone()).collect();
        due.iter().for_each(|name| self.describe(name));
    }

    /// Asks a worker what a model's checkpoint says.
    fn describe(&mut self, name: &str) {
        let mut usable = self.workers.values().filter(|known| known.has_reported && !known.is_draining);
        let Some((worker, model)) = usable.next().zip(self.models.get(name)) else { return };
        let (client, source, name) = (worker.client.clone(), model.spec.source.clone(), name.to_owned());
        self.attempt(name.clone(), async move {
            Event::Described { model: name, outcome: worker_calls::describe(client, source).await }
        });
    }

    fn attempt(&mut self, name: String, task: impl Future<Output = Event> + Send + 'static) {
        self.note(&name, |model| model.is_busy = true);
        self.spawn(task, |problem| Event::Described { model: name, outcome: Err(problem) });
    }

    /// Starts a task; if it panics, `failed` makes its event, so that nobody waits for it for ever.
    pub(super) fn spawn(
        &mut self,
        task: impl Future<Output = Event> + Send + 'static,
        failed: impl FnOnce(String) -> Event + Send + 'static,
    ) {
        self.tasks.spawn(event_of(task, failed));
    }

    pub(super) fn note(&mut self, name: &str, change: impl FnOnce(&mut ModelState)) {
        if let Some(model) = self.models.get_mut(name) {
            change(model);
        }
    }

    fn take(&mut self, event: Event, now: Instant) {
        match event {
            Event::Described { model, outcome } => self.note(&model, |model| {
                model.is_busy = false;
                match outcome {
                    Ok(description) => model.description = Some(description),
                    Err(problem) => model.note_failure(problem, now),
                }
            }),
            Event::Planned { model, outcome } => {
                self.note(&model, |model| model.is_busy = false);
                match outcome {
                    // Whoever leads now plans anew.
                    Ok(_) if self.ledger.is_shared() && !self.is_leading => {}
                    Ok(planned) => self.deploy(&model, *planned, now),
                    Err(error @ PlanError::Devices { .. }) => {
                        self.note(&model, |model| model.note_waiting_for_devices(&error, now));
                    }
                    Err(error) => self.note(&model, |model| model.note_failure(error.to_string(), now)),
                }
            }
            Event::Loaded { replica, outcome } => self.note(&replica.model, |model| match outcome {
                Ok(()) => {
                    if replica.advance(ReplicaState::Ready) {
                        tracing::info!(model = replica.model, replica = replica.index, "replica ready");
                    }
                    model.note_progress();
                }
                Err(problem) => {
                    if replica.advance(ReplicaState::broken(BreakCause::NotLoaded, problem.clone())) {
                        model.note_unloadable(&replica, &problem, now);
                    }
                }
            }),
            Event::Unloaded { part, is_freed } => self.unloads.end(&part, is_freed, now),
            Event::Written(outcome) => self.ledger.end_write(outcome, now),
            Event::Drained => {}
        }
    }

    /// Replaces the table if it says something new; replicas carry their own state.
    fn publish(&mut self) {
        let models = &self.models;
        self.published.send_if_modified(|table| {
            let is_same = table.len() == models.len()
                && models.iter().all(|(name, model)| table.get(name).is_some_and(|served| model.is_shown_by(served)));
            if !is_same {
                *table =
                    Arc::new(models.iter().map(|(name, model)| (name.clone(), Arc::new(model.snapshot()))).collect());
            }
            !is_same
        });
    }
}

/// What a task comes to; what `failed` makes of it if it panics.
async fn event_of(task: impl Future<Output = Event>, failed: impl FnOnce(String) -> Event) -> Event {
    let ended = AssertUnwindSafe(task).catch_unwind().await;
    ended.unwrap_or_else(|_| failed("a planner task panicked".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_becomes_a_failure() {
        let failed = |problem| Event::Described { model: "m".into(), outcome: Err(problem) };
        let event = event_of(async { panic!("a bug") }, failed).await;
        assert!(matches!(event, Event::Described { outcome: Err(problem), .. } if problem.contains("panicked")));
        assert!(matches!(event_of(async { Event::Drained }, failed).await, Event::Drained));
    }
}
