//! Token ids of one output → deltas: text decoded, stop texts cut off.
//! Invariants: text ends on whole characters; a token whose text is held back is held back with it; tokens that lie
//! wholly in a stop text are dropped.

use std::collections::VecDeque;

use lockstep_model::{IncrementalDecoder, ModelError, Tokenizer};
use lockstep_proto::v1;

use super::stop_text::StopMatcher;

/// A token whose text is not released yet, by its place in the decoded text (bytes).
struct PendingToken {
    start: usize,
    end: usize,
    token_id: u32,
    logprobs: Option<v1::TokenLogprobs>,
}

/// One output as it grows.
pub struct Output {
    tokenizer: Tokenizer,
    decoder: Option<IncrementalDecoder>,
    stops: StopMatcher,
    pending: VecDeque<PendingToken>,
    decoded_bytes: usize,
    released_bytes: usize,
}

impl Output {
    /// An empty output that ends at the first of `stops`.
    pub fn new(tokenizer: Tokenizer, stops: Vec<String>) -> Self {
        let decoder = Some(tokenizer.incremental());
        let (stops, pending) = (StopMatcher::new(stops), VecDeque::new());
        Self { tokenizer, decoder, stops, pending, decoded_bytes: 0, released_bytes: 0 }
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
            self.pending.push_back(PendingToken { start, end, token_id, logprobs });
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
        delta.text.push_str(&held);
        self.release_tokens(delta, |_| true);
        false
    }

    fn release(&mut self, text: &str, delta: &mut v1::Delta) -> bool {
        self.decoded_bytes += text.len();
        let released = self.stops.push(text);
        self.released_bytes += released.text.len();
        delta.text.push_str(&released.text);
        let certain = self.released_bytes;
        if released.is_stopped {
            self.release_tokens(delta, |token| token.start < certain);
            self.pending.clear();
        } else {
            self.release_tokens(delta, |token| token.end <= certain);
        }
        released.is_stopped
    }

    fn release_tokens(&mut self, delta: &mut v1::Delta, is_certain: impl Fn(&PendingToken) -> bool) {
        let num_certain = self.pending.iter().take_while(|token| is_certain(token)).count();
        for token in self.pending.drain(..num_certain) {
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
