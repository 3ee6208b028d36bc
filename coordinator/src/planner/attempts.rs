//! Attempts to serve a model: asks a worker what its checkpoint says, then plans for what is missing.
//! Invariant: one plan at a time, and none while memory is being freed: each sees what the one before has taken.

use std::{collections::BTreeSet, sync::Arc};

use futures::future::Future;
use lockstep_sharding::{Explanation, PlanError, Policy, Topology};
use tokio::time::Instant;

use super::{
    deploy::Planned,
    model_state::ModelState,
    reconciler::{Event, Reconciler},
    replacing, reports, topology,
    worker_calls::{self, KnownWorker},
};
use crate::{
    cluster::Workers,
    config::ModelSpec,
    served::{ModelDescription, Replica},
};

/// What is needed to plan a model anywhere.
#[derive(Clone)]
pub(super) struct Planning {
    /// What is wanted.
    pub spec: ModelSpec,
    description: Arc<ModelDescription>,
    /// Workers that a plan does without if it can: the first of these sets that leaves enough.
    avoided: Vec<BTreeSet<String>>,
}

impl Planning {
    /// The plan by `policy` over `topology`; takes its time.
    ///
    /// # Errors
    /// [`PlanError`] if there is none even with all workers.
    pub fn plan(&self, topology: &Topology, policy: &Policy) -> Result<Planned, PlanError> {
        let plan = |topology: Topology| {
            let plan = lockstep_sharding::plan(&self.description.shape, &topology, policy, &self.spec.plan_options)?;
            let explanation = Explanation::new(&plan, &topology);
            Ok(Planned { plan, topology, explanation })
        };
        let spared = self.avoided.iter().find_map(|avoided| plan(topology::without(topology, avoided)).ok());
        spared.map_or_else(|| plan(topology.clone()), Ok)
    }
}

impl Reconciler {
    /// Describes or plans every model that is short of replicas, once all memory that should be free is.
    pub(super) fn start_attempts(&mut self, live: &Workers, now: Instant) {
        if self.is_freeing() {
            return;
        }
        let due: Vec<String> =
            self.models.iter().filter(|(_, model)| model.needs_attempt(now)).map(|(name, _)| name.clone()).collect();
        let timeout = self.config.min_workers_timeout;
        let is_overdue = timeout.is_some_and(|timeout| now >= self.workers_changed_at + timeout);
        for name in due {
            let num_usable = self.usable().count();
            let Some(model) = self.models.get(&name) else { continue };
            let needed = model.num_needed_workers();
            if num_usable < needed && !(num_usable > 0 && is_overdue) {
                self.note(&name, |model| model.note_waiting_for_workers(num_usable, needed));
                continue;
            }
            if model.description.is_none() {
                self.describe(&name);
            } else if !self.is_planning() {
                self.start_plan(&name, live, now);
            }
        }
    }

    /// Plans what a model lacks: on free devices, or where its replicas are superseded perhaps on theirs as well.
    fn start_plan(&mut self, name: &str, live: &Workers, now: Instant) {
        let policy = self.models.get(name).map(ModelState::missing_policy);
        let Some((planning, policy)) = self.planning(name, now).zip(policy) else { return };
        let free = self.topology(name, live, |_| true);
        let is_superseded = |replica: &Replica| {
            self.models.get(name).is_some_and(|model| replica.model == name && model.is_superseded(replica))
        };
        let all = self.topology(name, live, |replica| !is_superseded(replica));
        if all.devices.is_empty() {
            self.note(name, |model| model.note_waiting_for_devices(&"none is free", now));
            return;
        }
        let name = name.to_owned();
        let spec = planning.spec.clone();
        let work = move || {
            if all.devices.len() == free.devices.len() {
                return planning.plan(&free, &policy).map(replacing::Place::Beside);
            }
            replacing::place(planning.plan(&free, &policy), planning.plan(&all, &policy))
        };
        self.attempt(name.clone(), async move {
            match tokio::task::spawn_blocking(work).await {
                Ok(outcome) => Event::Planned { model: name, spec, outcome: outcome.map(|place| place.map(Box::new)) },
                Err(error) => Event::Failed { model: name, problem: format!("planning failed: {error}") },
            }
        });
    }

    /// What is needed to plan a model that was described.
    pub(super) fn planning(&self, name: &str, now: Instant) -> Option<Planning> {
        let model = self.models.get(name)?;
        let mut avoided = self.estranged.avoidable(now);
        avoided.extend(model.avoided.iter().map(|id| BTreeSet::from([id.clone()])));
        Some(Planning { spec: model.spec.clone(), description: model.description.clone()?, avoided })
    }

    /// The devices for a plan of a model, if the replicas that `counts` leaves out held none.
    pub(super) fn topology(&self, name: &str, live: &Workers, counts: impl Fn(&Replica) -> bool) -> Topology {
        let replicas = self.models.values().flat_map(|model| &model.replicas).map(Arc::as_ref);
        let replicas: Vec<&Replica> = replicas.filter(|replica| counts(replica)).collect();
        let cluttered = self.cluttered(reports::unwanted_parts(&self.models, live));
        let is_usable = |id: &String| self.usable().any(|(other, _)| other == id) && !cluttered.contains(id);
        topology::topology(name, live, is_usable, &replicas)
    }

    /// Workers that may get parts.
    pub(super) fn usable(&self) -> impl Iterator<Item = (&String, &KnownWorker)> {
        self.workers.iter().filter(|(_, known)| known.has_reported && !known.is_draining)
    }

    /// Whether a plan is being made: the next one must see what it takes.
    pub(super) fn is_planning(&self) -> bool {
        self.models.values().any(|model| model.is_busy && model.description.is_some())
    }

    /// Describes the models of which only the plan is known here.
    pub(super) fn describe_models(&mut self, now: Instant) {
        let due = self.models.iter().filter(|(_, model)| model.needs_description(now));
        let due: Vec<String> = due.map(|(name, _)| name.clone()).collect();
        due.iter().for_each(|name| self.describe(name));
    }

    /// Asks a worker what a model's checkpoint says: another one each time, as one of them may not be able to read it.
    fn describe(&mut self, name: &str) {
        let Some(num_asked) = self.models.get(name).map(|model| model.num_asked) else { return };
        let Some((_, worker)) = self.usable().nth(num_asked % self.usable().count().max(1)) else { return };
        let (client, gone) = (worker.client.clone(), worker.gone.clone());
        let Some(model) = self.models.get_mut(name) else { return };
        model.num_asked += 1;
        let (name, source) = (name.to_owned(), model.spec.source.clone());
        self.attempt(name.clone(), async move {
            match worker_calls::describe(client, gone, source.clone()).await {
                Ok(description) => Event::Described { model: name, source, description },
                Err(problem) => Event::Failed { model: name, problem },
            }
        });
    }

    /// Starts a task for a model that is busy until its event comes.
    pub(super) fn attempt(&mut self, name: String, task: impl Future<Output = Event> + Send + 'static) {
        self.note(&name, |model| model.is_busy = true);
        self.spawn(task, |problem| Event::Failed { model: name, problem });
    }
}
