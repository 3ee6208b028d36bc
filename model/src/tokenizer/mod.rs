//! Text to token ids and back. Coordinators build it from what a worker reports, workers from the checkpoint.

use crate::ModelError;

/// What a tokenizer.json does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// Beginning-of-sequence token.
    pub bos_token_id: Option<u32>,
    /// Whether raw prompts start with it.
    pub add_bos_token: bool,
    /// End of sequence and end of turn.
    pub eos_token_ids: Vec<u32>,
}

/// A tokenizer, cheap to clone and shareable between threads.
#[derive(Clone)]
pub struct Tokenizer {}

impl Tokenizer {
    /// From the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] if they do not parse.
    pub fn from_json(_json: &[u8], _config: TokenizerConfig) -> Result<Self, ModelError> {
        todo!()
    }

    /// The bytes of a `tokenizer.json`, to rebuild it elsewhere.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] if it cannot be serialized.
    pub fn to_json(&self) -> Result<Vec<u8>, ModelError> {
        todo!()
    }

    /// Special tokens.
    pub fn config(&self) -> &TokenizerConfig {
        todo!()
    }

    /// Number of token ids.
    pub fn vocab_size(&self) -> usize {
        todo!()
    }

    /// Token ids of a text in which special tokens are recognised; with BOS first if `add_bos` and the model wants one.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn encode(&self, _text: &str, _add_bos: bool) -> Result<Vec<u32>, ModelError> {
        todo!()
    }

    /// Text of one token alone; U+FFFD where it is part of a character. `None` past the vocabulary.
    pub fn token_text(&self, _token_id: u32) -> Option<String> {
        todo!()
    }

    /// A decoder for one stream of output tokens; special tokens give no text.
    pub fn incremental(&self) -> IncrementalDecoder {
        todo!()
    }
}

/// Turns a stream of token ids into text without ever emitting half a UTF-8 character.
pub struct IncrementalDecoder {}

impl IncrementalDecoder {
    /// Text that became certain with this token, possibly empty.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] for an id past the vocabulary.
    pub fn push(&mut self, _token_id: u32) -> Result<String, ModelError> {
        todo!()
    }

    /// What is left at the end: an incomplete character becomes U+FFFD.
    pub fn finish(self) -> String {
        todo!()
    }
}
