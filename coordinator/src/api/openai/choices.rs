//! The sequences of one request: for each prompt `n` of them, all at once.
//! Invariants: nothing is read from a worker that the client has not room for; dropping the choices cancels them all.

use std::{sync::Arc, time::Duration};

use futures::{
    Stream, StreamExt,
    future::try_join_all,
    stream::{self, BoxStream, SelectAll},
};
use lockstep_proto::v1::{self, generate_response::Event};
use lockstep_telemetry::trace::choice_span;
use serde::Serialize;
use tracing::{Instrument, Span};

use crate::{
    api::{
        delivery::deliver,
        generation::Generation,
        intake::{Intake, Prepared, Times},
    },
    error::RequestError,
    tenants::Tenant,
};

/// Messages of all choices as they come, each with the index of its choice: sample `index % n` of prompt `index / n`.
pub type Choices = SelectAll<BoxStream<'static, (usize, Result<Event, RequestError>)>>;

/// Tokens of a request; a prompt counts once for all its choices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptTokensDetails,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct PromptTokensDetails {
    cached_tokens: u32,
}

impl Usage {
    /// Nothing generated yet.
    pub fn of(prompts: &[Prepared]) -> Self {
        let prompt_tokens = prompts.iter().map(|prompt| prompt.token_ids.len() as u32).sum();
        Self { prompt_tokens, total_tokens: prompt_tokens, ..Self::default() }
    }

    /// Adds a choice that ended; `is_first` of its prompt.
    pub fn add(&mut self, finish: &v1::Finish, is_first: bool) {
        let usage = finish.usage.unwrap_or_default();
        self.completion_tokens += usage.completion_tokens;
        self.total_tokens += usage.completion_tokens;
        if is_first {
            self.prompt_tokens_details.cached_tokens += usage.cached_tokens;
        }
    }
}

/// Starts `samples` sequences for each of `requests`, or none.
///
/// # Errors
/// [`RequestError`] of the first that is refused; the others are cancelled.
pub async fn start(
    intake: &Intake,
    tenant: &Arc<Tenant>,
    requests: Vec<v1::GenerateRequest>,
    samples: usize,
    times: Times,
) -> Result<(Vec<Prepared>, Choices), RequestError> {
    let count = requests.len() * samples;
    tenant.check_count(count)?;
    intake.admission.check_count(count)?;
    let permits = (0..count).map(|_| intake.enter(tenant));
    let mut permits = permits.collect::<Result<Vec<_>, _>>()?;
    let mut prompts = Vec::with_capacity(requests.len());
    for request in requests {
        prompts.push(intake.prepare(request).await?);
    }
    let is_alone = permits.len() == 1;
    for (index, permit) in permits.iter_mut().enumerate() {
        prompts.get(index / samples).map_or(Ok(()), |prompt| prompt.reserve(permit))?;
    }
    let starts = permits.into_iter().enumerate().filter_map(|(index, permit)| {
        let prompt = prompts.get(index / samples)?;
        // The span of the request is that of its only choice.
        let span = if is_alone { Span::current() } else { choice_span(&prompt.request_id, index % samples) };
        Some(intake.start(prompt, (index % samples) as u64, permit, times).instrument(span))
    });
    let generations = try_join_all(starts).await?;
    let patience = intake.slow_reader_timeout;
    let choices =
        generations.into_iter().enumerate().map(|(index, generation)| messages(index, generation, patience).boxed());
    let choices = stream::select_all(choices);
    Ok((prompts, choices))
}

fn messages(
    index: usize,
    generation: Generation,
    patience: Duration,
) -> impl Stream<Item = (usize, Result<Event, RequestError>)> + Send {
    deliver(generation.into_messages(), patience).map(move |message| {
        let event = message.and_then(|message| {
            message.event.ok_or_else(|| RequestError::Internal("a message without an event".into()))
        });
        (index, event)
    })
}

/// OpenAI's word for the end of a choice.
///
/// # Errors
/// [`RequestError::Internal`] for an end that is no completion.
pub fn finish_reason(finish: &v1::Finish) -> Result<&'static str, RequestError> {
    match finish.reason() {
        v1::FinishReason::Stop => Ok("stop"),
        v1::FinishReason::Length => Ok("length"),
        v1::FinishReason::Cancelled | v1::FinishReason::Error | v1::FinishReason::Unspecified => {
            Err(RequestError::Internal("the sequence was given up by its worker".into()))
        }
    }
}
