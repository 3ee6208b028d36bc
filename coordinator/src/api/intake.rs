//! The one way from a request to a [`Generation`], whatever protocol it came by.
//! For: [`grpc`](super::grpc) starts one sequence of a request, [`openai`](super::openai) several.
//! Invariant: a request is refused before it costs anything: its tenant's limits, admission, model, values, prompt length,
//! tokens, replica.

use std::{sync::Arc, time::Duration};

use lockstep_proto::{
    status::Class,
    v1::{self, generate_request::Input},
};
use tokio::time::Instant;
use tracing::Span;

use super::{
    generation::{Generation, Running},
    output::Output,
    placement::{Failover, Placement},
    span::{self, Ending},
    suspicion::Turns,
    tokenizing::Tokenizing,
    validate::{self, PromptText},
};
use crate::{
    admission::{Admission, Permit},
    error::RequestError,
    metrics::Metrics,
    router::Router,
    served::{ModelDescription, ServedModel},
    tenants::{Tenant, Tenants},
};

/// Takes requests in; cheap to clone.
#[derive(Clone)]
pub struct Intake {
    /// Whose requests are taken.
    pub tenants: Tenants,
    /// Bounds the requests.
    pub admission: Admission,
    /// Knows models and replicas.
    pub router: Router,
    /// Makes tokens of prompts.
    pub tokenizing: Tokenizing,
    /// Counts requests.
    pub metrics: Arc<Metrics>,
    /// Longest wait for another replica when one breaks, of a request without a deadline.
    pub failover_timeout: Duration,
    /// Longest time that a message may wait for its client.
    pub slow_reader_timeout: Duration,
    /// Requests under which replicas broke take turns.
    pub turns: Turns,
}

/// A request that can be served, its prompt tokenized.
pub struct Prepared {
    /// The model that it means.
    pub model: Arc<ServedModel>,
    /// The text side of that model.
    pub description: Arc<ModelDescription>,
    /// The client's id of it, or ours.
    pub request_id: String,
    /// Its prompt.
    pub token_ids: Vec<u32>,
    /// What traces call it.
    operation: &'static str,
    /// Complete, but for the stop texts.
    sampling: v1::SamplingParams,
    stops: Vec<String>,
    /// What its client has of the answer already, from another coordinator.
    received: v1::Received,
}

/// When a request came and when its client gives up.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// Its acceptance.
    pub accepted: Instant,
    /// Its deadline, if it has one.
    pub deadline: Option<Instant>,
}

impl Prepared {
    /// Sets the most tokens of one of its sequences aside.
    ///
    /// # Errors
    /// The tenant's limits.
    pub fn reserve(&self, permit: &mut Permit) -> Result<(), RequestError> {
        permit.entry.reserve(self.token_ids.len() as u64 + u64::from(self.sampling.max_tokens()))
    }
}

impl Intake {
    /// Admits one sequence of a tenant.
    ///
    /// # Errors
    /// As [`Admission::enter`].
    pub fn enter(&self, tenant: &Arc<Tenant>) -> Result<Permit, RequestError> {
        self.admission.enter(&self.tenants, tenant)
    }

    /// A request of a tenant that comes in, known by `span`.
    pub fn pending<'a>(&'a self, tenant: &'a Tenant, span: &Span) -> Pending<'a> {
        Pending { metrics: &self.metrics, tenant, span: span.clone(), outcome: Some(Class::Cancelled) }
    }

    /// Checks a request and tokenizes its prompt.
    ///
    /// # Errors
    /// [`RequestError`] naming the field, the model or what the model waits for.
    pub async fn prepare(&self, request: v1::GenerateRequest) -> Result<Prepared, RequestError> {
        let model = self.router.model(&request.model)?;
        let description = described(&model)?;
        validate::check_request(&request, description.shape.vocab_size)?;
        let encode = |text| self.tokenizing.encode(text, &description, |token_ids, _| token_ids);
        let operation = if matches!(request.input, Some(Input::Chat(_))) { "chat" } else { "text_completion" };
        let token_ids = match request.input {
            Some(Input::TokenIds(tokens)) => tokens.ids,
            Some(Input::Prompt(text)) => encode(PromptText::Prompt(text)).await?,
            Some(Input::Chat(chat)) => encode(PromptText::Chat(chat)).await?,
            None => Vec::new(),
        };
        let request_id =
            if request.request_id.is_empty() { uuid::Uuid::new_v4().to_string() } else { request.request_id };
        let (prompt_tokens, limit) = (token_ids.len(), model.max_sequence_tokens());
        let mut sampling = validate::complete_sampling(request.sampling, prompt_tokens, limit, &request_id)?;
        let received = request.received.unwrap_or_default();
        validate::check_received(&received, &sampling)?;
        let stops = std::mem::take(&mut sampling.stop);
        Ok(Prepared { model, description, request_id, token_ids, operation, sampling, stops, received })
    }

    /// Starts one sequence of a request on the best replica: the one of index `sample` among those of the request, whose
    /// seeds follow each other.
    ///
    /// # Errors
    /// [`RequestError`] if no replica serves the model, or all that were asked refuse.
    pub async fn start(
        &self,
        prepared: &Prepared,
        sample: u64,
        permit: Permit,
        times: Times,
    ) -> Result<Generation, RequestError> {
        let Prepared { model, description, token_ids, .. } = prepared;
        let request_id = match sample {
            0 => prepared.request_id.clone(),
            _ => format!("{}.{sample}", prepared.request_id),
        };
        let mut sampling = prepared.sampling.clone();
        sampling.seed = Some(sampling.seed().wrapping_add(sample));
        let prompt_tokens = token_ids.len() as u32;
        let eos_token_ids = if sampling.ignore_eos { Vec::new() } else { description.eos_token_ids.clone() };
        let mut sequence = v1::RunSequenceRequest {
            model: model.spec.name.clone(),
            request_id: request_id.clone(),
            token_ids: token_ids.clone(),
            sampling: Some(sampling),
            eos_token_ids,
            ..Default::default()
        };
        let span = Span::current();
        permit.entry.tenant().mark(&mut sequence);
        span::describe(&span, prepared.operation, &sequence);
        let metrics = Arc::clone(&self.metrics);
        let failover = Failover {
            router: self.router.clone(),
            timeout: self.failover_timeout,
            metrics: Arc::clone(&metrics),
            turns: self.turns.clone(),
        };
        let placement = Placement::new(failover, Arc::clone(description), sequence, times.deadline);
        let output = Output::new(description.tokenizer.clone(), prepared.stops.clone());
        let tenant_metrics = metrics.of_tenant(permit.entry.tenant());
        let accepted = times.accepted;
        let running = Running { request_id, permit, accepted, prompt_tokens, metrics, tenant_metrics, span };
        Generation::start(running, placement, output, &prepared.received).await
    }
}

/// A request that has no stream yet. When this is dropped it is counted as cancelled, unless its outcome was said before:
/// its client may leave at any time.
pub struct Pending<'a> {
    metrics: &'a Metrics,
    tenant: &'a Tenant,
    span: Span,
    outcome: Option<Class>,
}

impl Pending<'_> {
    /// It has been refused.
    pub fn refused(mut self, class: Class) {
        self.outcome = Some(class);
    }

    /// It has a stream, which counts for itself.
    pub fn started(mut self) {
        self.outcome = None;
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if let Some(outcome) = self.outcome.map(Class::reason) {
            self.metrics.count_request(Some(self.tenant), outcome);
            span::end(&self.span, &Ending { outcome, finish: None, num_tokens: 0, num_moves: 0 });
        }
    }
}

/// The text side of a model.
///
/// # Errors
/// [`RequestError::NotReady`] if no worker described it yet.
pub fn described(model: &ServedModel) -> Result<Arc<ModelDescription>, RequestError> {
    model.description.clone().ok_or_else(|| model.not_ready())
}
