//! Token ids of one output → deltas: text decoded, stop texts cut off.
//! Invariants: text ends on whole characters; a token whose text is held back is held back with it; tokens that lie
//! wholly in a stop text are dropped.

use std::collections::VecDeque;

use lockstep_model::{IncrementalDecoder, ModelError, Tokenizer};
use lockstep_proto::v1;

use super::stop_text::StopMatcher;
use crate::error::RequestError;

/// A token whose text is not released yet, by its place in the decoded text (bytes).
struct PendingToken {
    start: usize,
    end: usize,
    token_id: u32,
    logprobs: Option<v1::TokenLogprobs>,
    /// The client has it, from another coordinator.
    is_received: bool,
}

/// One output as it grows.
pub struct Output {
    tokenizer: Tokenizer,
    decoder: Option<IncrementalDecoder>,
    stops: StopMatcher,
    pending: VecDeque<PendingToken>,
    decoded_bytes: usize,
    released_bytes: usize,
    /// Bytes of text to come that the client has, from another coordinator.
    received_bytes: usize,
}

impl Output {
    /// An empty output that ends at the first of `stops`.
    pub fn new(tokenizer: Tokenizer, stops: Vec<String>) -> Self {
        let decoder = Some(tokenizer.incremental());
        let (stops, pending) = (StopMatcher::new(stops), VecDeque::new());
        Self { tokenizer, decoder, stops, pending, decoded_bytes: 0, released_bytes: 0, received_bytes: 0 }
    }

    /// Takes up an output that another coordinator has begun: with the text that its client should have but has not, and
    /// whether a stop text ended it. To be called before anything is pushed.
    ///
    /// # Errors
    /// [`RequestError::Invalid`] if no answer can have come so far.
    pub fn resume(&mut self, received: &v1::Received) -> Result<(v1::Delta, bool), RequestError> {
        let invalid = |problem: String| RequestError::invalid("received", problem);
        let (token_ids, mut delta) = (received.token_ids.clone(), v1::Delta::default());
        let tokens = v1::SequenceTokens { token_ids, ..Default::default() };
        let is_stopped = self.push(tokens, &mut delta).map_err(|error| invalid(error.to_string()))?;
        self.pending.iter_mut().for_each(|token| token.is_received = true);
        let text_bytes = usize::try_from(received.text_bytes).unwrap_or(usize::MAX);
        let unsent = match delta.text.get(text_bytes..) {
            Some(unsent) => unsent.to_owned(),
            None if text_bytes < delta.text.len() => {
                return Err(invalid(format!("text_bytes is {text_bytes}, which is within a character")));
            }
            // A part of the next token's text may have been certain before the token was.
            None => String::new(),
        };
        self.received_bytes = text_bytes.saturating_sub(delta.text.len());
        Ok((v1::Delta { text: unsent, ..Default::default() }, is_stopped))
    }

    /// Takes tokens and adds to `delta` what became certain; true if a stop text ended the output.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] for an id past the vocabulary.
    pub fn push(&mut self, tokens: v1::SequenceTokens, delta: &mut v1::Delta) -> Result<bool, ModelError> {
        let mut logprobs = tokens.logprobs.into_iter();
        for token_id in tokens.token_ids {
            let text = match &mut self.decoder {
                Some(decoder) => decoder.push(token_id)?,
                None => String::new(),
            };
            let start = self.decoded_bytes;
            let end = start + text.len();
            let logprobs = logprobs.next().map(|logprobs| self.with_texts(logprobs));
            self.pending.push_back(PendingToken { start, end, token_id, logprobs, is_received: false });
            if self.release(&text, delta) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Ends an output that no stop text ended: adds all that was held back; true if a stop text appeared in it.
    pub fn finish(&mut self, delta: &mut v1::Delta) -> bool {
        let text = self.decoder.take().map(IncrementalDecoder::finish).unwrap_or_default();
        if self.release(&text, delta) {
            return true;
        }
        let held = self.stops.finish();
        self.released_bytes += held.len();
        self.add_text(&held, delta);
        self.release_tokens(delta, |_| true);
        false
    }

    fn release(&mut self, text: &str, delta: &mut v1::Delta) -> bool {
        self.decoded_bytes += text.len();
        let released = self.stops.push(text);
        self.released_bytes += released.text.len();
        self.add_text(&released.text, delta);
        let certain = self.released_bytes;
        if released.is_stopped {
            self.release_tokens(delta, |token| token.start < certain);
            self.pending.clear();
        } else {
            self.release_tokens(delta, |token| token.end <= certain);
        }
        released.is_stopped
    }

    fn add_text(&mut self, text: &str, delta: &mut v1::Delta) {
        // What was received ends on a whole character, of the same text unless sums were taken in another order.
        let known = (self.received_bytes..text.len()).find(|index| text.is_char_boundary(*index)).unwrap_or(text.len());
        self.received_bytes = self.received_bytes.saturating_sub(known);
        delta.text.push_str(text.get(known..).unwrap_or_default());
    }

    fn release_tokens(&mut self, delta: &mut v1::Delta, is_certain: impl Fn(&PendingToken) -> bool) {
        let num_certain = self.pending.iter().take_while(|token| is_certain(token)).count();
        for token in self.pending.drain(..num_certain).filter(|token| !token.is_received) {
            delta.token_ids.push(token.token_id);
            delta.logprobs.extend(token.logprobs);
        }
    }

    fn with_texts(&self, mut logprobs: v1::TokenLogprobs) -> v1::TokenLogprobs {
        for token in logprobs.chosen.iter_mut().chain(&mut logprobs.top) {
            token.text = self.tokenizer.token_text(token.token_id).unwrap_or_default();
        }
        logprobs
    }
}
