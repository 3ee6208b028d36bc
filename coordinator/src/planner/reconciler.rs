//! The planner's task: compares what is wanted with what is there and starts the work that closes the gap.
//! Invariants: plan epochs only grow, also over restarts; a device never holds two live replicas of one model;
//! nothing is planned while a call that frees a part runs, nor with the devices of a worker that did not free one; what a
//! worker holds and nobody wants is freed.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures::FutureExt;
use lockstep_proto::v1;
use lockstep_sharding::{Explanation, PlanError, ShardPlan};
use rand::RngCore;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    Command, PlannerConfig,
    model_state::{ModelState, Removal},
    reports, topology,
    unloads::{Part, Unloads},
    worker_calls::{self, KnownWorker},
};
use crate::{
    cluster::Workers,
    config::ModelSpec,
    error::RequestError,
    served::{BreakCause, ModelDescription, ModelTable, Replica, ReplicaState},
};

/// How often waits (backoff, draining) are looked at.
const TICK: Duration = Duration::from_millis(100);
/// Bytes of a replica's shared secret.
const SECRET_BYTES: usize = 32;

/// What a task of the reconciler came to.
enum Event {
    Described { model: String, outcome: Result<Arc<ModelDescription>, String> },
    Planned { model: String, outcome: Result<(ShardPlan, Explanation), PlanError> },
    Loaded { replica: Arc<Replica>, outcome: Result<(), String> },
    Unloaded { part: Part, is_freed: bool },
    Drained,
}

/// All state of the planner.
pub struct Reconciler {
    config: PlannerConfig,
    registry: watch::Receiver<Workers>,
    published: watch::Sender<ModelTable>,
    workers: BTreeMap<String, KnownWorker>,
    models: BTreeMap<String, ModelState>,
    unloads: Unloads,
    last_epoch: u64,
    tasks: JoinSet<Event>,
}

impl Reconciler {
    /// Nothing served yet.
    pub fn new(
        config: PlannerConfig,
        registry: watch::Receiver<Workers>,
        published: watch::Sender<ModelTable>,
    ) -> Self {
        let models = config.model.iter().map(|spec| (spec.name.clone(), ModelState::new(spec.clone()))).collect();
        Self {
            config,
            registry,
            published,
            workers: BTreeMap::new(),
            models,
            unloads: Unloads::default(),
            last_epoch: 0,
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
                _ = tick.tick() => {}
            }
        }
        for replica in self.models.values().flat_map(|model| &model.replicas) {
            replica.advance(ReplicaState::broken(BreakCause::ShuttingDown, "the coordinator is shutting down"));
        }
    }

    fn reconcile(&mut self, live: &Workers, now: Instant) {
        self.follow_workers(live);
        reports::break_reported(&self.models, live);
        self.drain_replicas(now);
        self.free_unwanted(live, now);
        self.remove_unloaded();
        self.start_attempts(live, now);
        self.publish();
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

    /// Stops admission to replicas that must go, and lets go of those that have finished.
    fn drain_replicas(&mut self, now: Instant) {
        for model in self.models.values() {
            let is_overdue = model.removal.as_ref().is_some_and(|removal| removal.deadline <= now);
            for replica in &model.replicas {
                let leaves = replica
                    .members
                    .iter()
                    .find(|member| self.workers.get(&member.worker_id).is_some_and(|known| known.is_draining));
                let broken = match (&model.removal, leaves) {
                    (Some(_), _) => ReplicaState::broken(BreakCause::Unloaded, "the model was unloaded"),
                    (None, Some(member)) => {
                        let detail = format!("worker {} was drained", member.worker_id);
                        ReplicaState::broken(BreakCause::WorkerDrained, detail)
                    }
                    (None, None) => continue,
                };
                match replica.state() {
                    ReplicaState::Ready => drop(replica.advance(ReplicaState::Draining)),
                    ReplicaState::Draining if replica.num_requests() == 0 || is_overdue => {
                        replica.advance(broken);
                    }
                    ReplicaState::Loading => drop(replica.advance(broken)),
                    ReplicaState::Draining | ReplicaState::Broken(_) => {}
                }
            }
        }
    }

    /// Unloads what broken replicas held, and every part that a worker reports and no replica needs: another coordinator
    /// or an unload that failed left it there.
    fn free_unwanted(&mut self, live: &Workers, now: Instant) {
        let mut unwanted = self.forget_broken(now);
        unwanted.extend(reports::unwanted_parts(&self.models, live));
        for part in unwanted {
            let known = self.workers.get(&part.worker_id).filter(|known| known.session == part.session);
            let Some(client) = known.map(|known| known.client.clone()) else { continue };
            if self.unloads.start(&part, now) {
                let unloaded = part.clone();
                let unload = async move {
                    let is_freed = worker_calls::unload(client, &part).await;
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
                    replica: replica.index as u32,
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
            let needed = if model.num_live() == 0 { model.spec.min_workers.max(1) } else { 1 };
            if num_usable < needed {
                self.note(&name, |model| model.note_waiting_for_workers(num_usable, needed));
                continue;
            }
            match (&model.description, usable().next()) {
                (None, Some((_, worker))) => {
                    let (client, source) = (worker.client.clone(), model.spec.source.clone());
                    self.attempt(name.clone(), async move {
                        Event::Described { model: name, outcome: worker_calls::describe(client, source).await }
                    });
                }
                // One plan at a time: the next must see what this one takes.
                (Some(_), _) if self.models.values().any(|model| model.is_busy && model.description.is_some()) => {}
                (Some(description), _) => {
                    let replicas: Vec<&Replica> =
                        self.models.values().flat_map(|model| &model.replicas).map(Arc::as_ref).collect();
                    let cluttered = self.cluttered_workers(live);
                    let is_usable = |id: &String| usable().any(|(other, _)| other == id) && !cluttered.contains(id);
                    let topology = topology::topology(&name, live, is_usable, &replicas);
                    if topology.devices.is_empty() {
                        self.note(&name, |model| model.note_waiting_for_devices(&"none is free", now));
                        continue;
                    }
                    let (description, policy) = (Arc::clone(description), model.missing_policy());
                    let options = self.config.plan_options;
                    self.attempt(name.clone(), async move {
                        let planned = tokio::task::spawn_blocking(move || {
                            let plan = lockstep_sharding::plan(&description.shape, &topology, &policy, &options)?;
                            let explanation = Explanation::new(&plan, &topology);
                            Ok((plan, explanation))
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

    /// Workers that still hold what nobody wants: an attempt to free it has failed.
    fn cluttered_workers(&self, live: &Workers) -> BTreeSet<String> {
        let unwanted = reports::unwanted_parts(&self.models, live);
        unwanted.into_iter().filter(|part| !self.unloads.is_freed(part)).map(|part| part.worker_id).collect()
    }

    fn attempt(&mut self, name: String, task: impl Future<Output = Event> + Send + 'static) {
        self.note(&name, |model| model.is_busy = true);
        self.spawn(task, |problem| Event::Described { model: name, outcome: Err(problem) });
    }

    /// Starts a task; if it panics, `failed` makes its event, so that nobody waits for it for ever.
    fn spawn(
        &mut self,
        task: impl Future<Output = Event> + Send + 'static,
        failed: impl FnOnce(String) -> Event + Send + 'static,
    ) {
        self.tasks.spawn(event_of(task, failed));
    }

    fn note(&mut self, name: &str, change: impl FnOnce(&mut ModelState)) {
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
                    Ok((plan, explanation)) => self.deploy(&model, &plan, explanation, now),
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
                        model.note_failure(format!("replica {} cannot be loaded: {problem}", replica.index), now);
                    }
                }
            }),
            Event::Unloaded { part, is_freed } => self.unloads.end(&part, is_freed, now),
            Event::Drained => {}
        }
    }

    /// Puts a plan into force under a new epoch: a load task for each of its replicas.
    fn deploy(&mut self, name: &str, plan: &ShardPlan, explanation: Explanation, now: Instant) {
        let live = Arc::clone(&self.registry.borrow());
        let bytes = match lockstep_sharding::encode(plan) {
            Ok(bytes) => bytes,
            Err(error) => return self.note(name, |model| model.note_failure(error.to_string(), now)),
        };
        self.last_epoch = next_epoch(self.last_epoch);
        let plan_epoch = self.last_epoch;
        let Some(model) = self.models.get_mut(name).filter(|model| model.removal.is_none()) else { return };
        // A worker may have gone while the plan was made: then the next round plans for those that are left.
        let Some(parts) = plan
            .replicas
            .iter()
            .map(|replica| {
                let members = topology::members(replica, &live)?;
                let clients = worker_calls::clients_of(&self.workers, &members)?;
                Some((replica, members, clients, topology::rank_addresses(replica, &live)?))
            })
            .collect::<Option<Vec<_>>>()
        else {
            return;
        };
        let mut loads = Vec::with_capacity(parts.len());
        for (index, (replica_plan, members, clients, rank_addresses)) in parts.into_iter().enumerate() {
            let Some((_, leader)) = clients.first().cloned() else { continue };
            let mut secret = vec![0; SECRET_BYTES];
            rand::rng().fill_bytes(&mut secret);
            let request = v1::LoadReplicaRequest {
                model: name.to_owned(),
                source: model.spec.source.clone(),
                plan_epoch,
                replica: index as u32,
                plan: bytes.clone().into(),
                secret,
                rank_addresses,
            };
            let replica = Arc::new(Replica::new(name.into(), plan_epoch, index, replica_plan.clone(), members, leader));
            model.replicas.push(Arc::clone(&replica));
            loads.push((replica, clients, request));
        }
        tracing::info!(model = name, plan_epoch, num_replicas = plan.replicas.len(), plan.reason, "plan in force");
        model.wanted_replicas.get_or_insert(plan.replicas.len());
        model.plan = Some(Arc::new(explanation));
        model.plan_epoch = plan_epoch;
        for (replica, clients, request) in loads {
            let loading = Arc::clone(&replica);
            let load = async move {
                let outcome = worker_calls::load(Arc::clone(&loading), clients, request).await;
                Event::Loaded { replica: loading, outcome }
            };
            self.spawn(load, |problem| Event::Loaded { replica, outcome: Err(problem) });
        }
    }

    fn obey(&mut self, command: Command, now: Instant) {
        match command {
            Command::Load(spec, reply) => drop(reply.send(self.want(spec))),
            Command::Unload(name, reply) => self.unwant(&name, reply, now),
            Command::Discard(name, reply) if self.models.get(&name).is_some_and(|model| model.has_served) => {
                drop(reply.send(Ok(())));
            }
            Command::Discard(name, reply) => self.unwant(&name, reply, now),
            Command::DrainWorker(worker_id, reply) => {
                let outcome = match self.workers.get_mut(&worker_id) {
                    None => Err(RequestError::UnknownWorker(worker_id)),
                    Some(known) => {
                        known.is_draining = true;
                        let client = known.client.clone();
                        let drain = worker_calls::drain(client).map(|()| Event::Drained);
                        self.spawn(drain, |_| Event::Drained);
                        Ok(())
                    }
                };
                drop(reply.send(outcome));
            }
        }
    }

    /// Says whether the model is new.
    fn want(&mut self, spec: ModelSpec) -> Result<bool, RequestError> {
        match self.models.get_mut(&spec.name) {
            Some(model) if model.spec == spec && model.removal.is_none() => {
                // What failed before may have been mended.
                (model.retry_at, model.failed_attempts) = (None, 0);
                Ok(false)
            }
            Some(_) => Err(RequestError::ModelExists { name: spec.name }),
            None => {
                self.models.insert(spec.name.clone(), ModelState::new(spec));
                Ok(true)
            }
        }
    }

    fn unwant(&mut self, name: &str, reply: oneshot::Sender<Result<(), RequestError>>, now: Instant) {
        let Some(model) = self.models.get_mut(name) else {
            let loaded = self.models.keys().cloned().collect::<Vec<_>>().join(", ");
            drop(reply.send(Err(RequestError::UnknownModel { name: name.into(), loaded })));
            return;
        };
        let deadline = now + self.config.drain_timeout;
        model.removal.get_or_insert_with(|| Removal { deadline, replies: Vec::new() }).replies.push(reply);
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

/// Above every epoch of this process and, by the clock, of earlier ones.
fn next_epoch(last: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_millis() as u64);
    now.max(last + 1)
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
