//! Where a request runs: on the replica that it was given to, and when that breaks on another one.
//! Invariants: the next replica is given the prompt and every token that was received, so that the sequence goes on where
//! it stopped; a wait ends by the deadline, or without one by the failover timeout; a request that breaks its replicas
//! ([`Suspicion`]) is given to no other; none moves whose model is unloaded, or whose worker has something against the
//! request itself.

use std::{sync::Arc, time::Duration};

use lockstep_proto::{
    status::{Class, RETRY_AFTER},
    v1,
};
use tokio::time::Instant;

use super::{
    attempt::Attempt,
    span,
    suspicion::{Suspicion, Turns},
};
use crate::{
    error::RequestError,
    metrics::Metrics,
    router::{
        Router,
        choice::{Work, choose},
    },
    served::{ModelDescription, ModelTable, Replica, ReplicaLoad, ServedModel},
};

/// How long a replica that lost or refused a request is not asked again, unless it breaks: the planner knows by then.
const REST: Duration = Duration::from_millis(300);

/// What a request needs to find replicas.
#[derive(Clone)]
pub struct Failover {
    /// Knows the replicas.
    pub router: Router,
    /// Longest wait for another replica of a request without a deadline.
    pub timeout: Duration,
    /// Where moves are counted.
    pub metrics: Arc<Metrics>,
    /// Requests under which replicas broke take turns.
    pub turns: Turns,
}

/// A request and the replicas that it met.
pub struct Placement {
    failover: Failover,
    /// The checkpoint that it was tokenized for.
    description: Arc<ModelDescription>,
    request: v1::RunSequenceRequest,
    deadline: Option<Instant>,
    /// Replicas that lost or refused it, and until when they are not asked again.
    avoided: Vec<(Arc<Replica>, Instant)>,
    suspicion: Suspicion,
    first_tried: Option<Instant>,
    last_tried: Option<Instant>,
    was_taken: bool,
    has_moved: bool,
    num_moves: u64,
}

impl Placement {
    /// A request that no replica was asked for yet. Its plan epoch and replica are filled in here.
    pub fn new(
        failover: Failover,
        description: Arc<ModelDescription>,
        request: v1::RunSequenceRequest,
        deadline: Option<Instant>,
    ) -> Self {
        Self {
            suspicion: Suspicion::new(failover.turns.clone()),
            failover,
            description,
            request,
            deadline,
            avoided: Vec::new(),
            first_tried: None,
            last_tried: None,
            was_taken: false,
            has_moved: false,
            num_moves: 0,
        }
    }

    /// Starts it on the best replica that there is now, or, if that is lost or full at this moment, on another.
    ///
    /// # Errors
    /// [`RequestError::NotReady`] if there is none now; what the worker has against the request; [`Self::again`]'s.
    pub async fn first(&mut self) -> Result<Attempt, RequestError> {
        // Not the table of before it was tokenized: replicas come and go meanwhile.
        let model = self.model_in(&self.failover.router.models())?;
        let load = choose(&model, Work::of(&self.request), |_| true).ok_or_else(|| model.not_ready())?;
        match self.try_on(load).await {
            Ok(attempt) => Ok(attempt),
            Err((replica, error)) => self.place_after(replica, error).await,
        }
    }

    /// Goes on elsewhere after `error` ended an attempt.
    ///
    /// # Errors
    /// `error` if no replica can help; [`RequestError::Deadline`], [`RequestError::NotResumed`] or
    /// [`RequestError::BrokeReplicas`] if none did.
    pub async fn again(&mut self, attempt: Attempt, error: RequestError) -> Result<Attempt, RequestError> {
        let replica = Arc::clone(attempt.replica());
        drop(attempt);
        if error.is_about_the_replica() {
            let (request_id, model) = (&self.request.request_id, &self.request.model);
            let (num_output_tokens, plan_epoch) = (self.request.num_output_tokens, replica.plan_epoch);
            tracing::warn!(request_id, model, replica = replica.index, plan_epoch, num_output_tokens, %error, "a running request lost its replica");
        }
        if error.may_be_the_requests_fault() {
            self.suspicion.broke().map_err(|count| RequestError::BrokeReplicas { count })?;
        }
        self.place_after(replica, error).await
    }

    /// Notes tokens that the present replica has yielded.
    pub fn record(&mut self, token_ids: &[u32]) {
        self.request.token_ids.extend_from_slice(token_ids);
        self.request.num_output_tokens += token_ids.len() as u32;
        self.suspicion.clear();
    }

    /// Whether all tokens that were asked for are there.
    pub fn is_complete(&self) -> bool {
        self.request.num_output_tokens >= self.max_tokens()
    }

    /// Whether it has moved since this was last asked.
    pub fn take_has_moved(&mut self) -> bool {
        std::mem::take(&mut self.has_moved)
    }

    /// How often it has moved.
    pub fn num_moves(&self) -> u64 {
        self.num_moves
    }

    /// How much later than the first replica the last one was asked.
    pub fn delay(&self) -> Duration {
        self.first_tried.zip(self.last_tried).map_or(Duration::ZERO, |(first, last)| last - first)
    }

    async fn place_after(&mut self, replica: Arc<Replica>, error: RequestError) -> Result<Attempt, RequestError> {
        let (begin, is_running) = (Instant::now(), self.was_taken);
        self.suspicion.turn(self.deadline.unwrap_or(begin + self.failover.timeout)).await;
        let (mut replica, mut error) = (replica, error);
        loop {
            self.avoid(&replica, &error)?;
            let load = self.wait(begin, &replica, error).await?;
            match self.try_on(load).await {
                Ok(attempt) if !is_running => return Ok(attempt),
                Ok(attempt) => {
                    self.has_moved = true;
                    self.num_moves += 1;
                    self.failover.metrics.moved_requests.inc();
                    span::moved(attempt.replica());
                    let (request_id, model, replica) =
                        (&self.request.request_id, &self.request.model, attempt.replica());
                    let (plan_epoch, waited) = (replica.plan_epoch, begin.elapsed());
                    tracing::info!(
                        request_id,
                        model,
                        replica = replica.index,
                        plan_epoch,
                        ?waited,
                        "a request was moved"
                    );
                    return Ok(attempt);
                }
                Err(next) => (replica, error) = next,
            }
        }
    }

    async fn try_on(&mut self, load: ReplicaLoad) -> Result<Attempt, (Arc<Replica>, RequestError)> {
        let replica = Arc::clone(&load.replica);
        let now = Instant::now();
        self.first_tried.get_or_insert(now);
        self.last_tried = Some(now);
        let request = v1::RunSequenceRequest {
            plan_epoch: replica.plan_epoch,
            replica: replica.load.replica,
            ..self.request.clone()
        };
        let attempt = Attempt::start(load, request, self.deadline).await.map_err(|error| (replica, error))?;
        self.was_taken = true;
        Ok(attempt)
    }

    /// Leaves a replica alone for a while; gives the error back if that is no help.
    fn avoid(&mut self, replica: &Arc<Replica>, error: &RequestError) -> Result<(), RequestError> {
        let rest = match error {
            error if error.is_about_the_replica() => REST,
            RequestError::Worker { class: Class::Overloaded, retry_after, .. } => retry_after.unwrap_or(RETRY_AFTER),
            error => return Err(error.clone()),
        };
        self.avoided.retain(|(other, _)| !Arc::ptr_eq(other, replica) && other.is_live());
        self.avoided.push((Arc::clone(replica), Instant::now() + rest));
        Ok(())
    }

    /// The best replica that is not avoided, as soon as there is one. `begin`: when the request lost `replica`
    /// to `error`.
    async fn wait(
        &mut self,
        begin: Instant,
        replica: &Replica,
        error: RequestError,
    ) -> Result<ReplicaLoad, RequestError> {
        let mut models = self.failover.router.watch();
        let limit = self.deadline.unwrap_or(begin + self.failover.timeout);
        loop {
            let model = self.model_in(&models.borrow_and_update())?;
            let now = Instant::now();
            self.avoided.retain(|(_, until)| *until > now);
            let is_avoided = |other: &Replica| self.avoided.iter().any(|(avoided, _)| std::ptr::eq(&**avoided, other));
            // Replicas that refuse late, one after the other, must not keep it for ever.
            let is_late = now >= limit && self.last_tried.is_some_and(|tried| tried > begin);
            let choose = || choose(&model, Work::of(&self.request), |replica| !is_avoided(replica));
            if let Some(load) = (!is_late).then(choose).flatten() {
                return Ok(load);
            }
            if !self.was_taken && matches!(error, RequestError::Worker { .. }) {
                // Who was never accepted can be told to come back later.
                return Err(error);
            }
            if now >= limit {
                return Err(match (self.deadline, error) {
                    (Some(_), _) => RequestError::Deadline,
                    (None, RequestError::ReplicaLost(cause)) => RequestError::NotResumed {
                        cause: replica.break_cause().unwrap_or(cause),
                        waited: self.failover.timeout,
                        problem: model.explain().public,
                    },
                    (None, error) => error,
                });
            }
            let wake = self.avoided.iter().map(|(_, until)| *until).fold(limit, Instant::min);
            tokio::select! {
                changed = models.changed() => changed.map_err(|_| RequestError::ShuttingDown)?,
                () = tokio::time::sleep_until(wake) => {}
            }
        }
    }

    /// The model that the request was tokenized for, as it is now.
    fn model_in(&self, models: &ModelTable) -> Result<Arc<ServedModel>, RequestError> {
        let is_same = |model: &&Arc<ServedModel>| {
            model.description.as_ref().is_some_and(|description| Arc::ptr_eq(description, &self.description))
        };
        models.get(&self.request.model).filter(is_same).cloned().ok_or(RequestError::ModelGone)
    }

    fn max_tokens(&self) -> u32 {
        self.request.sampling.as_ref().map_or(0, v1::SamplingParams::max_tokens)
    }
}
