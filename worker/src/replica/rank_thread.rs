//! One rank's thread: meets the others, loads its weights, then executes steps until its orders end.
//! Invariant: it ends by itself when the leader closes its channel or link, and takes the replica down when it fails.

use std::{
    net::SocketAddr,
    ops::ControlFlow,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use lockstep_executor::{Executor, RankShape, WeightLoader, step::StepPlan};
use lockstep_kernels::{Device, KernelError, ops::Candidates};
use lockstep_model::Checkpoint;
use lockstep_telemetry::trace::Moment;
use serde::{Deserialize, Serialize};

use super::{LEADER_RANK, ReplicaSpec, health::Health, leader::Event, receive::receive, step_trace::RankTracer};
use crate::{
    WorkerError,
    collective::{LinkKey, LinkListener, MessageLink, RankLinks, RankLinksConfig},
    config::spin,
    devices::DeviceTask,
    metrics::{LastScratch, RankMeter},
    rank::RankPeers,
};

/// Longest wait for the other ranks to appear; they open the checkpoint before they do.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// What a rank of the last stage makes of a step.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RankResult {
    /// The plan's.
    pub step_id: u64,
    /// One for each sampled sequence, of this rank's part of the vocabulary.
    pub candidates: Vec<Candidates>,
}

/// What a rank of another worker says to the leader.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum RankMessage {
    /// First: it can execute steps.
    Ready,
    /// Then, from the last stage: one for each step.
    Result(RankResult),
}

/// Where a rank's plans come from and its results go.
pub(super) enum Orders {
    /// The engine is in this process.
    Local { plans: Receiver<Arc<StepPlan>>, results: SyncSender<Event> },
    /// The leader is another worker; a control link leads there.
    Remote,
}

/// What a rank thread says while it loads.
pub(super) enum LoadEvent {
    /// Bytes that it will read.
    Total(u64),
    /// Bytes of one more slice.
    Loaded(u64),
    /// It can execute steps. Rank 0 hands over the control links of the ranks of other workers.
    Ready(Vec<MessageLink>),
    /// It cannot.
    Failed(WorkerError),
}

/// What a rank thread starts with.
pub(super) struct RankThread {
    pub rank: usize,
    pub spec: Arc<ReplicaSpec>,
    pub listener: Arc<LinkListener>,
    pub health: Health,
    pub last_scratch: Arc<LastScratch>,
}

/// A rank's whole life, once its device is known.
struct RankTask<'a> {
    thread: &'a RankThread,
    checkpoint: Arc<Checkpoint>,
    orders: Orders,
    events: SyncSender<LoadEvent>,
}

impl DeviceTask for RankTask<'_> {
    type Output = ();

    fn run<D: Device>(self, open: impl FnOnce() -> Result<D, KernelError>) {
        self.thread.run(open, self.checkpoint, self.orders, self.events);
    }
}

/// What executes the steps of one of several ranks.
type RankExecutor<D> = Executor<D, RankPeers<D>>;

/// An executor whose steps are counted and, where that is asked for, traced.
struct ObservedExecutor<D: Device> {
    executor: RankExecutor<D>,
    meter: RankMeter,
    tracer: RankTracer,
}

impl<D: Device> ObservedExecutor<D> {
    fn execute(&mut self, plan: &StepPlan) -> Result<Option<Vec<Candidates>>, WorkerError> {
        let traced = plan.trace.map(|trace| (trace, Moment::now()));
        if traced.is_some_and(|(trace, _)| trace.is_detailed) {
            self.executor.peers().keep_calls();
        }
        let start = Instant::now();
        let candidates = self.executor.execute(plan)?;
        let duration = start.elapsed();
        let traffic = self.executor.peers().take_traffic();
        self.meter.step(duration, &traffic, self.executor.scratch());
        if let Some((trace, start)) = traced {
            self.tracer.record(trace, plan.step_id, start, &traffic);
        }
        Ok(candidates)
    }
}

impl RankThread {
    /// Starts the thread. It lets go of the checkpoint, with all its tokens, before it reports to be ready.
    pub fn spawn(
        self,
        checkpoint: Arc<Checkpoint>,
        orders: Orders,
        events: SyncSender<LoadEvent>,
    ) -> Result<JoinHandle<()>, WorkerError> {
        let name = format!("rank-{}", self.rank);
        let run = move || {
            let _guard = self.health.guard(format!("the thread of rank {}", self.rank));
            self.open_and_run(checkpoint, orders, events);
        };
        std::thread::Builder::new()
            .name(name)
            .spawn(run)
            .map_err(|error| WorkerError::Server(format!("no thread for a rank: {error}")))
    }

    /// Runs with the device that the plan names, of whatever type it is.
    fn open_and_run(&self, checkpoint: Arc<Checkpoint>, orders: Orders, events: SyncSender<LoadEvent>) {
        let plan = self.spec.ranks().find(|plan| plan.rank == self.rank);
        let local_rank = plan.map_or(0, |plan| plan.local_rank);
        let task = RankTask { thread: self, checkpoint, orders, events: events.clone() };
        if let Err(error) = self.spec.devices.with_device(local_rank, task) {
            self.fail_load(error, &events);
        }
    }

    fn fail_load(&self, error: WorkerError, events: &SyncSender<LoadEvent>) {
        self.health.fail(&format!("rank {}: {error}", self.rank));
        // If nobody follows the load any more, it has failed already.
        let _ = events.send(LoadEvent::Failed(error));
    }

    fn run<D: Device>(
        &self,
        open: impl FnOnce() -> Result<D, KernelError>,
        checkpoint: Arc<Checkpoint>,
        orders: Orders,
        events: SyncSender<LoadEvent>,
    ) {
        let is_remote = matches!(orders, Orders::Remote);
        let loaded = self.load(open, &checkpoint, is_remote, &events);
        drop(checkpoint);
        let loaded = loaded.and_then(|(executor, mut control)| {
            let leader = if is_remote { control.pop() } else { None };
            if let Some(leader) = &leader {
                leader.send(&RankMessage::Ready)?;
            }
            Ok((
                ObservedExecutor { executor, meter: self.meter()?, tracer: RankTracer::new(&self.spec, self.rank) },
                leader,
                control,
            ))
        });
        let (executor, leader, control) = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                self.fail_load(error, &events);
                return;
            }
        };
        let _ = events.send(LoadEvent::Ready(control));
        drop(events);
        let executed = match (orders, leader) {
            (Orders::Local { plans, results }, _) => self.obey_channel(executor, &plans, &results),
            (Orders::Remote, Some(leader)) => self.obey_link(executor, &leader),
            (Orders::Remote, None) => Err(WorkerError::Mismatch("it has no link to the leader".to_owned())),
        };
        if let Err(error) = executed {
            self.health.fail(&format!("rank {}: {error}", self.rank));
        }
    }

    fn meter(&self) -> Result<RankMeter, WorkerError> {
        let Self { rank, spec, .. } = self;
        let missing = || WorkerError::Mismatch(format!("it has no rank {rank}"));
        let (_, plan) = spec.plan.find_rank(*rank).ok_or_else(missing)?;
        let last_scratch = Arc::clone(&self.last_scratch);
        Ok(RankMeter::new(&spec.metrics, &spec.model, spec.index, plan, last_scratch))
    }

    /// Meets the others first: then a peer that dies is noticed while this one loads.
    fn load<D: Device>(
        &self,
        open: impl FnOnce() -> Result<D, KernelError>,
        checkpoint: &Checkpoint,
        is_remote: bool,
        events: &SyncSender<LoadEvent>,
    ) -> Result<(RankExecutor<D>, Vec<MessageLink>), WorkerError> {
        let Self { rank, spec, .. } = self;
        let config = checkpoint.config();
        let shape = RankShape::new(config, &spec.plan, *rank)?;
        let limits = spec.limits(config.vocab_size);
        let links = RankLinks::new(self.listener.clone(), self.links_config(limits.max_message_bytes()))?;
        let control = self.control_links(&links, is_remote)?;
        let opening = Instant::now();
        let mut device = open()?;
        let opened_in = opening.elapsed();
        let peers = RankPeers::connect(&links, &spec.plan, &shape, &mut device)?;
        let loading = Instant::now();
        let progress = |event| match events.send(event) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_nobody) => ControlFlow::Break(()),
        };
        let loader = WeightLoader {
            device: &device,
            checkpoint,
            plan: &spec.plan,
            shape: &shape,
            progress: &|bytes| progress(LoadEvent::Loaded(bytes)),
        };
        // Whoever does not follow any more is noticed at the first slice.
        let _ = progress(LoadEvent::Total(loader.total_bytes()));
        let weights = loader.load()?;
        let (dtype, plan) = (shape.dtype, spec.plan.find_rank(*rank).map(|(_, plan)| plan));
        let (device_name, reserving) = (device.name().to_owned(), Instant::now());
        let mut executor = Executor::new(device, config, shape, limits, weights, peers)?;
        let preparing = Instant::now();
        executor.prepare()?;
        tracing::info!(
            rank,
            device = device_name,
            dtype = %dtype,
            dtype_reason = plan.map(|plan| &plan.dtype_reason),
            open_ms = opened_in.as_millis() as u64,
            weights_ms = (reserving - loading).as_millis() as u64,
            reserve_ms = (preparing - reserving).as_millis() as u64,
            prepare_ms = preparing.elapsed().as_millis() as u64,
            "rank loaded"
        );
        Ok((executor, control))
    }

    /// How long it looks again before it sleeps.
    fn spin(&self) -> Duration {
        let hosts = || self.spec.rank_addresses.iter().map(SocketAddr::ip);
        // Ranks of other workers are taken to have as many threads as this one.
        let num_neighbours = hosts().filter(|host| hosts().nth(self.rank) == Some(*host)).count();
        spin(num_neighbours * self.spec.devices.threads_per_rank())
    }

    fn links_config(&self, max_message_bytes: usize) -> RankLinksConfig {
        let spec = &self.spec;
        RankLinksConfig {
            key: LinkKey { model: spec.model.clone(), replica: spec.replica, plan_epoch: spec.plan_epoch },
            secret: spec.secret.clone(),
            rank: self.rank,
            addresses: spec.rank_addresses.clone(),
            connect_timeout: CONNECT_TIMEOUT,
            timeout: spec.collective_timeout,
            max_message_bytes,
            spin: self.spin(),
            abort: self.health.abort_handle(),
        }
    }

    /// A rank of another worker: the link to the leader. Rank 0: links to all ranks of other workers. Else: none.
    fn control_links(&self, links: &RankLinks, is_remote: bool) -> Result<Vec<MessageLink>, WorkerError> {
        if is_remote {
            return Ok(vec![links.message_link(LEADER_RANK)?]);
        }
        if self.rank != LEADER_RANK {
            return Ok(Vec::new());
        }
        let others = self.spec.ranks().filter(|rank| rank.worker_id != self.spec.worker_id);
        others.map(|rank| links.message_link(rank.rank)).collect()
    }

    fn obey_channel<D: Device>(
        &self,
        mut executor: ObservedExecutor<D>,
        plans: &Receiver<Arc<StepPlan>>,
        results: &SyncSender<Event>,
    ) -> Result<(), WorkerError> {
        // Closed: the engine has ended.
        let spin = self.spin();
        while let Ok(plan) = receive(plans, spin, Duration::MAX) {
            if let Some(candidates) = executor.execute(&plan)? {
                let result = RankResult { step_id: plan.step_id, candidates };
                if results.send(Event::Result { rank: self.rank, result }).is_err() {
                    break;
                }
            }
        }
        Ok(())
    }

    fn obey_link<D: Device>(&self, mut executor: ObservedExecutor<D>, leader: &MessageLink) -> Result<(), WorkerError> {
        loop {
            let plan: StepPlan = leader.receive(None)?;
            if let Some(candidates) = executor.execute(&plan)? {
                leader.send(&RankMessage::Result(RankResult { step_id: plan.step_id, candidates }))?;
            }
        }
    }
}
