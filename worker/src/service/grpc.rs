//! The gRPC service `Worker`.
//! Invariant: every call is answered with a class of `proto::status`; blocking work runs off the async threads; a
//! stream that the caller drops cancels its sequence.

use std::{net::SocketAddr, path::PathBuf, pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, StreamExt, stream};
use lockstep_kernels::cpu::return_freed_memory;
use lockstep_model::Checkpoint;
use lockstep_proto::{
    status::Class,
    v1::{self, worker_server::Worker},
};
use lockstep_telemetry::trace::{self, OpenTelemetrySpanExt};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_util::{sync::CancellationToken, task::task_tracker::TaskTrackerToken};
use tonic::{Request, Response, Status};
use tracing::Span;

use super::{
    WorkerState,
    replicas::{LoadState, ReplicaKey},
    wire,
};
use crate::{
    WorkerError,
    engine::PrefixChanges,
    replica::{LeaderHandle, Prefixes, Replica, ReplicaSpec, RunningSequence},
};

/// Most outputs put into one message.
const MAX_BATCHED_OUTPUTS: usize = 256;

/// Shortest and longest time between heartbeats that a coordinator may ask for, milliseconds.
const HEARTBEAT_PERIODS_MS: std::ops::RangeInclusive<u32> = 50..=10_000;

/// Serves `Worker` from the process's state.
pub(super) struct WorkerService(pub Arc<WorkerState>);

type EventStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for WorkerService {
    async fn describe_model(
        &self,
        request: Request<v1::DescribeModelRequest>,
    ) -> Result<Response<v1::DescribeModelResponse>, Status> {
        let source = PathBuf::from(request.into_inner().source);
        let description = tokio::task::spawn_blocking(move || {
            let description = describe(&source);
            // The tokenizer, which only the coordinator keeps, was made of many small pieces.
            return_freed_memory();
            description
        })
        .await;
        let description = description.map_err(|error| Class::Internal.status(format!("describing failed: {error}")))?;
        description.map(Response::new).map_err(|error| wire::status_of(&error))
    }

    type LoadReplicaStream = EventStream<v1::LoadReplicaProgress>;

    async fn load_replica(
        &self,
        request: Request<v1::LoadReplicaRequest>,
    ) -> Result<Response<Self::LoadReplicaStream>, Status> {
        if self.0.is_draining() {
            return Err(Class::ShuttingDown.status("the worker is draining"));
        }
        let request = request.into_inner();
        let key = ReplicaKey { model: request.model.clone(), plan_epoch: request.plan_epoch, replica: request.replica };
        let term = request.leader_term;
        let spec = self.spec(request).await?;
        self.0.obey(term)?;
        tracing::info!(model = key.model, plan_epoch = spec.plan_epoch, replica = key.replica, "loading replica");
        let state = self.0.replicas.load(key, spec, self.0.links.clone())?;
        Ok(Response::new(progress_stream(state)))
    }

    async fn unload_replica(
        &self,
        request: Request<v1::UnloadReplicaRequest>,
    ) -> Result<Response<v1::UnloadReplicaResponse>, Status> {
        let v1::UnloadReplicaRequest { model, plan_epoch, replica, leader_term } = request.into_inner();
        self.0.obey(leader_term)?;
        tracing::info!(model, plan_epoch, replica, "unloading replica");
        self.0.replicas.unload(&ReplicaKey { model, plan_epoch, replica }).await;
        Ok(Response::new(v1::UnloadReplicaResponse {}))
    }

    type RunSequenceStream = EventStream<v1::SequenceEvent>;

    async fn run_sequence(
        &self,
        request: Request<v1::RunSequenceRequest>,
    ) -> Result<Response<Self::RunSequenceStream>, Status> {
        let span = trace::sequence_span(request.metadata().as_ref());
        let request = request.into_inner();
        trace::set_request_id(&span, &request.request_id);
        let running_token = self.0.running.token();
        let key = ReplicaKey { model: request.model.clone(), plan_epoch: request.plan_epoch, replica: request.replica };
        let replica = self.0.replicas.find(&key)?;
        let leader = leader_of(&replica)?;
        let problem = replica.problem();
        let sequence = wire::sequence_request(request, replica.vocab_size())?;
        drop(replica);
        let running = leader.submit_traced(sequence, trace::sampled(&span)).await;
        let running = running.map_err(|error| wire::status_of(&error))?;
        span.in_scope(|| tracing::debug!("sequence queued"));
        Ok(Response::new(event_stream(running, problem, span, running_token)))
    }

    type FollowPrefixesStream = EventStream<v1::PrefixChanges>;

    async fn follow_prefixes(
        &self,
        request: Request<v1::FollowPrefixesRequest>,
    ) -> Result<Response<Self::FollowPrefixesStream>, Status> {
        let v1::FollowPrefixesRequest { model, plan_epoch, replica } = request.into_inner();
        let leader = leader_of(&*self.0.replicas.find(&ReplicaKey { model, plan_epoch, replica })?)?;
        let prefixes = leader.follow_prefixes().await.map_err(|error| wire::status_of(&error))?;
        let prefixes = prefixes.ok_or_else(|| Class::NotFound.status("this worker keeps no prefixes"))?;
        Ok(Response::new(prefix_stream(prefixes)))
    }

    async fn drain(&self, _request: Request<v1::DrainRequest>) -> Result<Response<v1::DrainResponse>, Status> {
        self.0.start_draining();
        Ok(Response::new(v1::DrainResponse {}))
    }

    type FollowHeartbeatsStream = EventStream<v1::Heartbeat>;

    async fn follow_heartbeats(
        &self,
        request: Request<v1::FollowHeartbeatsRequest>,
    ) -> Result<Response<Self::FollowHeartbeatsStream>, Status> {
        let v1::FollowHeartbeatsRequest { session, period_ms } = request.into_inner();
        if session != self.0.session {
            return Err(Class::StaleEpoch.status(format!("session {session:x} of the worker has ended")));
        }
        if !HEARTBEAT_PERIODS_MS.contains(&period_ms) {
            let (least, most) = (HEARTBEAT_PERIODS_MS.start(), HEARTBEAT_PERIODS_MS.end());
            return Err(
                Class::InvalidRequest.status(format!("period_ms: is {period_ms}, allowed are {least} to {most}"))
            );
        }
        let mut interval = tokio::time::interval(Duration::from_millis(period_ms.into()));
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let follower = self.0.followers.join();
        let followed = (Arc::clone(&self.0), interval, follower);
        let heartbeats = stream::unfold(followed, |(state, mut interval, follower)| async move {
            state.closing.run_until_cancelled(interval.tick()).await?;
            Some((Ok(state.heartbeat()), (state, interval, follower)))
        });
        Ok(Response::new(Box::pin(heartbeats)))
    }
}

impl WorkerService {
    async fn spec(&self, request: v1::LoadReplicaRequest) -> Result<ReplicaSpec, Status> {
        let config = &self.0.config;
        let mut plan = lockstep_sharding::decode(&request.plan)
            .map_err(|error| Class::InvalidRequest.status(error.to_string()))?;
        let replica = request.replica as usize;
        if replica >= plan.replicas.len() {
            return Err(Class::InvalidRequest
                .status(format!("replica {replica} is asked for, the plan has {}", plan.replicas.len())));
        }
        let mut rank_addresses = Vec::with_capacity(request.rank_addresses.len());
        for address in &request.rank_addresses {
            rank_addresses.push(resolve(address).await?);
        }
        Ok(ReplicaSpec {
            worker_id: config.worker_id.clone(),
            model: request.model,
            source: PathBuf::from(request.source),
            plan_epoch: request.plan_epoch,
            replica,
            index: request.index as usize,
            plan: plan.replicas.swap_remove(replica),
            block_size: plan.block_size,
            max_sequence_tokens: plan.max_sequence_tokens,
            max_num_sequences: plan.max_num_sequences,
            max_step_tokens: plan.max_step_tokens,
            max_waiting_sequences: config.max_waiting_sequences,
            is_prefix_caching: config.is_prefix_caching,
            secret: request.secret,
            rank_addresses,
            devices: self.0.devices.clone(),
            collective_timeout: config.collective_timeout,
            metrics: Arc::clone(&self.0.metrics),
            cancel: CancellationToken::new(),
        })
    }
}

fn leader_of(replica: &Replica) -> Result<LeaderHandle, Status> {
    let none = || Class::InvalidRequest.status("this worker does not lead the replica");
    replica.leader().cloned().ok_or_else(none)
}

async fn resolve(address: &str) -> Result<SocketAddr, Status> {
    let problem = |what: String| Class::InvalidRequest.status(format!("rank_addresses has {address:?}: {what}"));
    let mut found = tokio::net::lookup_host(address).await.map_err(|error| problem(error.to_string()))?;
    found.next().ok_or_else(|| problem("it resolves to nothing".to_owned()))
}

fn describe(source: &std::path::Path) -> Result<v1::DescribeModelResponse, WorkerError> {
    let checkpoint = Checkpoint::open(source)?;
    let tokenizer = checkpoint.tokenizer()?;
    let special = tokenizer.config();
    Ok(v1::DescribeModelResponse {
        shape: lockstep_sharding::codec::encode_shape(checkpoint.shape())?,
        tokenizer_json: tokenizer.to_json()?,
        chat_template: checkpoint.chat_template().unwrap_or_default().to_owned(),
        bos_token_id: special.bos_token_id,
        add_bos_token: special.add_bos_token,
        eos_token_ids: special.eos_token_ids.clone(),
    })
}

/// Follows a load to its end; intermediate states may be skipped.
fn progress_stream(state: watch::Receiver<LoadState>) -> EventStream<v1::LoadReplicaProgress> {
    let messages = WatchStream::new(state).map(|LoadState { loaded_bytes, total_bytes, outcome }| match outcome {
        None => Ok(v1::LoadReplicaProgress { loaded_bytes, total_bytes, ready: false }),
        Some(Ok(_)) => Ok(v1::LoadReplicaProgress { loaded_bytes, total_bytes, ready: true }),
        Some(Err(status)) => Err(status),
    });
    // Ends after the outcome, or if the loading thread is gone without one.
    let ended = stream::once(async { Err(Class::Internal.status("the load ended without an outcome")) });
    Box::pin(messages.chain(ended).scan(false, |is_over, message| {
        let was_over = *is_over;
        *is_over |= message.as_ref().map_or(true, |progress| progress.ready);
        std::future::ready((!was_over).then_some(message))
    }))
}

/// All prefixes, then their changes, until the replica ends or the follower falls behind.
fn prefix_stream(prefixes: Prefixes) -> EventStream<v1::PrefixChanges> {
    let Prefixes { held, changes } = prefixes;
    let first = v1::PrefixChanges { added: held, evicted: Vec::new() };
    let changes = stream::unfold(changes, |mut changes| async move {
        let PrefixChanges { added, evicted } = Arc::unwrap_or_clone(changes.recv().await.ok()?);
        Some((Ok(v1::PrefixChanges { added, evicted }), changes))
    });
    Box::pin(stream::once(async { Ok(first) }).chain(changes))
}

struct EventState {
    running: RunningSequence,
    problem: watch::Receiver<Option<String>>,
    /// Lasts as long as the stream.
    span: Span,
    /// Keeps the drain waiting.
    _token: TaskTrackerToken,
}

/// What the span of a sequence says at its end.
fn describe_end(span: &Span, finish: &v1::SequenceFinish) {
    let usage = finish.usage.unwrap_or_default();
    let v1::Timings { queue_ms, ttft_ms, decode_ms } = finish.timings.unwrap_or_default();
    span.set_attribute("gen_ai.usage.input_tokens", i64::from(usage.prompt_tokens));
    span.set_attribute("gen_ai.usage.output_tokens", i64::from(usage.completion_tokens));
    span.set_attribute("lockstep.cached_tokens", i64::from(usage.cached_tokens));
    span.set_attribute("lockstep.queue_ms", queue_ms);
    span.set_attribute("lockstep.ttft_ms", ttft_ms);
    span.set_attribute("lockstep.decode_ms", decode_ms);
}

/// A sequence's outputs as events: what is ready together goes into one message, nothing waits for more.
fn event_stream(
    running: RunningSequence,
    problem: watch::Receiver<Option<String>>,
    span: Span,
    token: TaskTrackerToken,
) -> EventStream<v1::SequenceEvent> {
    let state = Some(EventState { running, problem, span, _token: token });
    let batches = stream::unfold(state, |state| async move {
        let mut state = state?;
        let mut outputs = Vec::new();
        if state.running.outputs.recv_many(&mut outputs, MAX_BATCHED_OUTPUTS).await == 0 {
            let reason = state.problem.borrow().clone().unwrap_or_else(|| "the sequence was dropped".to_owned());
            return Some((vec![Err(Class::WorkerLost.status(reason))], None));
        }
        let events = wire::sequence_events(outputs);
        let is_over = events.last().is_some_and(wire::is_last);
        if let Some(v1::sequence_event::Event::Finish(finish)) = events.last().and_then(|last| last.event.as_ref()) {
            describe_end(&state.span, finish);
        }
        Some((events.into_iter().map(Ok).collect(), (!is_over).then_some(state)))
    });
    Box::pin(batches.flat_map(stream::iter))
}
