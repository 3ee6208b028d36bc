//! What the reconciler remembers of one desired model. Plain state; time is passed in.

use std::{sync::Arc, time::Duration};

use lockstep_sharding::{Explanation, Policy};
use tokio::{sync::oneshot, time::Instant};

use crate::{
    config::ModelSpec,
    error::RequestError,
    served::{BreakCause, Breakage, ModelDescription, Problem, Replica, ServedModel},
};

/// First wait after a failed attempt; doubles with each further one.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
/// Longest wait between attempts.
const LONGEST_BACKOFF: Duration = Duration::from_secs(30);
/// Between two looks whether there are devices enough.
const DEVICES_POLL: Duration = Duration::from_secs(1);
/// A replica that fails after less than this was not worth its load: the next one is waited with.
const LEAST_SERVICE: Duration = Duration::from_secs(10);

/// A model on its way out.
pub struct Removal {
    /// When its requests are cut off.
    pub deadline: Instant,
    /// Who waits for it.
    pub replies: Vec<oneshot::Sender<Result<(), RequestError>>>,
}

/// One desired model.
pub struct ModelState {
    /// What is wanted.
    pub spec: ModelSpec,
    /// Known once a worker described it.
    pub description: Option<Arc<ModelDescription>>,
    /// How often a worker was asked for that.
    pub num_asked: usize,
    /// A describe or plan task is under way.
    pub is_busy: bool,
    /// The newest plan, explained.
    pub plan: Option<Arc<Explanation>>,
    /// Its epoch.
    pub plan_epoch: u64,
    /// It in the codec of `sharding`, and the topology that it was made for as JSON, as other coordinators are told.
    pub plan_bytes: Vec<u8>,
    /// See `plan_bytes`.
    pub topology_json: Vec<u8>,
    /// How often the model was asked for again, as far as that was obeyed.
    pub attempt: u64,
    /// Every replica, broken ones until the next plan.
    pub replicas: Vec<Arc<Replica>>,
    /// Replicas of plans up to this epoch serve only until others take their place.
    pub superseded_epoch: u64,
    /// Replicas to have, by the policy or else by the first plan.
    pub wanted_replicas: Option<usize>,
    /// Why it does not serve, or not fully.
    pub problem: Option<Problem>,
    /// How its last replica broke, until every wanted one serves again.
    pub last_break: Option<Problem>,
    /// A replica took requests.
    pub has_served: bool,
    /// It has served since there was a worker at all: the workers that are left are planned for, however few.
    pub has_started: bool,
    /// Attempts that failed in a row; a replica that failed soon counts as one.
    pub failed_attempts: u32,
    /// The worker that the next plan does without if it can: one of a replica that could not be loaded.
    pub avoided: Option<String>,
    /// No attempt before this.
    pub retry_at: Option<Instant>,
    /// Set when it is being unloaded.
    pub removal: Option<Removal>,
    /// Whether workers that came since its plan would serve it better.
    pub growth: Growth,
    /// What its last load took, if this coordinator saw it.
    pub load_time: Option<Duration>,
}

/// What a new plan over all devices would bring a model that is served in full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// Nobody has asked since workers came or went.
    Unknown,
    /// Nothing worth the while.
    None,
    /// So many replicas more, on devices that are free.
    Add(usize),
    /// Others instead, on devices that are free.
    Move,
    /// A better cut, with the devices that the present replicas hold.
    Replace,
}

impl ModelState {
    /// A model that nothing was done for yet.
    pub fn new(spec: ModelSpec) -> Self {
        let wanted_replicas = spec.policy.replicas;
        Self {
            spec,
            description: None,
            num_asked: 0,
            is_busy: false,
            plan: None,
            plan_epoch: 0,
            plan_bytes: Vec::new(),
            topology_json: Vec::new(),
            attempt: 0,
            replicas: Vec::new(),
            superseded_epoch: 0,
            wanted_replicas,
            problem: None,
            last_break: None,
            has_served: false,
            has_started: false,
            failed_attempts: 0,
            avoided: None,
            retry_at: None,
            removal: None,
            growth: Growth::Unknown,
            load_time: None,
        }
    }

    /// Takes over other settings for the same checkpoint.
    pub fn change_settings(&mut self, spec: ModelSpec) {
        let is_cut_otherwise = (self.spec.policy, self.spec.plan_options) != (spec.policy, spec.plan_options);
        tracing::info!(model = spec.name, policy = %spec.policy, min_workers = spec.min_workers, is_cut_otherwise, "other settings");
        self.spec = spec;
        (self.retry_at, self.failed_attempts) = (None, 0);
        if is_cut_otherwise {
            self.supersede();
        }
    }

    /// Wants all replicas planned anew; those that there are serve until then.
    pub fn supersede(&mut self) {
        self.superseded_epoch = self.plan_epoch;
        self.wanted_replicas = self.spec.policy.replicas;
        self.growth = Growth::Unknown;
    }

    /// Replicas that hold devices until others take their place.
    pub fn superseded(&self) -> impl Iterator<Item = &Arc<Replica>> {
        self.replicas.iter().filter(|replica| replica.is_live() && self.is_superseded(replica))
    }

    /// Whether another replica is to take its place because its plan is superseded.
    pub fn is_superseded(&self, replica: &Replica) -> bool {
        replica.plan_epoch <= self.superseded_epoch
    }

    /// Whether none of the replicas that are to stay takes requests yet.
    pub fn lacks_successor(&self) -> bool {
        !self.staying().any(|replica| replica.is_ready())
    }

    /// Replicas that hold devices and are not about to give them up.
    pub fn num_staying(&self) -> usize {
        self.staying().count()
    }

    /// See [`Self::num_staying`].
    pub fn staying(&self) -> impl Iterator<Item = &Arc<Replica>> {
        let stays =
            |replica: &&Arc<Replica>| replica.is_live() && !replica.is_leaving() && !self.is_superseded(replica);
        self.replicas.iter().filter(stays)
    }

    /// Whether a replica that leaves may go on taking requests: it is the last that does, and another one is on its way.
    pub fn holds_out(&self) -> bool {
        self.problem.is_none() && self.lacks_successor()
    }

    /// Replicas to have.
    pub fn num_wanted(&self) -> usize {
        self.wanted_replicas.unwrap_or(1)
    }

    /// Replicas that take requests.
    pub fn num_ready(&self) -> usize {
        self.replicas.iter().filter(|replica| replica.is_ready()).count()
    }

    /// Whether a new attempt to describe or plan should start now.
    pub fn needs_attempt(&self, now: Instant) -> bool {
        let is_short = self.num_staying() < self.wanted_replicas.unwrap_or(1);
        self.needs_description(now) || (self.may_try(now) && is_short)
    }

    /// Whether a worker should be asked now what the checkpoint says.
    pub fn needs_description(&self, now: Instant) -> bool {
        self.may_try(now) && self.description.is_none()
    }

    fn may_try(&self, now: Instant) -> bool {
        !self.is_busy && self.removal.is_none() && self.retry_at.is_none_or(|at| at <= now)
    }

    /// The policy for what is missing.
    pub fn missing_policy(&self) -> Policy {
        match (self.num_staying(), self.wanted_replicas) {
            (staying, Some(wanted)) if staying > 0 => {
                Policy { replicas: Some(wanted - staying.min(wanted)), ..self.spec.policy }
            }
            _ => self.spec.policy,
        }
    }

    /// Whether every wanted replica serves and nothing is under way.
    pub fn is_complete(&self) -> bool {
        let num_staying = self.num_staying();
        !self.is_busy
            && self.removal.is_none()
            && self.problem.is_none()
            && num_staying >= self.wanted_replicas.unwrap_or(1).max(1)
            && self.num_ready() == num_staying
            && self.replicas.iter().filter(|replica| replica.is_live()).count() == num_staying
    }

    /// Notes a failed attempt and when the next may come.
    pub fn note_failure(&mut self, problem: String, now: Instant) {
        tracing::warn!(model = self.spec.name, problem, "model cannot be served");
        self.back_off(now);
        self.problem = Some(Problem::new("it cannot be loaded", problem).with_cause(self.last_break.as_ref()));
    }

    fn back_off(&mut self, now: Instant) {
        let doublings = self.failed_attempts.min(10);
        self.retry_at = Some(now + (FIRST_BACKOFF * 2_u32.pow(doublings)).min(LONGEST_BACKOFF));
        self.failed_attempts += 1;
    }

    /// Notes that too few workers are there.
    pub fn note_waiting_for_workers(&mut self, num_usable: usize, needed: usize) {
        let text = format!("waits for workers: {num_usable} of {needed} are registered");
        self.problem = Some(Problem::new(text.clone(), text).with_cause(self.last_break.as_ref()));
    }

    /// Notes that too few devices are there, which is no failure: more may come.
    pub fn note_waiting_for_devices(&mut self, shortage: &dyn std::fmt::Display, now: Instant) {
        let text = format!("waits for devices: {shortage}");
        self.problem = Some(Problem::new(text.clone(), text).with_cause(self.last_break.as_ref()));
        self.retry_at = Some(now + DEVICES_POLL);
    }

    /// Notes that a replica broke, or was let go with its model.
    pub fn note_break(&mut self, replica: &Replica, breakage: &Breakage, now: Instant) {
        let (model, index, plan_epoch) = (&self.spec.name, replica.index, replica.plan_epoch);
        if self.removal.is_some() || breakage.cause == BreakCause::Replanned {
            tracing::info!(model, replica = index, plan_epoch, "replica freed");
            return;
        }
        tracing::warn!(model, replica = index, plan_epoch, reason = breakage.detail, "replica broke");
        let served = replica.ready_at().map_or(Duration::ZERO, |ready_at| now.saturating_duration_since(ready_at));
        if served >= LEAST_SERVICE {
            self.failed_attempts = 0;
        } else if breakage.cause == BreakCause::WorkerFailed {
            self.back_off(now);
        }
        let broke = |reason: &dyn std::fmt::Display| format!("replica {index} broke: {reason}");
        let problem = Problem::new(broke(&breakage.cause), broke(&breakage.detail));
        self.problem.get_or_insert_with(|| problem.clone());
        self.last_break = Some(problem);
    }

    /// Notes that a replica could not be loaded. One of its workers may not reach another, or lack the file, and which one
    /// is not known: plans do without each of them in turn.
    pub fn note_unloadable(&mut self, replica: &Replica, problem: &str, now: Instant) {
        self.note_failure(format!("replica {} cannot be loaded: {problem}", replica.index), now);
        let turn = self.failed_attempts as usize % replica.members.len().max(1);
        self.avoided = replica.members.get(turn).map(|member| member.worker_id.clone());
    }

    /// Notes that it serves, if it does.
    pub fn note_service(&mut self) {
        let serves = self.num_ready() > 0;
        self.has_served |= serves;
        self.has_started |= serves;
    }

    /// Without so many workers nothing is planned: `min_workers` holds back the first plan only, since what has served is
    /// to go on wherever it can.
    pub fn num_needed_workers(&self) -> usize {
        if self.has_started || self.num_staying() > 0 { 1 } else { self.spec.min_workers.max(1) }
    }

    /// Forgets the problem if every wanted replica serves. Failed attempts count until one has served for a while.
    pub fn note_progress(&mut self) {
        self.note_service();
        if self.staying().filter(|replica| replica.is_ready()).count() >= self.wanted_replicas.unwrap_or(1) {
            self.problem = None;
            self.last_break = None;
            self.avoided = None;
            self.retry_at = None;
        }
    }

    /// Whether `served` is what [`Self::snapshot`] would give.
    pub fn is_shown_by(&self, served: &ServedModel) -> bool {
        self.spec == served.spec
            && self.description.is_some() == served.description.is_some()
            && self.plan_epoch == served.plan_epoch
            && self.problem == served.problem
            && self.failed_attempts == served.failed_attempts
            && (self.num_wanted(), self.num_ready(), self.has_served)
                == (served.num_wanted, served.num_ready, served.has_served)
            && self.replicas.len() == served.replicas.len()
            && self.replicas.iter().zip(&served.replicas).all(|(ours, shown)| Arc::ptr_eq(ours, shown))
    }

    /// What others may see.
    pub fn snapshot(&self) -> ServedModel {
        ServedModel {
            spec: self.spec.clone(),
            description: self.description.clone(),
            plan: self.plan.clone(),
            plan_epoch: self.plan_epoch,
            replicas: self.replicas.clone(),
            num_wanted: self.num_wanted(),
            num_ready: self.num_ready(),
            has_served: self.has_served,
            problem: self.problem.clone(),
            failed_attempts: self.failed_attempts,
        }
    }
}
