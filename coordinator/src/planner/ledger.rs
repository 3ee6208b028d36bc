//! What is agreed among coordinators, and whether this one may change it. Plain state but for the store's channel.
//! Invariant: where there are several coordinators, a part is loaded only when the agreed plan has it and freed only when
//! it has not; so whoever leads next finds all that is loaded in the plan. A coordinator alone agrees with itself at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures::future::BoxFuture;
use lockstep_proto::v1;
use tokio::{sync::watch, time::Instant};

use super::{
    desired::{desired_model, spec_of},
    model_state::ModelState,
    unloads::Part,
};
use crate::{
    cluster::{
        PlanStore,
        store::{StoreError, StoreState, Write},
    },
    served::{Member, Replica},
};

/// How long a new leader waits for workers that the plan names and that it has not met: they may be about to register
/// again, and what they hold is not to be torn down.
const SETTLE: Duration = Duration::from_secs(4);
/// Between a write that failed and the next.
const RETRY: Duration = Duration::from_millis(200);

/// The agreed plan and our part in it.
pub struct Ledger {
    store: Option<(Arc<dyn PlanStore>, watch::Receiver<StoreState>)>,
    state: StoreState,
    is_writing: bool,
    retry_at: Option<Instant>,
    leads_since: Option<Instant>,
    /// Of the present lead, or the last one; 0 where there is no other coordinator.
    term: u64,
    /// Registrations that this coordinator has seen end.
    lost: BTreeSet<(String, u64)>,
}

impl Ledger {
    /// Nothing read yet; without a store this coordinator is alone.
    pub fn new(store: Option<Arc<dyn PlanStore>>) -> Self {
        let store = store.map(|store| {
            let changes = store.watch();
            (store, changes)
        });
        let (state, lost) = (StoreState::new(), BTreeSet::new());
        Self { store, state, is_writing: false, retry_at: None, leads_since: None, term: 0, lost }
    }

    /// Whether there may be other coordinators.
    pub fn is_shared(&self) -> bool {
        self.store.is_some()
    }

    /// What was last read.
    pub fn state(&self) -> &StoreState {
        &self.state
    }

    /// Takes in what was read since.
    pub fn refresh(&mut self) {
        let Some((_, changes)) = &mut self.store else { return };
        let state = changes.borrow_and_update().clone();
        if state.desired.revision != self.state.desired.revision {
            for v1::DesiredModel { name, policy, .. } in
                state.desired.value.models.iter().filter(|model| is_foreign(model))
            {
                tracing::error!(model = name, policy, "the policy of a desired model cannot be read: it is left alone");
            }
        }
        self.state = state;
    }

    /// Returns when there is more to take in.
    pub async fn changed(&mut self) {
        let is_over = match &mut self.store {
            Some((_, changes)) => changes.changed().await.is_err(),
            None => true,
        };
        if is_over {
            std::future::pending().await
        }
    }

    /// Whether this coordinator has the lead now, and since when.
    pub fn lead(&mut self, now: Instant) -> Option<Instant> {
        if !self.state.leads(now) {
            self.leads_since = None;
        } else if self.leads_since.is_none() {
            self.leads_since = Some(now);
            self.term = next_epoch(self.state.plan.value.leader_term);
        }
        self.leads_since
    }

    /// The term in which this coordinator may have workers change what they hold: once its plan, and with it that the
    /// terms before are over, is agreed. 0 where there is no other coordinator.
    pub fn term(&self) -> Option<u64> {
        (self.state.plan.value.leader_term == self.term || !self.is_shared()).then_some(self.term)
    }

    /// Whether all that the plan names is known here, as far as it can be: `replicas` are those that are.
    pub fn is_settled(&self, since: Instant, models: &BTreeMap<String, ModelState>, now: Instant) -> bool {
        let is_known = |planned: &v1::PlannedReplica| {
            let is_lost =
                planned.members.iter().any(|member| self.lost.contains(&(member.worker_id.clone(), member.session)));
            is_lost || models.values().flat_map(|model| &model.replicas).any(|replica| is_planned_as(replica, planned))
        };
        now >= since + SETTLE || self.replicas().all(is_known)
    }

    /// A registration has ended.
    pub fn note_lost(&mut self, worker_id: &str, session: u64) {
        if self.is_shared() {
            let plan = Arc::clone(&self.state.plan.value);
            let members = || plan.models.iter().flat_map(|model| &model.replicas).flat_map(|replica| &replica.members);
            self.lost
                .retain(|(id, session)| members().any(|member| member.worker_id == *id && member.session == *session));
            self.lost.insert((worker_id.to_owned(), session));
        }
    }

    /// A registration is there.
    pub fn note_found(&mut self, worker_id: &str, session: u64) {
        self.lost.remove(&(worker_id.to_owned(), session));
    }

    /// Whether the agreed plan has a part.
    pub fn has_part(&self, part: &Part) -> bool {
        self.replicas().filter_map(|planned| Some((planned.load.as_ref()?, planned))).any(|(load, planned)| {
            let is_member =
                |member: &v1::PlannedMember| member.worker_id == part.worker_id && member.session == part.session;
            load.model == part.model
                && load.plan_epoch == part.plan_epoch
                && load.replica == part.replica
                && planned.members.iter().any(is_member)
        })
    }

    /// Whether a replica may be loaded: it is in the agreed plan.
    pub fn has(&self, replica: &Replica) -> bool {
        !self.is_shared() || self.replicas().any(|planned| is_planned_as(replica, planned))
    }

    /// Begins to write what `models` are, if that is not what is agreed, and nothing is being written.
    pub fn write(
        &mut self,
        models: &BTreeMap<String, ModelState>,
        now: Instant,
    ) -> Option<BoxFuture<'static, Result<(), StoreError>>> {
        let (store, _) =
            self.store.as_ref().filter(|_| !self.is_writing && self.retry_at.is_none_or(|at| at <= now))?;
        let value = self.plan_state(models);
        if value == *self.state.plan.value {
            return None;
        }
        self.is_writing = true;
        Some(store.write(Write::Plan { expected: self.state.plan.revision, value }))
    }

    /// Notes the end of a write.
    pub fn end_write(&mut self, outcome: Result<(), StoreError>, now: Instant) {
        self.is_writing = false;
        self.retry_at = None;
        if let Err(error) = outcome {
            tracing::warn!(%error, "the plan was not written");
            self.retry_at = Some(now + RETRY);
        }
    }

    /// Whether all that `models` are is agreed.
    pub fn is_agreed(&self, models: &BTreeMap<String, ModelState>) -> bool {
        !self.is_shared() || (!self.is_writing && self.plan_state(models) == *self.state.plan.value)
    }

    /// The highest epoch in the agreed plan.
    pub fn last_epoch(&self) -> u64 {
        self.state.plan.value.models.iter().map(|model| model.plan_epoch).max().unwrap_or(0)
    }

    /// The models as they are kept. Replicas that have broken are not part of it.
    fn plan_state(&self, models: &BTreeMap<String, ModelState>) -> v1::PlanState {
        // What a newer version of this program has planned and this one cannot read stays as it is.
        let name = |planned: &v1::PlannedModel| planned.spec.as_ref().map(|spec| spec.name.clone());
        let is_kept = |planned: &&v1::PlannedModel| {
            planned.spec.as_ref().is_some_and(|spec| is_foreign(spec) && !models.contains_key(&spec.name))
        };
        let kept = self.state.plan.value.models.iter().filter(is_kept).cloned();
        let mut planned: Vec<_> = models.values().map(planned_model).chain(kept).collect();
        planned.sort_by_key(name);
        v1::PlanState { models: planned, leader_term: self.term }
    }

    fn replicas(&self) -> impl Iterator<Item = &v1::PlannedReplica> {
        self.state.plan.value.models.iter().flat_map(|model| &model.replicas)
    }
}

/// Whether `replica` is what `planned` says, on the same registrations.
pub fn is_planned_as(replica: &Replica, planned: &v1::PlannedReplica) -> bool {
    planned.load.as_ref().is_some_and(|load| {
        load.model == replica.model && load.plan_epoch == replica.plan_epoch && load.replica == replica.load.replica
    }) && members(planned) == replica.members
}

/// Its workers; the leader first.
pub fn members(planned: &v1::PlannedReplica) -> Vec<Member> {
    let member = |member: &v1::PlannedMember| Member { worker_id: member.worker_id.clone(), session: member.session };
    planned.members.iter().map(member).collect()
}

/// Whether only a newer version of this program can read it.
fn is_foreign(model: &v1::DesiredModel) -> bool {
    spec_of(model).is_none()
}

/// Above every number of this process and, by the clock, of earlier ones.
pub(super) fn next_epoch(last: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_millis() as u64);
    now.max(last + 1)
}

/// A model as it is kept. The plan stands there once, not again in each replica that was made of it.
fn planned_model(model: &ModelState) -> v1::PlannedModel {
    let planned_member =
        |member: &Member| v1::PlannedMember { worker_id: member.worker_id.clone(), session: member.session };
    let planned_replica = |replica: &Arc<Replica>| {
        let mut load = replica.load.clone();
        if load.plan == model.plan_bytes {
            load.plan.clear();
        }
        v1::PlannedReplica {
            load: Some(load),
            members: replica.members.iter().map(planned_member).collect(),
            index: replica.index as u32,
        }
    };
    v1::PlannedModel {
        spec: Some(desired_model(&model.spec, model.attempt)),
        plan_epoch: model.plan_epoch,
        plan: model.plan_bytes.clone(),
        topology_json: model.topology_json.clone(),
        wanted_replicas: model.wanted_replicas.unwrap_or(0) as u32,
        replicas: model.replicas.iter().filter(|replica| replica.is_live()).map(planned_replica).collect(),
        problem: model.problem.as_ref().map_or_else(String::new, |problem| problem.public.clone()),
        problem_detail: model.problem.as_ref().map_or_else(String::new, |problem| problem.detail.clone()),
        failed_attempts: model.failed_attempts,
        has_started: model.has_started,
        superseded_epoch: model.superseded_epoch,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::store::Versioned;

    fn planned(name: &str, policy: &str) -> v1::PlannedModel {
        let spec = v1::DesiredModel { name: name.into(), policy: policy.into(), ..Default::default() };
        v1::PlannedModel { spec: Some(spec), plan_epoch: 3, ..Default::default() }
    }

    #[test]
    fn what_cannot_be_read_stays_in_the_plan() {
        let mut ledger = Ledger::new(None);
        let (foreign, known) = (planned("b", "of-a-later-version=3"), planned("c", "tensor=1"));
        let value = v1::PlanState { models: vec![foreign.clone(), known], leader_term: 1 };
        ledger.state.plan = Versioned { value: Arc::new(value), revision: 1 };
        let ours = |name: &str| {
            let spec = spec_of(&v1::DesiredModel { name: name.into(), policy: "auto".into(), ..Default::default() });
            (name.to_owned(), ModelState::new(spec.unwrap()))
        };
        let kept = ledger.plan_state(&[ours("a"), ours("d")].into()).models;
        let names: Vec<_> = kept.iter().map(|model| model.spec.clone().unwrap().name).collect();
        assert_eq!((names.join(" "), &kept[1]), ("a b d".to_owned(), &foreign));
    }
}
