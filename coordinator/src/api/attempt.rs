//! One sequence on one replica: started there, then read until it ends, the replica breaks or the deadline passes.
//! Invariants: nothing is read from the worker that nobody has asked for (the transport's windows are the only buffer);
//! dropping it cancels the sequence on the worker and gives its load back.
//! Not here: what follows a break ([`super::placement`]).

use std::{future::Future, sync::Arc};

use lockstep_proto::{
    status::Class,
    v1::{self, sequence_event::Event},
};
use lockstep_telemetry::trace;
use tokio::{sync::watch, time::Instant};
use tonic::{Status, Streaming};

use crate::{
    error::RequestError,
    served::{BreakCause, Replica, ReplicaLoad, ReplicaState},
};

/// A sequence that a replica has taken.
pub struct Attempt {
    load: ReplicaLoad,
    state: watch::Receiver<ReplicaState>,
    events: Streaming<v1::SequenceEvent>,
    deadline: Option<Instant>,
}

impl Attempt {
    /// Gives the sequence to the leader of the replica that carries the load.
    ///
    /// # Errors
    /// [`RequestError::ReplicaLost`] if this replica takes no sequence any more, what the worker has against this one, or
    /// [`RequestError::Deadline`].
    pub async fn start(
        load: ReplicaLoad,
        request: v1::RunSequenceRequest,
        deadline: Option<Instant>,
    ) -> Result<Self, RequestError> {
        let mut leader = load.replica.leader.clone();
        let mut state = load.replica.watch();
        let mut request = tonic::Request::new(request);
        trace::inject(request.metadata_mut().as_mut());
        let events = guarded(leader.run_sequence(request), &mut state, deadline)
            .await?
            .map_err(|status| worker_error(&status, &load.replica))?
            .into_inner();
        Ok(Self { load, state, events, deadline })
    }

    /// The replica that runs it.
    pub fn replica(&self) -> &Arc<Replica> {
        &self.load.replica
    }

    /// What the worker says next.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn next(&mut self) -> Result<Event, RequestError> {
        loop {
            let message = guarded(self.events.message(), &mut self.state, self.deadline).await?;
            match message.map_err(|status| worker_error(&status, &self.load.replica))? {
                Some(v1::SequenceEvent { event: Some(event) }) => {
                    if let Event::Tokens(tokens) = &event {
                        self.load.yielded(tokens.token_ids.len() as u64);
                    }
                    return Ok(event);
                }
                Some(_) => {}
                None => {
                    let ended = Class::WorkerLost.status("the worker ended the stream before it was finished");
                    return Err(worker_error(&ended, &self.load.replica));
                }
            }
        }
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

/// What a worker's status means for the request.
fn worker_error(status: &Status, replica: &Replica) -> RequestError {
    let class = Class::of(status);
    tracing::info!(model = replica.model, class = class.reason(), error = status.message(), "a worker ended a request");
    match class {
        Class::StaleEpoch => {
            // It would refuse every other request too.
            replica.advance(ReplicaState::broken(BreakCause::WorkerFailed, status.message()));
        }
        Class::WorkerLost | Class::NotReady | Class::Cancelled | Class::ShuttingDown => {}
        _ => return RequestError::from_worker(status),
    }
    RequestError::ReplicaLost(replica.break_cause().unwrap_or(BreakCause::WorkerFailed))
}
