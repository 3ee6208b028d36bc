//! From a request to its answer, for both endpoints: an [`Envelope`] around choices that a [`Shape`] words.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::{
    Json,
    http::{HeaderName, HeaderValue},
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use lockstep_proto::{
    status::Class,
    v1::{self, generate_response::Event},
};
use lockstep_telemetry::trace::set_request_id;
use serde::Serialize;
use tokio::time::Instant;
use tracing::Span;

use super::{
    choices::{self, Choices, Usage, finish_reason},
    error::ApiError,
    models::unix_seconds,
    request::Delivery,
    stream,
};
use crate::{
    api::intake::{Intake, Prepared, Times},
    error::RequestError,
    tenants::Tenant,
};

/// Where clients find the id that logs show too.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// How an endpoint words its choices.
pub trait Shape: Send + 'static {
    /// A choice of an answer or of a chunk.
    type Choice: Serialize + Send;

    /// Word for an answer.
    const OBJECT: &'static str;
    /// Word for a chunk of one.
    const CHUNK_OBJECT: &'static str;
    /// Name of the input's field.
    const INPUT: &'static str;

    /// Takes note of the prompts, before anything else is asked.
    fn prepare(&mut self, _prompts: &[Prepared]) {}
    /// What a stream says of a choice before its first token.
    fn opening(&mut self, index: usize) -> Option<Self::Choice>;
    /// The next piece of a choice; `finish_reason` with the last, which is empty.
    fn piece(&mut self, index: usize, delta: v1::Delta, finish_reason: Option<&'static str>) -> Self::Choice;
    /// A choice as a whole.
    fn whole(&mut self, index: usize, output: v1::Delta, finish_reason: &'static str) -> Self::Choice;
}

/// What every chunk of an answer repeats.
#[derive(Debug)]
pub struct Envelope {
    id: String,
    created: u64,
    model: String,
    /// Changes with what may change the output of a seed: version and plan.
    system_fingerprint: String,
}

/// An answer or a chunk.
#[derive(Serialize)]
struct Message<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<&'a Usage>>,
}

impl Envelope {
    /// One message as JSON. `usage` is left out, null or a value.
    pub fn message<'a, C: Serialize + 'a>(
        &'a self,
        object: &'static str,
        choices: Vec<C>,
        usage: Option<Option<&'a Usage>>,
    ) -> impl Serialize + 'a {
        let Self { id, created, model, system_fingerprint } = self;
        Message { id, object, created: *created, model, system_fingerprint, choices, usage }
    }
}

/// What an endpoint made of a body.
pub struct Order {
    /// Id of the request.
    pub id: String,
    /// One request a prompt.
    pub requests: Vec<v1::GenerateRequest>,
    /// Choices of each.
    pub samples: usize,
    /// How to answer.
    pub delivery: Delivery,
    /// How long the client waits for all of it, if it says so.
    pub timeout: Option<Duration>,
}

/// Takes an order of a tenant, runs it and answers it in its shape.
///
/// # Errors
/// What `order` comes to, what the request was refused for, or what ended it before it was complete.
pub async fn answer<S: Shape>(
    intake: &Intake,
    tenant: &Arc<Tenant>,
    order: impl Future<Output = Result<(Order, S), ApiError>>,
) -> Result<Response, ApiError> {
    let pending = intake.pending(tenant, &Span::current());
    let (order, mut shape) = match order.await {
        Ok(order) => order,
        Err(error) => {
            pending.refused(Class::InvalidRequest);
            return Err(error);
        }
    };
    set_request_id(&Span::current(), &order.id);
    let accepted = Instant::now();
    let times = Times { accepted, deadline: order.timeout.map(|timeout| accepted + timeout) };
    let samples = order.samples;
    let (prompts, choices) = match choices::start(intake, tenant, order.requests, samples, times).await {
        Ok(started) => started,
        Err(error) => {
            pending.refused(error.class());
            return Err(ApiError::of(&error, S::INPUT));
        }
    };
    pending.started();
    shape.prepare(&prompts);
    let model = prompts.first().map(|prompt| &prompt.model);
    let envelope = Envelope {
        created: unix_seconds(SystemTime::now()),
        model: model.map_or_else(String::new, |model| model.spec.name.clone()),
        system_fingerprint: format!(
            "lockstep-{}-{}",
            env!("CARGO_PKG_VERSION"),
            model.map_or(0, |model| model.plan_epoch)
        ),
        id: order.id,
    };
    let request_id = HeaderValue::from_str(&envelope.id).ok();
    let running = Running { shape, envelope, choices, samples, usage: Usage::of(&prompts) };
    let mut response = match order.delivery {
        Delivery::Stream { include_usage } => stream::response(running, prompts.len() * samples, include_usage),
        Delivery::Whole => running.collect(prompts.len() * samples).await?,
    };
    if let Some(request_id) = request_id {
        response.headers_mut().insert(REQUEST_ID, request_id);
    }
    Ok(response)
}

/// An answer in the making.
pub struct Running<S> {
    /// Words the choices.
    pub shape: S,
    /// Wraps them.
    pub envelope: Envelope,
    /// Their messages.
    pub choices: Choices,
    /// Choices a prompt.
    pub samples: usize,
    /// Tokens so far.
    pub usage: Usage,
}

impl<S: Shape> Running<S> {
    /// Counts the end of a choice and gives its word.
    ///
    /// # Errors
    /// As [`finish_reason`].
    pub fn finish(&mut self, index: usize, finish: &v1::Finish) -> Result<&'static str, RequestError> {
        self.usage.add(finish, index.is_multiple_of(self.samples));
        finish_reason(finish)
    }

    async fn collect(mut self, num_choices: usize) -> Result<Response, ApiError> {
        let mut outputs = vec![(v1::Delta::default(), "stop"); num_choices];
        while let Some((index, event)) = self.choices.next().await {
            let ended = match event {
                Ok(Event::Finish(finish)) => self.finish(index, &finish).map(Some),
                Ok(Event::Delta(delta)) => {
                    if let Some((output, _)) = outputs.get_mut(index) {
                        output.text.push_str(&delta.text);
                        output.token_ids.extend(delta.token_ids);
                        output.logprobs.extend(delta.logprobs);
                    }
                    Ok(None)
                }
                Err(error) => Err(error),
            };
            let ended = ended.map_err(|error| ApiError::of(&error, S::INPUT))?;
            if let (Some(reason), Some(output)) = (ended, outputs.get_mut(index)) {
                output.1 = reason;
            }
        }
        let outputs = outputs.into_iter().enumerate();
        let choices = outputs.map(|(index, (output, reason))| self.shape.whole(index, output, reason)).collect();
        Ok(Json(self.envelope.message(S::OBJECT, choices, Some(Some(&self.usage)))).into_response())
    }
}
