//! Text to token ids and back. Coordinators build a tokenizer from what a worker reports, workers from the checkpoint.
//!
//! Encoding is the `tokenizers` crate's; decoding is a table of every token's raw bytes ([`token_bytes`]) and a UTF-8
//! assembler ([`incremental`]), so that a stream costs one look-up a token and equals the text decoded at once.
//! Invariants: a vocabulary is checked before it is built, and an error names its field; a BOS is never added twice.
//! Not here: reading GGUF metadata or `config.json` (`checkpoint`), rendering conversations (`chat_template`).

mod gguf;
mod gguf_bpe;
mod gguf_spm;
mod incremental;
mod token_bytes;

use std::sync::Arc;

use tokenizers::Tokenizer as HfTokenizer;

pub use self::{gguf::GgufVocabulary, incremental::IncrementalDecoder};
use self::{incremental::Utf8Assembler, token_bytes::TokenBytes};
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
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    hf: HfTokenizer,
    token_bytes: Arc<TokenBytes>,
    config: TokenizerConfig,
}

impl Tokenizer {
    /// From the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] if they do not parse, if their decoder is neither byte-level nor SentencePiece's, or
    /// if `config` names a token past the vocabulary.
    pub fn from_json(json: &[u8], config: TokenizerConfig) -> Result<Self, ModelError> {
        // The library trusts the merges of a file: one that is longer than every token makes it panic.
        let hf = std::panic::catch_unwind(|| HfTokenizer::from_bytes(json))
            .map_err(|_panic| ModelError::Tokenizer("tokenizer.json: merges do not fit the vocabulary".into()))?
            .map_err(|error| ModelError::Tokenizer(format!("tokenizer.json: {error}")))?;
        Self::from_hf(hf, config)
    }

    /// From the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] naming the metadata key that is missing, unknown or disagrees with another.
    pub fn from_gguf(vocabulary: GgufVocabulary) -> Result<Self, ModelError> {
        let (hf, config) = gguf::build(vocabulary)?;
        Self::from_hf(hf, config)
    }

    fn from_hf(mut hf: HfTokenizer, config: TokenizerConfig) -> Result<Self, ModelError> {
        // Files may carry the truncation and padding of their training; a prompt is neither cut nor padded here.
        hf.with_truncation(None)
            .map_err(|error| ModelError::Tokenizer(format!("truncation: {error}")))?
            .with_padding(None);
        let token_bytes = Arc::new(TokenBytes::new(&hf)?);
        let named = config.bos_token_id.iter().map(|id| ("bos_token_id", id));
        for (field, &id) in named.chain(config.eos_token_ids.iter().map(|id| ("eos_token_id", id))) {
            if id as usize >= token_bytes.len() {
                let vocab_size = token_bytes.len();
                return Err(ModelError::Tokenizer(format!(
                    "{field} {id} is past the vocabulary of {vocab_size} tokens"
                )));
            }
        }
        Ok(Self(Arc::new(Inner { hf, token_bytes, config })))
    }

    /// The bytes of a `tokenizer.json`, to rebuild it elsewhere.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] if it cannot be serialized.
    pub fn to_json(&self) -> Result<Vec<u8>, ModelError> {
        let json = self.0.hf.to_string(false);
        json.map(String::into_bytes).map_err(|error| ModelError::Tokenizer(format!("serialize: {error}")))
    }

    /// Special tokens.
    pub fn config(&self) -> &TokenizerConfig {
        &self.0.config
    }

    /// Number of token ids: one more than the largest.
    pub fn vocab_size(&self) -> usize {
        self.0.token_bytes.len()
    }

    /// Token ids of a text in which special tokens are recognised; with BOS first if `add_bos` and the model wants one
    /// and the text does not bring it along (as many chat templates do).
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn encode(&self, text: &str, add_bos: bool) -> Result<Vec<u32>, ModelError> {
        // BOS is ours to add: the file's own post-processor is not asked, since GGUF vocabularies have none.
        let encoding = self.0.hf.encode_fast(text, false);
        let encoding = encoding.map_err(|error| ModelError::Tokenizer(format!("encode: {error}")))?;
        let ids = encoding.get_ids();
        match self.0.config.bos_token_id {
            Some(bos) if add_bos && self.0.config.add_bos_token && ids.first() != Some(&bos) => {
                Ok(std::iter::once(bos).chain(ids.iter().copied()).collect())
            }
            _ => Ok(ids.to_vec()),
        }
    }

    /// The text of a whole token sequence without its special tokens: what `encode` was given, for valid text. The
    /// space that SentencePiece models put before a text is taken off again.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] for an id past the vocabulary.
    pub fn decode(&self, token_ids: &[u32]) -> Result<String, ModelError> {
        let mut assembler = Utf8Assembler::default();
        let mut text = String::new();
        for &id in token_ids {
            assembler.push(self.0.token_bytes.output(id)?, &mut text);
        }
        assembler.finish(&mut text);
        if self.0.token_bytes.has_space_prefix() && text.starts_with(' ') {
            text.remove(0);
        }
        Ok(text)
    }

    /// Text of one token alone, special tokens included; U+FFFD where it is part of a character. `None` past the
    /// vocabulary.
    pub fn token_text(&self, token_id: u32) -> Option<String> {
        let bytes = self.0.token_bytes.get(token_id)?;
        Some(String::from_utf8_lossy(bytes).into_owned())
    }

    /// A decoder for one stream of output tokens; special tokens give no text. The first token keeps its leading
    /// space, because an output continues a prompt.
    pub fn incremental(&self) -> IncrementalDecoder {
        IncrementalDecoder::new(Arc::clone(&self.0.token_bytes))
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = formatter.debug_struct("Tokenizer");
        debug.field("vocab_size", &self.vocab_size()).field("config", self.config()).finish()
    }
}
