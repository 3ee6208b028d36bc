//! One Generate stream: pulls tokens of a worker, turns them into deltas, ends with a finish or an error.
//! Invariants: nothing is read from the worker that the client has not room for (the transport's windows are the only
//! buffer); dropping it cancels the sequence on the worker; a broken replica or a passed deadline ends it at once.

use std::{future::Future, sync::Arc, time::Duration};

use lockstep_proto::{
    status::Class,
    v1::{self, generate_response::Event},
};
use tokio::{sync::watch, time::Instant};
use tonic::{Status, Streaming};

use super::output::Output;
use crate::{
    admission::Permit,
    error::RequestError,
    metrics::Metrics,
    served::{BreakCause, Replica, ReplicaLoad, ReplicaState},
};

/// How long a broken stream waits to learn from the planner why it broke.
const REASON_WAIT: Duration = Duration::from_millis(300);

/// What a stream holds as long as it runs.
pub struct Running {
    /// The client's or our id of it.
    pub request_id: String,
    /// Its place among the requests.
    pub permit: Permit,
    /// Its share of the replica's load.
    pub load: ReplicaLoad,
    /// When the client gives up.
    pub deadline: Option<Instant>,
    /// When it was accepted.
    pub accepted: Instant,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Where it is counted.
    pub metrics: Arc<Metrics>,
}

/// A running stream.
pub struct Generation {
    running: Running,
    state: watch::Receiver<ReplicaState>,
    events: Option<Streaming<v1::SequenceEvent>>,
    output: Output,
    finish: Option<v1::Finish>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    queue_ms: f64,
    received_tokens: u32,
    released_tokens: u32,
    outcome: &'static str,
}

impl Generation {
    /// Starts the sequence on the replica's leader.
    ///
    /// # Errors
    /// [`RequestError`] if the worker refuses it, the replica breaks or the deadline passes.
    pub async fn start(
        running: Running,
        request: v1::RunSequenceRequest,
        output: Output,
    ) -> Result<Self, RequestError> {
        let mut leader = running.load.replica.leader.clone();
        let mut state = running.load.replica.watch();
        let call = guarded(leader.run_sequence(request), &mut state, running.deadline).await?;
        let events = match call {
            Ok(response) => response.into_inner(),
            Err(status) => return Err(worker_error(&status, &running.load.replica).await),
        };
        Ok(Self {
            running,
            state,
            events: Some(events),
            output,
            finish: None,
            first_token: None,
            last_token: None,
            queue_ms: 0.0,
            received_tokens: 0,
            released_tokens: 0,
            outcome: Class::Cancelled.reason(),
        })
    }

    /// The next message; `None` after the last.
    pub async fn next(&mut self) -> Option<Result<v1::GenerateResponse, RequestError>> {
        loop {
            if let Some(finish) = self.finish.take() {
                self.events = None;
                return Some(Ok(self.response(Event::Finish(finish))));
            }
            match self.advance().await {
                Ok(None) => return None,
                Ok(Some(delta)) if delta.text.is_empty() && delta.token_ids.is_empty() => {}
                Ok(Some(delta)) => return Some(Ok(self.response(Event::Delta(delta)))),
                Err(error) => {
                    self.events = None;
                    self.outcome = error.class().reason();
                    tracing::info!(request_id = self.running.request_id, %error, "request failed");
                    return Some(Err(error));
                }
            }
        }
    }

    /// The next tokens of the worker as a delta, which may be empty; `None` after the end. Sets `finish` at the end.
    async fn advance(&mut self) -> Result<Option<v1::Delta>, RequestError> {
        let Some(events) = &mut self.events else { return Ok(None) };
        loop {
            let message = match guarded(events.message(), &mut self.state, self.running.deadline).await? {
                Ok(message) => message,
                Err(status) => return Err(worker_error(&status, &self.running.load.replica).await),
            };
            match message.map(|message| message.event) {
                Some(Some(v1::sequence_event::Event::Tokens(tokens))) => return self.take_tokens(tokens).map(Some),
                Some(Some(v1::sequence_event::Event::Finish(finish))) => return Ok(Some(self.take_finish(finish))),
                Some(None) => {}
                None => {
                    let ended = Class::WorkerLost.status("the worker ended the stream before it was finished");
                    return Err(worker_error(&ended, &self.running.load.replica).await);
                }
            }
        }
    }

    fn take_tokens(&mut self, tokens: v1::SequenceTokens) -> Result<v1::Delta, RequestError> {
        let now = Instant::now();
        let count = tokens.token_ids.len() as u32;
        match self.last_token {
            None => self.running.metrics.ttft.record(now - self.running.accepted),
            Some(last) => self.running.metrics.inter_token.record(now - last),
        }
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        self.received_tokens += count;
        self.queue_ms = tokens.queue_ms.unwrap_or(self.queue_ms);
        self.running.metrics.completion_tokens.increment(u64::from(count));
        // The first tokens prove that the prompt is computed.
        let prompt = if self.received_tokens == count { self.running.prompt_tokens } else { 0 };
        self.running.load.done(u64::from(count + prompt));

        let mut delta = v1::Delta::default();
        let is_stopped =
            self.output.push(tokens, &mut delta).map_err(|error| RequestError::Internal(error.to_string()))?;
        self.released_tokens += delta.token_ids.len() as u32;
        if is_stopped {
            self.end(v1::FinishReason::Stop, 0);
        }
        Ok(delta)
    }

    fn take_finish(&mut self, finish: v1::SequenceFinish) -> v1::Delta {
        let mut delta = v1::Delta::default();
        let is_stopped = self.output.finish(&mut delta);
        let reason = if is_stopped { v1::FinishReason::Stop } else { finish.reason() };
        self.released_tokens += delta.token_ids.len() as u32;
        self.queue_ms = finish.timings.unwrap_or_default().queue_ms;
        self.end(reason, finish.usage.unwrap_or_default().cached_tokens);
        delta
    }

    /// Prepares the last message.
    fn end(&mut self, reason: v1::FinishReason, cached_tokens: u32) {
        let millis = |from: Instant, to: Option<Instant>| to.map_or(0.0, |to| (to - from).as_secs_f64() * 1e3);
        let timings = v1::Timings {
            queue_ms: self.queue_ms,
            ttft_ms: millis(self.running.accepted, self.first_token),
            decode_ms: self.first_token.map_or(0.0, |first| millis(first, self.last_token)),
        };
        let usage = v1::Usage {
            prompt_tokens: self.running.prompt_tokens,
            completion_tokens: self.released_tokens,
            cached_tokens,
        };
        self.outcome = match reason {
            v1::FinishReason::Stop => "stop",
            v1::FinishReason::Length => "length",
            v1::FinishReason::Cancelled => Class::Cancelled.reason(),
            v1::FinishReason::Error | v1::FinishReason::Unspecified => "error",
        };
        self.finish = Some(v1::Finish { reason: reason.into(), usage: Some(usage), timings: Some(timings) });
    }

    fn response(&self, event: Event) -> v1::GenerateResponse {
        v1::GenerateResponse { request_id: self.running.request_id.clone(), event: Some(event) }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.running.metrics.count_request(self.outcome);
    }
}

/// Waits for `work`, but not past the deadline or the end of the replica.
async fn guarded<T>(
    work: impl Future<Output = T>,
    state: &mut watch::Receiver<ReplicaState>,
    deadline: Option<Instant>,
) -> Result<T, RequestError> {
    let passed = async {
        match deadline {
            Some(deadline) => tokio::time::sleep_until(deadline).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        done = work => Ok(done),
        cause = broken(state) => Err(RequestError::ReplicaLost(cause)),
        () = passed => Err(RequestError::Deadline),
    }
}

/// Returns when the replica is broken, with the cause.
async fn broken(state: &mut watch::Receiver<ReplicaState>) -> BreakCause {
    match state.wait_for(|state| matches!(state, ReplicaState::Broken(_))).await.as_deref() {
        Ok(ReplicaState::Broken(breakage)) => breakage.cause,
        _ => BreakCause::Unloaded,
    }
}

/// What a worker's status means for the client. The planner often knows better why a connection broke.
async fn worker_error(status: &Status, replica: &Replica) -> RequestError {
    let class = Class::of(status);
    tracing::info!(model = replica.model, class = class.reason(), error = status.message(), "a worker ended a request");
    match class {
        Class::StaleEpoch => {
            // It would refuse every other request too.
            replica.advance(ReplicaState::broken(BreakCause::WorkerFailed, status.message()));
            RequestError::ReplicaLost(broken(&mut replica.watch()).await)
        }
        Class::WorkerLost | Class::NotReady | Class::Cancelled | Class::ShuttingDown => {
            let cause = tokio::time::timeout(REASON_WAIT, broken(&mut replica.watch())).await;
            RequestError::ReplicaLost(cause.unwrap_or(BreakCause::WorkerFailed))
        }
        _ => RequestError::from_worker(status),
    }
}
