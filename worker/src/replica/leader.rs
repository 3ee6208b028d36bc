//! The engine's thread on the leader, and the handle that submits sequences to it.
//! Invariant: the thread alone owns the engine. It never waits for a client: outputs go to channels as long as the
//! sequence can become; a receiver that is gone cancels its sequence before the next step.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use lockstep_executor::step::StepPlan;
use lockstep_telemetry::trace::{SpanContext, StepSpan};
use tokio::sync::{broadcast, mpsc, oneshot};

use super::{
    ReplicaSpec,
    health::Health,
    pulse::{GIVE_UP, Heart, Pulse},
    rank_thread::{RankMessage, RankResult},
    receive::receive,
    step_results::StepResults,
    step_trace::TracedSequences,
};
use crate::{
    WorkerError,
    collective::MessageLink,
    config::engine_spin,
    engine::{Engine, EngineError, EngineStatus, PrefixChanges, SequenceId, SequenceOutput, SequenceRequest},
    metrics::{EngineMeter, StepMark},
};

/// Least time for which the engine's thread sleeps if nothing wakes it.
const LEAST_WAIT: Duration = Duration::from_millis(100);

/// Changes of the prefixes that wait for a slow follower, one a step; then he is cut off.
const PREFIX_CHANGES: usize = 256;

/// What wakes the engine's thread.
pub(super) enum Event {
    /// A new sequence.
    Submit(Submission),
    /// Somebody wants to know which prefixes there are.
    FollowPrefixes(oneshot::Sender<Prefixes>),
    /// A rank of the last stage has finished a step.
    Result { rank: usize, result: RankResult },
    /// The replica broke.
    Wake,
}

/// A sequence on its way to the engine.
pub(super) struct Submission {
    request: SequenceRequest,
    trace: Option<SpanContext>,
    reply: oneshot::Sender<Result<RunningSequence, EngineError>>,
}

/// The prefixes that an engine holds.
pub struct Prefixes {
    /// All of them, as short names of full blocks.
    pub held: Vec<u64>,
    /// What changes from then on; closed when the replica ends, and lagging for who is slow.
    pub changes: broadcast::Receiver<Arc<PrefixChanges>>,
}

/// The engine's inbox: room for everything that may be admitted, and for the results of the steps in flight.
pub(super) fn inbox(spec: &ReplicaSpec) -> (SyncSender<Event>, Receiver<Event>) {
    let num_results = spec.plan.world_size() * (spec.plan.stages.len() + 1);
    // Twice as many may wait where several tenants do.
    sync_channel(2 * spec.max_waiting_sequences + spec.max_num_sequences + num_results + 1)
}

/// Submits sequences to the engine's thread.
#[derive(Clone)]
pub struct LeaderHandle {
    inbox: SyncSender<Event>,
    status: Arc<Mutex<EngineStatus>>,
    pulse: Pulse,
    health: Health,
    max_waiting_sequences: usize,
    is_prefix_caching: bool,
}

/// A submitted sequence. Dropping it cancels the sequence.
pub struct RunningSequence {
    /// Its outputs; closed without `Finished` if the replica broke (see [`Replica::problem`](super::Replica::problem)).
    pub outputs: mpsc::Receiver<SequenceOutput>,
}

impl LeaderHandle {
    /// Hands a sequence to the engine.
    ///
    /// # Errors
    /// [`WorkerError::Engine`] if it is refused, [`WorkerError::ReplicaBroken`].
    pub async fn submit(&self, request: SequenceRequest) -> Result<RunningSequence, WorkerError> {
        self.submit_traced(request, None).await
    }

    /// The same, with the sequence's span if it is sampled: the steps that it takes part in are traced.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub async fn submit_traced(
        &self,
        request: SequenceRequest,
        trace: Option<SpanContext>,
    ) -> Result<RunningSequence, WorkerError> {
        let broken = || WorkerError::ReplicaBroken(self.health.reason());
        if self.health.is_broken() {
            return Err(broken());
        }
        let (reply, answer) = oneshot::channel();
        self.send(Event::Submit(Submission { request, trace, reply }))?;
        Ok(answer.await.map_err(|_| broken())??)
    }

    /// The prefixes that the engine holds, and will hold; `None` if it keeps none.
    ///
    /// # Errors
    /// [`WorkerError::ReplicaBroken`], or [`WorkerError::Engine`] if its inbox is full.
    pub async fn follow_prefixes(&self) -> Result<Option<Prefixes>, WorkerError> {
        if !self.is_prefix_caching {
            return Ok(None);
        }
        let (reply, answer) = oneshot::channel();
        self.send(Event::FollowPrefixes(reply))?;
        answer.await.map(Some).map_err(|_| WorkerError::ReplicaBroken(self.health.reason()))
    }

    fn send(&self, event: Event) -> Result<(), WorkerError> {
        self.inbox.try_send(event).map_err(|error| match error {
            TrySendError::Full(_) => {
                let limit = self.max_waiting_sequences;
                WorkerError::Engine(EngineError::Overloaded { waiting: limit, limit })
            }
            TrySendError::Disconnected(_) => WorkerError::ReplicaBroken(self.health.reason()),
        })
    }

    /// The engine's last numbers.
    pub fn status(&self) -> EngineStatus {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Since the last step, be it a canary, that came back from every rank; `None` before the first.
    pub fn last_step_age(&self) -> Option<Duration> {
        self.pulse.age(Instant::now())
    }

    /// Why the replica should get nothing new for now: its steps do not come back. If they do not for long, it breaks.
    pub fn stall(&self) -> Option<String> {
        let overdue = self.pulse.overdue(Instant::now())?;
        if overdue > GIVE_UP {
            let waited = overdue.as_secs();
            self.health.fail(&format!("a step that should have come back {waited} s ago did not: a rank is stuck"));
        }
        Some(format!("a step should have come back {:.1} s ago: a rank is stuck or slow", overdue.as_secs_f64()))
    }
}

/// A rank of another worker.
pub(super) struct RemoteRank {
    pub rank: usize,
    pub link: Arc<MessageLink>,
}

/// State of the engine's thread.
pub(super) struct EngineThread {
    engine: Engine,
    health: Health,
    inbox: SyncSender<Event>,
    events: Receiver<Event>,
    local: Vec<SyncSender<Arc<StepPlan>>>,
    remote: Vec<Arc<MessageLink>>,
    last_stage: Vec<usize>,
    results: StepResults,
    sequences: HashMap<SequenceId, mpsc::Sender<SequenceOutput>>,
    /// What the last update yielded; handed out after the next step is under way.
    outputs: Vec<(SequenceId, SequenceOutput)>,
    status: Arc<Mutex<EngineStatus>>,
    meter: EngineMeter,
    heart: Heart,
    /// Steps in flight, oldest first; a traced one has a span.
    steps: VecDeque<(StepMark, Option<StepSpan>)>,
    traced: TracedSequences,
    prefix_followers: broadcast::Sender<Arc<PrefixChanges>>,
    max_sequence_tokens: usize,
    /// How long it looks again for the results of a step before it sleeps.
    spin: Duration,
}

impl EngineThread {
    /// An idle engine over these ranks, and its handle.
    pub fn new(
        spec: &ReplicaSpec,
        health: Health,
        local: Vec<SyncSender<Arc<StepPlan>>>,
        (inbox, events): (SyncSender<Event>, Receiver<Event>),
    ) -> (Self, LeaderHandle) {
        let engine = Engine::new(spec.engine_config());
        let status = Arc::new(Mutex::new(engine.status(Instant::now())));
        let num_layers = spec.plan.stages.last().map_or(1, |stage| stage.layers.end);
        let heart = Heart::new(num_layers, spec.plan.stages.len(), Instant::now());
        let handle = LeaderHandle {
            inbox: inbox.clone(),
            status: status.clone(),
            pulse: heart.pulse(),
            health: health.clone(),
            max_waiting_sequences: spec.max_waiting_sequences,
            is_prefix_caching: spec.is_prefix_caching,
        };
        let last_stage: Vec<usize> =
            spec.plan.stages.last().map(|stage| stage.ranks.iter().map(|rank| rank.rank).collect()).unwrap_or_default();
        let thread = Self {
            engine,
            health,
            inbox,
            events,
            local,
            remote: Vec::new(),
            results: StepResults::new(last_stage.clone()),
            last_stage,
            sequences: HashMap::new(),
            outputs: Vec::new(),
            status,
            meter: EngineMeter::new(&spec.metrics, &spec.model, spec.index),
            heart,
            steps: VecDeque::new(),
            traced: TracedSequences::new(spec),
            prefix_followers: broadcast::Sender::new(PREFIX_CHANGES),
            max_sequence_tokens: spec.max_sequence_tokens,
            spin: engine_spin(spec.local_ranks().len() * spec.devices.threads_per_rank()),
        };
        (thread, handle)
    }

    /// Starts the engine's thread, and one for each rank of another worker that sends results.
    ///
    /// # Errors
    /// [`WorkerError::Server`] if a thread cannot be started.
    pub fn start(mut self, remote: Vec<RemoteRank>, threads: &mut Vec<JoinHandle<()>>) -> Result<(), WorkerError> {
        for RemoteRank { rank, link } in remote {
            if self.last_stage.contains(&rank) {
                let reader = ResultReader { rank, link: link.clone(), inbox: self.inbox.clone() };
                let health = self.health.clone();
                threads.push(spawn(format!("results-{rank}"), health, reader, ResultReader::run)?);
            }
            self.remote.push(link);
        }
        let health = self.health.clone();
        threads.push(spawn("engine".to_owned(), health, self, Self::run)?);
        Ok(())
    }

    fn run(&mut self) -> Result<(), WorkerError> {
        loop {
            while let Ok(event) = self.events.try_recv() {
                self.handle(event)?;
            }
            if self.health.is_broken() {
                return Ok(());
            }
            self.cancel_abandoned();
            while let Some(plan) = self.engine.schedule(Instant::now()) {
                self.broadcast(plan)?;
            }
            self.try_ranks()?;
            self.hand_out();
            self.tell_followers();
            self.report();
            let spin = if self.engine.has_steps_in_flight() { self.spin } else { Duration::ZERO };
            // When steps are in flight only their results are waited for; the pulse is looked at by others.
            let wait = self.heart.until_canary(Instant::now()).max(LEAST_WAIT);
            match receive(&self.events, spin, wait) {
                Ok(event) => self.handle(event)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Sends a canary if nothing came back from the ranks for a while and they have nothing to do.
    fn try_ranks(&mut self) -> Result<(), WorkerError> {
        let now = Instant::now();
        self.heart.beat(now);
        if self.heart.until_canary(now).is_zero()
            && let Some(canary) = self.engine.canary(now)
        {
            self.broadcast(canary)?;
        }
        Ok(())
    }

    fn report(&mut self) {
        let status = self.engine.status(Instant::now());
        self.meter.observe(&status);
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    fn handle(&mut self, event: Event) -> Result<(), WorkerError> {
        match event {
            Event::Submit(submission) => self.submit(submission),
            Event::FollowPrefixes(reply) => {
                self.tell_followers();
                let (held, changes) = (self.engine.prefixes(), self.prefix_followers.subscribe());
                // Who is gone follows nothing.
                let _ = reply.send(Prefixes { held, changes });
            }
            Event::Result { rank, result } => {
                self.results.add(rank, result)?;
                while let Some(result) = self.results.next_complete() {
                    let now = Instant::now();
                    let is_canary = self.heart.returned(now);
                    // Its span, if it has one, ends here.
                    if let Some((step, _span)) = self.steps.pop_front().filter(|_| !is_canary) {
                        self.meter.step(step, now);
                    }
                    self.outputs.extend(self.engine.update(result, now));
                }
            }
            Event::Wake => {}
        }
        Ok(())
    }

    fn submit(&mut self, Submission { request, trace, reply }: Submission) {
        let capacity = request.sampling.max_tokens.min(self.max_sequence_tokens) + 1;
        let added = self.engine.add(request, Instant::now()).map(|sequence_id| {
            let (sender, outputs) = mpsc::channel(capacity);
            self.sequences.insert(sequence_id, sender);
            if let Some(context) = trace {
                self.traced.add(sequence_id, context);
            }
            RunningSequence { outputs }
        });
        // A caller that is gone drops the receiver, and with it the sequence.
        let _ = reply.send(added);
    }

    fn tell_followers(&mut self) {
        let changes = self.engine.take_prefix_changes();
        if !changes.is_empty() {
            // There may be none.
            let _ = self.prefix_followers.send(Arc::new(changes));
        }
    }

    fn cancel_abandoned(&mut self) {
        let (engine, meter, traced) = (&mut self.engine, &self.meter, &mut self.traced);
        self.sequences.retain(|sequence_id, outputs| {
            let is_abandoned = outputs.is_closed();
            if is_abandoned {
                engine.cancel(*sequence_id);
                meter.cancelled.inc();
                traced.remove(*sequence_id);
            }
            !is_abandoned
        });
    }

    /// Remote ranks first: their way is longer.
    fn broadcast(&mut self, mut plan: StepPlan) -> Result<(), WorkerError> {
        self.results.expect(&plan);
        let mark = StepMark::new(&plan, Instant::now());
        let span = self.traced.begin(&mut plan, &mark);
        self.steps.push_back((mark, span));
        self.heart.sent(&plan, Instant::now());
        for link in &self.remote {
            link.send(&plan)?;
        }
        let plan = Arc::new(plan);
        for rank in &self.local {
            if rank.send(plan.clone()).is_err() {
                return Err(WorkerError::ReplicaBroken("a rank's thread ended".to_owned()));
            }
        }
        Ok(())
    }

    fn hand_out(&mut self) {
        for (sequence_id, output) in self.outputs.drain(..) {
            self.meter.output(&output);
            let is_last = matches!(output, SequenceOutput::Finished { .. });
            if let Some(outputs) = self.sequences.get(&sequence_id) {
                // There is room for all of its outputs; a receiver that is gone is noticed before the next step.
                let _ = outputs.try_send(output);
            }
            if is_last {
                self.sequences.remove(&sequence_id);
                self.traced.remove(sequence_id);
            }
        }
    }
}

/// Forwards the results of a rank of another worker to the engine.
struct ResultReader {
    rank: usize,
    link: Arc<MessageLink>,
    inbox: SyncSender<Event>,
}

impl ResultReader {
    fn run(&mut self) -> Result<(), WorkerError> {
        loop {
            match self.link.receive(None)? {
                RankMessage::Result(result) => {
                    if self.inbox.send(Event::Result { rank: self.rank, result }).is_err() {
                        return Ok(());
                    }
                }
                RankMessage::Ready => {
                    return Err(WorkerError::Link { peer: self.rank, what: "was ready twice".to_owned() });
                }
            }
        }
    }
}

/// A thread whose error or panic breaks the replica. `state` is dropped after that: what its channels' other ends find
/// closed has a reason by then.
fn spawn<T: Send + 'static>(
    name: String,
    health: Health,
    state: T,
    run: impl FnOnce(&mut T) -> Result<(), WorkerError> + Send + 'static,
) -> Result<JoinHandle<()>, WorkerError> {
    let guarded = {
        let name = name.clone();
        move || {
            // Locals are dropped in reverse order, also by a panic: the guard speaks first.
            let mut state = state;
            let _guard = health.guard(format!("the thread {name}"));
            if let Err(error) = run(&mut state) {
                health.fail(&error.to_string());
            }
        }
    };
    std::thread::Builder::new()
        .name(name)
        .spawn(guarded)
        .map_err(|error| WorkerError::Server(format!("no thread for the engine: {error}")))
}

#[cfg(test)]
mod tests;
