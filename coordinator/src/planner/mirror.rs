//! The models as the agreed plan has them: for coordinators that do not lead, and as the start of one that does.
//! Invariants: a replica that the plan goes on to have keeps its state and its requests, whoever leads; one that the plan
//! has not takes no request here; a replica is ready here when its leader says that its engine runs.

use std::{collections::BTreeMap, sync::Arc};

use lockstep_proto::v1;
use lockstep_sharding::{Explanation, ShardPlan, Topology};
use tokio::time::Instant;

use super::{
    desired::spec_of,
    ledger::{is_planned_as, members},
    model_state::ModelState,
    reconciler::Reconciler,
    worker_calls::KnownWorker,
};
use crate::{
    cluster::Workers,
    served::{BreakCause, Problem, Replica, ReplicaState},
};

impl Reconciler {
    /// Makes the models what is agreed, as far as the workers that it names are known.
    pub(super) fn mirror(&mut self, live: &Workers) {
        let state = self.ledger.state();
        // Before the first look at the store nothing is known to be gone.
        if !state.is_read {
            return;
        }
        let (desired, plan) = (Arc::clone(&state.desired.value), Arc::clone(&state.plan.value));
        let specs = plan.models.iter().filter_map(|planned| planned.spec.as_ref());
        for spec in specs.chain(&desired.models).filter_map(spec_of) {
            // What the plan says of a model goes before what is desired.
            self.models.entry(spec.name.clone()).or_insert_with(|| ModelState::new(spec));
        }
        let is_there = |name: &String| {
            let is_planned = plan.models.iter().any(|model| model.spec.as_ref().is_some_and(|spec| spec.name == *name));
            is_planned || desired.models.iter().any(|model| model.name == *name)
        };
        self.models.retain(|name, model| {
            let is_there = is_there(name);
            if !is_there {
                let_go(&model.replicas, BreakCause::Unloaded);
            }
            is_there
        });
        for planned in &plan.models {
            let Some(spec) = planned.spec.as_ref().and_then(spec_of) else { continue };
            let Some(model) = self.models.get_mut(&spec.name) else { continue };
            if model.spec.source != spec.source {
                let_go(&model.replicas, BreakCause::Unloaded);
                *model = ModelState::new(spec);
            } else if model.spec != spec {
                model.spec = spec;
            }
            model.follow(planned);
            mirror_replicas(model, planned, &self.workers, live);
        }
        for model in self.models.values_mut() {
            model.removal = None;
            model.note_service();
        }
    }

    /// Does what was ordered since: wants new models, lets go of those that are not desired any more.
    pub(super) fn follow_desired(&mut self, now: Instant) {
        let desired = Arc::clone(&self.ledger.state().desired.value);
        for (wanted, spec) in desired.models.iter().filter_map(|wanted| Some((wanted, spec_of(wanted)?))) {
            let model = self.models.entry(spec.name.clone()).or_insert_with(|| ModelState::new(spec.clone()));
            if model.spec != spec && model.spec.source == spec.source && model.removal.is_none() {
                model.change_settings(spec.clone());
            }
            if model.spec == spec && wanted.attempt > model.attempt {
                (model.attempt, model.retry_at, model.failed_attempts) = (wanted.attempt, None, 0);
            }
        }
        let gone: Vec<String> = self
            .models
            .values()
            .filter(|model| model.removal.is_none())
            .filter(|model| !desired.models.iter().any(|wanted| is_wanted(model, wanted)))
            .map(|model| model.spec.name.clone())
            .collect();
        gone.iter().for_each(|name| self.remove(name, None, now));
    }
}

/// Whether that is this model, or an order for it that only a newer version of this program can read.
fn is_wanted(model: &ModelState, wanted: &v1::DesiredModel) -> bool {
    spec_of(wanted).map_or(wanted.name == model.spec.name, |spec| spec == model.spec)
}

fn let_go(replicas: &[Arc<Replica>], cause: BreakCause) {
    for replica in replicas {
        replica.advance(ReplicaState::broken(cause, cause.to_string()));
    }
}

impl ModelState {
    /// Takes over what the leader wrote of the model, but for its replicas.
    fn follow(&mut self, planned: &v1::PlannedModel) {
        if self.plan_epoch != planned.plan_epoch || self.plan.is_none() {
            self.plan = explain(planned).map(Arc::new);
            self.plan_epoch = planned.plan_epoch;
        }
        (self.plan_bytes, self.topology_json) = (planned.plan.clone(), planned.topology_json.clone());
        self.attempt = planned.spec.as_ref().map_or(0, |spec| spec.attempt);
        self.wanted_replicas = match planned.wanted_replicas as usize {
            0 => self.spec.policy.replicas,
            wanted => Some(wanted),
        };
        let problem = || Problem::new(planned.problem.clone(), planned.problem_detail.clone());
        self.problem = (!planned.problem.is_empty()).then(problem);
        self.failed_attempts = planned.failed_attempts;
        self.has_started = planned.has_started;
        self.superseded_epoch = planned.superseded_epoch;
    }
}

fn explain(planned: &v1::PlannedModel) -> Option<Explanation> {
    if planned.plan.is_empty() {
        return None;
    }
    let refuse = |error: &dyn std::fmt::Display| tracing::error!(%error, "a plan in etcd cannot be read");
    let plan = lockstep_sharding::decode(&planned.plan).inspect_err(|error| refuse(error)).ok()?;
    let topology: Topology = serde_json::from_slice(&planned.topology_json).inspect_err(|error| refuse(error)).ok()?;
    Some(Explanation::new(&plan, &topology))
}

fn mirror_replicas(
    model: &mut ModelState,
    planned: &v1::PlannedModel,
    workers: &BTreeMap<String, KnownWorker>,
    live: &Workers,
) {
    let (kept, gone): (Vec<_>, Vec<_>) = model.replicas.drain(..).partition(|replica| {
        replica.is_live() && planned.replicas.iter().any(|planned| is_planned_as(replica, planned))
    });
    let_go(&gone, BreakCause::Replanned);
    model.replicas = kept;
    for planned in &planned.replicas {
        if !model.replicas.iter().any(|replica| is_planned_as(replica, planned)) {
            model.replicas.extend(replica_of(planned, &model.plan_bytes, workers, live).map(Arc::new));
        }
    }
    for replica in &model.replicas {
        if replica.state() == ReplicaState::Loading && replica.engine(live).is_some() {
            replica.advance(ReplicaState::Ready);
        }
    }
}

/// The replica, of the newest plan unless it brings its own, as this coordinator sees it; `None` as long as a worker of it is not known, or calls its part broken.
fn replica_of(
    planned: &v1::PlannedReplica,
    newest_plan: &[u8],
    workers: &BTreeMap<String, KnownWorker>,
    live: &Workers,
) -> Option<Replica> {
    let mut load = planned.load.clone()?;
    if load.plan.is_empty() {
        load.plan = newest_plan.to_vec().into();
    }
    let members = members(planned);
    let (clients, plan) = (super::worker_calls::clients_of(workers, &members)?, plan_of(&load)?);
    let (_, leader) = clients.into_iter().next()?;
    let replica = Replica::new(load, plan, members, leader, planned.index as usize);
    let is_broken = |report: &v1::ReplicaReport| replica.is_meant_by(report) && !report.problem.is_empty();
    let has_broken = replica
        .members
        .iter()
        .any(|member| live.get(&member.worker_id).is_none_or(|record| record.replicas.iter().any(is_broken)));
    (!has_broken).then_some(replica)
}

fn plan_of(load: &v1::LoadReplicaRequest) -> Option<lockstep_sharding::ReplicaPlan> {
    let plan: ShardPlan = lockstep_sharding::decode(&load.plan)
        .inspect_err(|error| tracing::error!(model = load.model, %error, "a plan in etcd cannot be read"))
        .ok()?;
    plan.replicas.into_iter().nth(load.replica as usize)
}
