//! An answer as server-sent events: a chunk for every piece of a choice, at last `[DONE]`.
//! Invariants: the next message is made when the client has taken the last (the transport's buffer is the only one); a
//! failure is the last event, with no `[DONE]` behind it.

use std::{collections::VecDeque, convert::Infallible, time::Duration};

use axum::{
    http::{HeaderName, HeaderValue},
    response::{
        IntoResponse, Response,
        sse::{Event as SseEvent, KeepAlive, Sse},
    },
};
use futures::{StreamExt, stream};
use lockstep_proto::v1::{self, generate_response::Event};

use super::{
    answer::{Running, Shape},
    choices::Usage,
    error::ApiError,
};
use crate::error::RequestError;

/// A comment is sent after so long without a token, so that no proxy takes the stream for dead.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Tells nginx not to buffer.
const NO_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

struct Feed<S> {
    running: Running<S>,
    include_usage: bool,
    /// Events that are ready to be sent.
    ready: VecDeque<SseEvent>,
    is_over: bool,
}

/// Streams what is running.
pub fn response<S: Shape>(running: Running<S>, num_choices: usize, include_usage: bool) -> Response {
    let mut feed = Feed { running, include_usage, ready: VecDeque::new(), is_over: false };
    for index in 0..num_choices {
        if let Some(choice) = feed.running.shape.opening(index) {
            feed.push(vec![choice], None);
        }
    }
    let events = stream::unfold(feed, |mut feed| async move {
        let event = feed.next().await?;
        Some((Ok::<_, Infallible>(event), feed))
    });
    let mut response = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    response.headers_mut().insert(NO_BUFFERING, HeaderValue::from_static("no"));
    response
}

impl<S: Shape> Feed<S> {
    async fn next(&mut self) -> Option<SseEvent> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.is_over {
                return None;
            }
            match self.running.choices.next().await {
                Some((index, event)) => {
                    if let Err(error) = event.and_then(|event| self.take(index, event)) {
                        self.fail(&error);
                    }
                }
                None => self.end(),
            }
        }
    }

    fn take(&mut self, index: usize, event: Event) -> Result<(), RequestError> {
        let choice = match event {
            // Part of a character: its text comes with the rest.
            Event::Delta(delta) if delta.text.is_empty() && delta.logprobs.is_empty() => return Ok(()),
            Event::Delta(delta) => self.running.shape.piece(index, delta, None),
            Event::Finish(finish) => {
                let reason = self.running.finish(index, &finish)?;
                self.running.shape.piece(index, v1::Delta::default(), Some(reason))
            }
        };
        self.push(vec![choice], None);
        Ok(())
    }

    fn end(&mut self) {
        if self.include_usage {
            let usage = self.running.usage.clone();
            self.push(Vec::new(), Some(&usage));
        }
        self.ready.push_back(SseEvent::default().data("[DONE]"));
        self.is_over = true;
    }

    fn fail(&mut self, error: &RequestError) {
        self.running.choices.clear();
        let error = ApiError::of(error, S::INPUT).into_object();
        self.ready.extend(SseEvent::default().json_data(error));
        self.is_over = true;
    }

    fn push(&mut self, choices: Vec<S::Choice>, usage: Option<&Usage>) {
        let usage = self.include_usage.then_some(usage);
        let chunk = self.running.envelope.message(S::CHUNK_OBJECT, choices, usage);
        // Strings and numbers can always be written.
        self.ready.extend(SseEvent::default().json_data(chunk));
    }
}
