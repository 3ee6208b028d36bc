//! Where the tokenizer and the chat template of a checkpoint come from.
//! For: [`crate::Checkpoint`].
//! Invariant: the chat template is read when the checkpoint is opened, the tokenizer is built only when asked for.
//! Not here: how a tokenizer is built ([`crate::tokenizer`]) or a template rendered ([`crate::chat_template`]).

use crate::{ModelError, Tokenizer, gguf::Metadata, safetensors::TokenizerFiles, tokenizer::GgufVocabulary};

/// Text side of a checkpoint.
#[derive(Debug)]
pub(crate) enum TextSource {
    /// Metadata of a GGUF file.
    Gguf(Metadata),
    /// Files beside the weights.
    Files(TokenizerFiles),
}

impl TextSource {
    /// Takes the text side out of GGUF metadata.
    pub(crate) fn from_gguf(metadata: Metadata) -> Result<Self, ModelError> {
        metadata.get::<&str>(CHAT_TEMPLATE)?;
        Ok(Self::Gguf(metadata))
    }

    /// Builds the tokenizer.
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        match self {
            Self::Gguf(metadata) => Tokenizer::from_gguf(GgufVocabulary::from_metadata(metadata)?),
            Self::Files(files) => files.tokenizer(),
        }
    }

    /// Jinja source of the chat template.
    pub(crate) fn chat_template(&self) -> Option<&str> {
        match self {
            Self::Gguf(metadata) => metadata.get(CHAT_TEMPLATE).ok().flatten(),
            Self::Files(files) => files.chat_template.as_deref(),
        }
    }
}

const CHAT_TEMPLATE: &str = "tokenizer.chat_template";
