//! One Generate stream: pulls tokens of a replica, turns them into deltas, ends with a finish or an error.
//! Invariants: nothing is read from the worker that the client has not room for; dropping it cancels the sequence on the
//! worker; when the replica breaks the stream goes on from another one ([`Placement`]) without a gap or a repeat, for
//! all that a client can see of the output lives here; a passed deadline ends it at once.

use std::{sync::Arc, time::Duration};

use futures::{Stream, stream};
use lockstep_proto::{
    status::Class,
    v1::{self, generate_response::Event, sequence_event::Event as SequenceEvent},
};
use tokio::time::Instant;
use tracing::{Instrument, Span};

use super::{
    attempt::Attempt,
    output::Output,
    placement::Placement,
    span::{self, Ending},
};
use crate::{
    admission::Permit,
    error::RequestError,
    metrics::{Metrics, TenantMetrics},
};

/// What a stream holds as long as it runs.
pub struct Running {
    /// The client's or our id of it.
    pub request_id: String,
    /// Its place among the requests.
    pub permit: Permit,
    /// When it was accepted.
    pub accepted: Instant,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Where it is counted.
    pub metrics: Arc<Metrics>,
    /// The same for its tenant.
    pub tenant_metrics: TenantMetrics,
    /// What traces and logs know it by.
    pub span: Span,
}

/// A running stream.
pub struct Generation {
    running: Running,
    placement: Placement,
    attempt: Option<Attempt>,
    output: Output,
    finish: Option<v1::Finish>,
    /// The finish that was given out.
    last: Option<v1::Finish>,
    /// What another coordinator had generated but not sent.
    unsent: v1::Delta,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    queue_ms: Option<f64>,
    /// Prompt tokens that the first replica which yielded had computed before.
    cached_tokens: Option<u32>,
    /// Tokens received.
    num_tokens: u64,
    released_tokens: u32,
    outcome: &'static str,
}

impl Generation {
    /// Starts the sequence on a replica of its model, behind what was `received` of it.
    ///
    /// # Errors
    /// [`RequestError`] if there is none, the worker refuses it or the deadline passes; [`RequestError::Invalid`] if what
    /// was received fits no answer.
    pub async fn start(
        mut running: Running,
        mut placement: Placement,
        mut output: Output,
        received: &v1::Received,
    ) -> Result<Self, RequestError> {
        let (unsent, is_stopped) = output.resume(received)?;
        placement.record(&received.token_ids);
        let is_over = is_stopped || placement.is_complete();
        let attempt = if is_over { None } else { Some(placement.first().await?) };
        if let Some(attempt) = &attempt {
            span::on_replica(&running.span, attempt.replica());
        }
        let prompt_tokens = u64::from(running.prompt_tokens);
        running.permit.entry.count(prompt_tokens);
        running.metrics.prompt_tokens.inc_by(prompt_tokens);
        running.tenant_metrics.prompt_tokens.inc_by(prompt_tokens);
        let mut generation = Self {
            running,
            placement,
            attempt,
            output,
            finish: None,
            last: None,
            unsent,
            first_token: None,
            last_token: None,
            queue_ms: None,
            cached_tokens: None,
            num_tokens: 0,
            released_tokens: received.token_ids.len() as u32,
            outcome: Class::Cancelled.reason(),
        };
        if is_stopped {
            generation.end(v1::FinishReason::Stop);
        } else if is_over {
            let rest = generation.take_finish(length_reached());
            generation.unsent.text.push_str(&rest.text);
        }
        Ok(generation)
    }

    /// All messages; dropping them ends the stream.
    pub fn into_messages(self) -> impl Stream<Item = Result<v1::GenerateResponse, RequestError>> + Send + 'static {
        stream::unfold(self, |mut generation| async move {
            let message = generation.next().await?;
            Some((message, generation))
        })
    }

    /// The next message; `None` after the last.
    async fn next(&mut self) -> Option<Result<v1::GenerateResponse, RequestError>> {
        let span = self.running.span.clone();
        self.next_message().instrument(span).await
    }

    async fn next_message(&mut self) -> Option<Result<v1::GenerateResponse, RequestError>> {
        if !self.unsent.text.is_empty() {
            let unsent = std::mem::take(&mut self.unsent);
            return Some(Ok(self.response(Event::Delta(unsent))));
        }
        loop {
            if let Some(finish) = self.finish.take() {
                self.attempt = None;
                self.last = Some(finish);
                return Some(Ok(self.response(Event::Finish(finish))));
            }
            match self.advance().await {
                Ok(None) => return None,
                Ok(Some(delta)) if delta.text.is_empty() && delta.token_ids.is_empty() => {}
                Ok(Some(delta)) => return Some(Ok(self.response(Event::Delta(delta)))),
                Err(error) => {
                    self.attempt = None;
                    self.outcome = error.class().reason();
                    tracing::info!(request_id = self.running.request_id, %error, "request failed");
                    return Some(Err(error));
                }
            }
        }
    }

    /// The next tokens of a replica as a delta, which may be empty; `None` after the end. Sets `finish` at the end.
    async fn advance(&mut self) -> Result<Option<v1::Delta>, RequestError> {
        loop {
            let Some(attempt) = &mut self.attempt else { return Ok(None) };
            let error = match attempt.next().await {
                Ok(SequenceEvent::Tokens(tokens)) => return self.take_tokens(tokens).map(Some),
                Ok(SequenceEvent::Finish(finish)) => return Ok(Some(self.take_finish(finish))),
                Err(error) => error,
            };
            if self.placement.is_complete() && error.is_about_the_replica() {
                // Only the word of the end was lost.
                return Ok(Some(self.take_finish(length_reached())));
            }
            if let Some(attempt) = self.attempt.take() {
                self.attempt = Some(self.placement.again(attempt, error).await?);
            }
        }
    }

    fn take_tokens(&mut self, tokens: v1::SequenceTokens) -> Result<v1::Delta, RequestError> {
        let now = Instant::now();
        let metrics = &self.running.metrics;
        let silence = now - self.last_token.unwrap_or(self.running.accepted);
        match self.last_token {
            None => metrics.ttft.observe(silence.as_secs_f64()),
            Some(_) => metrics.inter_token.observe(silence.as_secs_f64()),
        }
        if self.placement.take_has_moved() {
            metrics.stream_gap.observe(silence.as_secs_f64());
        }
        if let Some(queue_ms) = tokens.queue_ms {
            self.note_queue_ms(queue_ms);
        }
        self.note_cached_tokens(tokens.cached_tokens);
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        let num_tokens = tokens.token_ids.len() as u64;
        self.num_tokens += num_tokens;
        self.running.permit.entry.count(num_tokens);
        self.running.metrics.completion_tokens.inc_by(num_tokens);
        self.running.tenant_metrics.completion_tokens.inc_by(num_tokens);
        self.placement.record(&tokens.token_ids);

        let mut delta = v1::Delta::default();
        let is_stopped =
            self.output.push(tokens, &mut delta).map_err(|error| RequestError::Internal(error.to_string()))?;
        self.released_tokens += delta.token_ids.len() as u32;
        if is_stopped {
            self.end(v1::FinishReason::Stop);
        }
        Ok(delta)
    }

    /// The first replica that yields knows its own queue only: what the sequence lost before it was there is added.
    fn note_queue_ms(&mut self, queue_ms: f64) {
        if self.queue_ms.is_none() {
            let delay: Duration = self.placement.delay();
            let queue_ms = queue_ms + delay.as_secs_f64() * 1e3;
            self.queue_ms = Some(queue_ms);
            self.running.tenant_metrics.queue_seconds.observe(queue_ms / 1e3);
        }
    }

    /// As for the queue, the first replica that says it is right: a later one is given more than the prompt.
    fn note_cached_tokens(&mut self, cached_tokens: u32) {
        if self.cached_tokens.is_none() {
            self.cached_tokens = Some(cached_tokens);
            self.running.metrics.cached_prompt_tokens.inc_by(cached_tokens.into());
        }
    }

    fn take_finish(&mut self, finish: v1::SequenceFinish) -> v1::Delta {
        let mut delta = v1::Delta::default();
        let is_stopped = self.output.finish(&mut delta);
        let reason = if is_stopped { v1::FinishReason::Stop } else { finish.reason() };
        self.released_tokens += delta.token_ids.len() as u32;
        self.note_queue_ms(finish.timings.unwrap_or_default().queue_ms);
        self.note_cached_tokens(finish.usage.unwrap_or_default().cached_tokens);
        self.end(reason);
        delta
    }

    /// Prepares the last message.
    fn end(&mut self, reason: v1::FinishReason) {
        let millis = |from: Instant, to: Option<Instant>| to.map_or(0.0, |to| (to - from).as_secs_f64() * 1e3);
        let timings = v1::Timings {
            queue_ms: self.queue_ms.unwrap_or_default(),
            ttft_ms: millis(self.running.accepted, self.first_token),
            decode_ms: self.first_token.map_or(0.0, |first| millis(first, self.last_token)),
        };
        let usage = v1::Usage {
            prompt_tokens: self.running.prompt_tokens,
            completion_tokens: self.released_tokens,
            cached_tokens: self.cached_tokens.unwrap_or_default(),
        };
        self.measure(&timings);
        self.outcome = match reason {
            v1::FinishReason::Stop => "stop",
            v1::FinishReason::Length => "length",
            v1::FinishReason::Cancelled => Class::Cancelled.reason(),
            v1::FinishReason::Error | v1::FinishReason::Unspecified => "error",
        };
        self.finish = Some(v1::Finish { reason: reason.into(), usage: Some(usage), timings: Some(timings) });
    }

    fn measure(&self, timings: &v1::Timings) {
        let metrics = &self.running.metrics;
        metrics.queue_seconds.observe(timings.queue_ms / 1e3);
        if self.num_tokens > 1 {
            metrics.time_per_output_token.observe(timings.decode_ms / 1e3 / (self.num_tokens - 1) as f64);
        }
    }

    fn response(&self, event: Event) -> v1::GenerateResponse {
        v1::GenerateResponse { request_id: self.running.request_id.clone(), event: Some(event) }
    }
}

/// The end of a sequence that has all the tokens that were asked for.
fn length_reached() -> v1::SequenceFinish {
    v1::SequenceFinish { reason: v1::FinishReason::Length.into(), ..Default::default() }
}

impl Drop for Generation {
    fn drop(&mut self) {
        let Running { metrics, accepted, permit, span, .. } = &self.running;
        let (num_tokens, num_moves) = (self.num_tokens, self.placement.num_moves());
        span::end(span, &Ending { outcome: self.outcome, finish: self.last.as_ref(), num_tokens, num_moves });
        metrics.count_request(Some(permit.entry.tenant()), self.outcome);
        metrics.request_seconds.observe(accepted.elapsed().as_secs_f64());
    }
}
