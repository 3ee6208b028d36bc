//! The planner's task: compares what is wanted with what is there and starts the work that closes the gap.
//! Invariants: plan epochs only grow, also over restarts; a device never holds two live replicas of one model;
//! nothing is planned while a call that frees a part runs, nor with the devices of a worker that did not free one; what a
//! worker holds and nobody wants is freed.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::FutureExt;
use lockstep_sharding::PlanError;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    Command, PlannerConfig,
    deploy::Planned,
    estranged::Estranged,
    ledger::Ledger,
    model_state::{Growth, ModelState},
    replacing::Place,
    reports,
    unloads::{Part, Unloads},
    worker_calls::{self, KnownWorker, LoadFailure},
};
use crate::{
    cluster::{PlanStore, Workers, store::StoreError, worker_client},
    config::ModelSpec,
    served::{BreakCause, ModelDescription, ModelTable, Replica, ReplicaState},
};

/// How often waits (backoff, draining) are looked at.
const TICK: Duration = Duration::from_millis(100);

/// What a task of the reconciler came to.
pub(super) enum Event {
    Described { model: String, source: String, description: Arc<ModelDescription> },
    Failed { model: String, problem: String },
    Planned { model: String, spec: ModelSpec, outcome: Result<Place<Box<Planned>>, PlanError> },
    Compared { model: String, asked: Instant, growth: Growth },
    Loaded { replica: Arc<Replica>, outcome: Result<(), LoadFailure> },
    Unloaded { part: Part, is_freed: bool },
    Written(Result<(), StoreError>),
    Drained,
}

/// What others see of the planner.
pub struct Published {
    /// Every desired model.
    pub table: watch::Sender<ModelTable>,
    /// Whether the settings' own model is among what is desired, or none is to be.
    pub is_claimed: Arc<AtomicBool>,
    /// Whether the table has all that is desired: set once.
    pub is_complete: Arc<AtomicBool>,
}

/// All state of the planner.
pub struct Reconciler {
    pub(super) config: PlannerConfig,
    pub(super) registry: watch::Receiver<Workers>,
    published: Published,
    pub(super) workers: BTreeMap<String, KnownWorker>,
    pub(super) models: BTreeMap<String, ModelState>,
    pub(super) ledger: Ledger,
    unloads: Unloads,
    pub(super) last_epoch: u64,
    /// Replicas whose load was not started.
    pub(super) to_load: Vec<Arc<Replica>>,
    is_leading: bool,
    /// When it last began to lead, where there may be others, and the workers that drained by then: nobody could plan for them.
    pub(super) leads_since: Option<(Instant, BTreeSet<String>)>,
    /// When usable workers last came or went.
    pub(super) workers_changed_at: Instant,
    pub(super) estranged: Estranged,
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
        published: Published,
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
            leads_since: None,
            workers_changed_at: Instant::now(),
            estranged: Estranged::default(),
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
        let is_claimed = self.published.is_claimed.load(Ordering::Acquire);
        self.ledger.refresh();
        self.follow_workers(live, now);
        reports::break_reported(&self.models, live);
        reports::estranged(live).for_each(|[one, other]| self.estranged.note(&one, &other, now));
        let leads = self.leads(live, now);
        self.note_desertion(leads, now);
        if leads {
            self.drain_replicas(live, now);
            self.free_unwanted(live, now);
            self.remove_unloaded();
            if self.agree(now) {
                self.start_loads();
                self.start_attempts(live, now);
                self.grow(live, now);
            }
        } else {
            self.mirror(live);
            self.withhold();
            self.describe_models(now);
        }
        self.publish();
        if is_claimed && (self.ledger.state().is_read || !self.ledger.is_shared()) {
            self.published.is_complete.store(true, Ordering::Release);
        }
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
        if leads != self.is_leading {
            let drains = self.workers.iter().filter(|(_, known)| known.is_draining);
            self.leads_since = leads.then(|| (now, drains.map(|(id, _)| id.clone()).collect()));
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
    fn follow_workers(&mut self, live: &Workers, now: Instant) {
        let lost: Vec<(String, u64)> = self
            .workers
            .iter()
            .filter(|(id, known)| live.get(*id).is_none_or(|record| record.session != known.session))
            .map(|(id, known)| (id.clone(), known.session))
            .collect();
        let mut has_changed = !lost.is_empty();
        let num_usable = self.usable().count();
        for (worker_id, session) in lost {
            if let Some(known) = self.workers.remove(&worker_id) {
                known.gone.cancel();
            }
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
                None => match worker_client(&record.hello.address, &self.config.outbound) {
                    Ok(client) => {
                        let known = KnownWorker {
                            session: record.session,
                            client,
                            has_reported: record.has_reported,
                            is_draining: record.draining,
                            gone: CancellationToken::new(),
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
            let workers = &self.workers;
            self.estranged.retain(|id, session| workers.get(id).is_some_and(|known| known.session == session));
        }
        if has_changed || self.usable().count() != num_usable {
            self.workers_changed_at = now;
            self.models.values_mut().for_each(|model| model.growth = Growth::Unknown);
        }
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

    /// Whether a part is being freed: nothing is planned until then.
    pub(super) fn is_freeing(&self) -> bool {
        self.unloads.running().next().is_some()
    }

    /// The workers that failed to free one of these parts.
    pub(super) fn cluttered(&self, unwanted: Vec<Part>) -> BTreeSet<String> {
        self.unloads.cluttered(unwanted)
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
            // Another file may stand under its name by now.
            Event::Described { model, source, description } => self.note(&model, |model| {
                if model.spec.source == source {
                    (model.is_busy, model.description) = (false, Some(description));
                }
            }),
            Event::Failed { model, problem } => self.note(&model, |model| {
                model.is_busy = false;
                model.note_failure(problem, now);
            }),
            Event::Compared { model, asked, growth } => {
                let is_current = self.workers_changed_at <= asked;
                self.note(&model, |model| {
                    model.is_busy = false;
                    model.growth = if is_current { growth } else { Growth::Unknown };
                });
            }
            Event::Planned { model, spec, outcome } => {
                self.note(&model, |model| model.is_busy = false);
                match outcome {
                    // Whoever leads now plans anew, and so does this one for what is wanted by now.
                    Ok(_) if self.ledger.is_shared() && !self.is_leading => {}
                    _ if self.models.get(&model).is_none_or(|model| model.spec != spec) => {}
                    Ok(place) => self.take_place(&model, place, now),
                    Err(error @ PlanError::Devices { .. }) => {
                        self.note(&model, |model| model.note_waiting_for_devices(&error, now));
                    }
                    Err(error) => self.note(&model, |model| model.note_failure(error.to_string(), now)),
                }
            }
            Event::Loaded { replica, outcome } => self.take_load(&replica, outcome, now),
            Event::Unloaded { part, is_freed } => self.unloads.end(&part, is_freed, now),
            Event::Written(outcome) => self.ledger.end_write(outcome, now),
            Event::Drained => {}
        }
    }

    fn take_load(&mut self, replica: &Arc<Replica>, outcome: Result<(), LoadFailure>, now: Instant) {
        let failure = match outcome {
            Ok(()) => {
                return self.note(&replica.model, |model| {
                    if replica.advance(ReplicaState::Ready) {
                        model.load_time = Some(now.saturating_duration_since(replica.planned_at));
                        tracing::info!(model = replica.model, replica = replica.index, "replica ready");
                    }
                    model.note_progress();
                });
            }
            Err(failure) => failure,
        };
        let member = |id: &String| replica.members.iter().find(|member| member.worker_id == *id);
        let pair = failure.estranged.as_ref().and_then(|[one, other]| member(one).zip(member(other)));
        if let Some((one, other)) = pair {
            self.estranged.note(one, other, now);
        }
        let LoadFailure { problem, .. } = failure;
        self.note(&replica.model, |model| {
            if replica.advance(ReplicaState::broken(BreakCause::NotLoaded, problem.clone())) {
                model.note_unloadable(replica, &problem, now);
            }
        });
    }

    /// Replaces the table if it says something new; replicas carry their own state.
    fn publish(&mut self) {
        let models = &self.models;
        self.published.table.send_if_modified(|table| {
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
        let failed = |problem| Event::Failed { model: "m".into(), problem };
        let event = event_of(async { panic!("a bug") }, failed).await;
        assert!(matches!(event, Event::Failed { problem, .. } if problem.contains("panicked")));
        assert!(matches!(event_of(async { Event::Drained }, failed).await, Event::Drained));
    }
}
