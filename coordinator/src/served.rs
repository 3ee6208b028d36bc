//! What is served: models, their replicas, and the text side of a model.
//! For: the planner publishes a [`ModelTable`], the router and the services read it without locks.
//! Invariant: a replica's state only moves forward: loading → ready → draining → broken.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use lockstep_model::{ChatTemplate, Tokenizer};
use lockstep_proto::v1::{self, worker_client::WorkerClient};
use lockstep_sharding::{Explanation, ModelShape, ReplicaPlan};
use tokio::{sync::watch, time::Instant};
use tonic::transport::Channel;

use crate::{cluster::Workers, config::ModelSpec, error::RequestError, router::prefix_index::PrefixIndex};

/// Desired models by name, with what became of them.
pub type ModelTable = Arc<BTreeMap<String, Arc<ServedModel>>>;

/// What a checkpoint says, as a worker reported it.
pub struct ModelDescription {
    /// Dimensions, for the planner.
    pub shape: ModelShape,
    /// Text to token ids and back.
    pub tokenizer: Tokenizer,
    /// How a conversation becomes a prompt, if the checkpoint says it.
    pub chat_template: Option<ChatTemplate>,
    /// End of sequence and end of turn.
    pub eos_token_ids: Vec<u32>,
}

/// A desired model at one moment.
pub struct ServedModel {
    /// What is wanted.
    pub spec: ModelSpec,
    /// Known once a worker described it.
    pub description: Option<Arc<ModelDescription>>,
    /// The newest plan, explained.
    pub plan: Option<Arc<Explanation>>,
    /// Its epoch; 0 before the first.
    pub plan_epoch: u64,
    /// Every replica, broken ones until they are replaced.
    pub replicas: Vec<Arc<Replica>>,
    /// Replicas to have, by the policy or else by the first plan; one before that.
    pub num_wanted: usize,
    /// Replicas that took requests when this was published.
    pub num_ready: usize,
    /// It has taken requests, or could have.
    pub has_served: bool,
    /// Why it does not serve, or not fully.
    pub problem: Option<Problem>,
    /// Attempts to describe, plan, load or serve that failed in a row.
    pub failed_attempts: u32,
}

impl ServedModel {
    /// Whether a replica takes requests.
    pub fn is_ready(&self) -> bool {
        self.replicas.iter().any(|replica| replica.is_ready())
    }

    /// Longest sequence that the newest plan, or else the model, allows.
    pub fn max_sequence_tokens(&self) -> usize {
        match (&self.plan, &self.description) {
            (Some(plan), _) => plan.max_sequence_tokens,
            (None, Some(description)) => description.shape.max_position_embeddings,
            (None, None) => 0,
        }
    }

    /// Why no replica takes requests.
    pub fn explain(&self) -> Problem {
        let progress = if self.replicas.is_empty() {
            "it is being planned"
        } else if self.replicas.iter().any(|replica| replica.is_stalled()) {
            "its replicas do not answer at present"
        } else {
            "it is being loaded"
        };
        self.problem.clone().unwrap_or_else(|| Problem::new(progress, progress))
    }

    /// What a request is told that it cannot serve now.
    pub fn not_ready(&self) -> RequestError {
        RequestError::NotReady { model: self.spec.name.clone(), problem: self.explain().public }
    }
}

/// What is wrong with a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// For clients: without workers, addresses and paths.
    pub public: String,
    /// For operators.
    pub detail: String,
}

impl Problem {
    /// One thing in two words.
    pub fn new(public: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { public: public.into(), detail: detail.into() }
    }

    /// It, and what led to it.
    pub fn with_cause(self, cause: Option<&Self>) -> Self {
        match cause {
            Some(cause) => {
                Self::new(format!("{}; {}", self.public, cause.public), format!("{}; {}", self.detail, cause.detail))
            }
            None => self,
        }
    }
}

/// What broke a replica, in words for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakCause {
    /// A registration ended.
    WorkerLost,
    /// A worker calls its part broken or does not hold it.
    WorkerFailed,
    /// A worker was drained.
    WorkerDrained,
    /// A worker could not load its part.
    NotLoaded,
    /// Another plan took the place of its own.
    Replanned,
    /// It is not wanted any more.
    Unloaded,
    /// The end of this process.
    ShuttingDown,
}

impl fmt::Display for BreakCause {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::WorkerLost => "a worker was lost",
            Self::WorkerFailed => "a worker failed",
            Self::WorkerDrained => "a worker was drained",
            Self::NotLoaded => "a worker could not load it",
            Self::Replanned => "another plan took its place",
            Self::Unloaded => "the model was unloaded",
            Self::ShuttingDown => "the coordinator is shutting down",
        })
    }
}

/// How a replica broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breakage {
    /// For clients.
    pub cause: BreakCause,
    /// For operators.
    pub detail: String,
}

/// Where a replica stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicaState {
    /// Its workers read weights and join their links.
    Loading,
    /// It takes requests.
    Ready,
    /// Its running requests finish, it gets no new ones.
    Draining,
    /// It never serves again, and why.
    Broken(Breakage),
}

impl ReplicaState {
    /// The last state of a replica.
    pub fn broken(cause: BreakCause, detail: impl Into<String>) -> Self {
        Self::Broken(Breakage { cause, detail: detail.into() })
    }
}

/// A worker that holds ranks of a replica, as it was registered when the plan was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its id.
    pub worker_id: String,
    /// Its registration.
    pub session: u64,
}

/// One full copy of a model on its ranks.
pub struct Replica {
    /// Model name.
    pub model: String,
    /// Version of the plan it belongs to.
    pub plan_epoch: u64,
    /// Its number among the live replicas of the model, of whatever plan; in its own plan it is `load.replica`.
    pub index: usize,
    /// Its part of the plan.
    pub plan: ReplicaPlan,
    /// What its workers are told to load.
    pub load: v1::LoadReplicaRequest,
    /// Its workers, each once; the leader first.
    pub members: Vec<Member>,
    /// The leader's service.
    pub leader: WorkerClient<Channel>,
    /// When this coordinator planned it, or heard of it.
    pub planned_at: Instant,
    /// Progress of loading, bytes.
    pub loaded_bytes: AtomicU64,
    /// Bytes to load.
    pub total_bytes: AtomicU64,
    state: watch::Sender<ReplicaState>,
    ready_at: OnceLock<Instant>,
    draining_at: OnceLock<Instant>,
    is_leaving: AtomicBool,
    is_stalled: AtomicBool,
    outstanding_tokens: AtomicU64,
    num_requests: AtomicU64,
    /// All that it was ever charged with, to take turns by.
    pub charged_tokens: AtomicU64,
    /// The prefixes that it is believed to hold.
    pub prefixes: PrefixIndex,
}

impl Replica {
    /// A replica that starts to load. `members` is not empty.
    pub fn new(
        load: v1::LoadReplicaRequest,
        plan: ReplicaPlan,
        members: Vec<Member>,
        leader: WorkerClient<Channel>,
        index: usize,
    ) -> Self {
        Self {
            model: load.model.clone(),
            plan_epoch: load.plan_epoch,
            index,
            plan,
            load,
            members,
            leader,
            planned_at: Instant::now(),
            loaded_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(0),
            state: watch::Sender::new(ReplicaState::Loading),
            ready_at: OnceLock::new(),
            draining_at: OnceLock::new(),
            is_leaving: AtomicBool::new(false),
            is_stalled: AtomicBool::new(false),
            outstanding_tokens: AtomicU64::new(0),
            num_requests: AtomicU64::new(0),
            charged_tokens: AtomicU64::new(0),
            prefixes: PrefixIndex::default(),
        }
    }

    /// Its state now.
    pub fn state(&self) -> ReplicaState {
        self.state.borrow().clone()
    }

    /// Its state now and later.
    pub fn watch(&self) -> watch::Receiver<ReplicaState> {
        self.state.subscribe()
    }

    /// Whether it takes requests.
    pub fn is_ready(&self) -> bool {
        *self.state.borrow() == ReplicaState::Ready && !self.is_stalled()
    }

    /// Whether its steps do not come back at present.
    pub fn is_stalled(&self) -> bool {
        self.is_stalled.load(Ordering::Relaxed)
    }

    /// Notes what its leader says of its steps.
    pub fn set_stalled(&self, is_stalled: bool) {
        if self.is_stalled.swap(is_stalled, Ordering::Relaxed) != is_stalled {
            let Self { model, plan_epoch, index, .. } = self;
            tracing::warn!(model, plan_epoch, replica = index, is_stalled, "a replica's steps stopped or went on");
        }
    }

    /// Whether another replica is to take its place: one of its workers drains, or its plan is superseded.
    pub fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Relaxed)
    }

    /// Notes that another replica is to take its place.
    pub fn leave(&self) {
        self.is_leaving.store(true, Ordering::Relaxed);
    }

    /// Whether it holds devices: everything but broken.
    pub fn is_live(&self) -> bool {
        !matches!(*self.state.borrow(), ReplicaState::Broken(_))
    }

    /// What broke it, if it is broken.
    pub fn break_cause(&self) -> Option<BreakCause> {
        match &*self.state.borrow() {
            ReplicaState::Broken(breakage) => Some(breakage.cause),
            _ => None,
        }
    }

    /// When it began to take requests.
    pub fn ready_at(&self) -> Option<Instant> {
        self.ready_at.get().copied()
    }

    /// When it ceased to take requests.
    pub fn draining_at(&self) -> Option<Instant> {
        self.draining_at.get().copied()
    }

    /// Moves on to `state`; says whether it did. A state is never left for an earlier one.
    pub fn advance(&self, state: ReplicaState) -> bool {
        let order = |state: &ReplicaState| match state {
            ReplicaState::Loading => 0,
            ReplicaState::Ready => 1,
            ReplicaState::Draining => 2,
            ReplicaState::Broken(_) => 3,
        };
        self.state.send_if_modified(|current| {
            let is_later = order(&state) > order(current);
            if is_later {
                match state {
                    ReplicaState::Ready => drop(self.ready_at.get_or_init(Instant::now)),
                    ReplicaState::Draining => drop(self.draining_at.get_or_init(Instant::now)),
                    ReplicaState::Loading | ReplicaState::Broken(_) => {}
                }
                *current = state;
            }
            is_later
        })
    }

    /// Tokens that its requests may still have to compute.
    pub fn outstanding_tokens(&self) -> u64 {
        self.outstanding_tokens.load(Ordering::Relaxed)
    }

    /// Requests that it runs.
    pub fn num_requests(&self) -> u64 {
        self.num_requests.load(Ordering::Acquire)
    }

    /// Whether a worker's report is about a part of it.
    pub fn is_meant_by(&self, report: &v1::ReplicaReport) -> bool {
        report.model == self.model && report.plan_epoch == self.plan_epoch && report.replica == self.load.replica
    }

    /// What its leader last reported of it.
    pub fn report<'a>(&self, live: &'a Workers) -> Option<&'a v1::ReplicaReport> {
        self.report_of(self.members.first()?, live)
    }

    /// What one of its workers last reported of it.
    pub fn report_of<'a>(&self, member: &Member, live: &'a Workers) -> Option<&'a v1::ReplicaReport> {
        let record = live.get(&member.worker_id).filter(|record| record.session == member.session)?;
        record.replicas.iter().find(|report| self.is_meant_by(report))
    }

    /// The engine's numbers as its leader last reported them, which it does once all ranks are ready.
    pub fn engine(&self, live: &Workers) -> Option<v1::EngineStatus> {
        self.report(live)?.engine
    }

    /// Whether it has a rank on that registration of a worker.
    pub fn uses(&self, worker_id: &str, session: u64) -> bool {
        self.members.iter().any(|member| member.worker_id == worker_id && member.session == session)
    }
}

/// A request's share of a replica's load; given back on drop.
pub struct ReplicaLoad {
    /// The replica.
    pub replica: Arc<Replica>,
    tokens: u64,
    /// Of these, tokens that it computes before it yields the first.
    uncomputed: u64,
}

impl ReplicaLoad {
    /// Counts a request that lacks `uncomputed` tokens of its prompt and yields up to `num_new_tokens`.
    pub fn new(replica: Arc<Replica>, uncomputed: u64, num_new_tokens: u64) -> Self {
        let tokens = uncomputed + num_new_tokens;
        replica.outstanding_tokens.fetch_add(tokens, Ordering::Relaxed);
        replica.charged_tokens.fetch_add(tokens, Ordering::Relaxed);
        replica.num_requests.fetch_add(1, Ordering::AcqRel);
        Self { replica, tokens, uncomputed }
    }

    /// It has yielded tokens; the first prove that all before them are computed.
    pub fn yielded(&mut self, num_tokens: u64) {
        let uncomputed = std::mem::take(&mut self.uncomputed);
        self.give_back(num_tokens + uncomputed);
    }

    fn give_back(&mut self, tokens: u64) {
        let tokens = tokens.min(self.tokens);
        self.tokens -= tokens;
        self.replica.outstanding_tokens.fetch_sub(tokens, Ordering::Relaxed);
    }
}

impl Drop for ReplicaLoad {
    fn drop(&mut self) {
        self.give_back(self.tokens);
        self.replica.num_requests.fetch_sub(1, Ordering::AcqRel);
    }
}
