//! Where the tokenizer and the chat template of a checkpoint come from.
//! For: [`crate::Checkpoint`].
//! Invariant: the chat template is read when the checkpoint is opened, the tokenizer is built only when asked for.
//! Not here: how a tokenizer is built ([`crate::tokenizer`]) or a template rendered ([`crate::chat_template`]).

use crate::{
    ModelError, Tokenizer,
    gguf::{FromMetadata, Metadata},
    safetensors::TokenizerFiles,
    tokenizer::GgufVocabulary,
};

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
            Self::Gguf(metadata) => Tokenizer::from_gguf(gguf_vocabulary(metadata)?),
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

/// The `tokenizer.ggml.*` keys as plain values.
fn gguf_vocabulary(metadata: &Metadata) -> Result<GgufVocabulary, ModelError> {
    fn get<'a, T: FromMetadata<'a>>(metadata: &'a Metadata, key: &str) -> Result<Option<T>, ModelError> {
        metadata.get(&format!("tokenizer.ggml.{key}"))
    }
    Ok(GgufVocabulary {
        model: metadata.require::<&str>("tokenizer.ggml.model")?.to_owned(),
        pre: get::<&str>(metadata, "pre")?.map(str::to_owned),
        tokens: metadata.require::<&[String]>("tokenizer.ggml.tokens")?.to_vec(),
        token_types: get::<&[i32]>(metadata, "token_type")?.unwrap_or_default().to_vec(),
        scores: get::<&[f32]>(metadata, "scores")?.unwrap_or_default().to_vec(),
        merges: get::<&[String]>(metadata, "merges")?.unwrap_or_default().to_vec(),
        bos_token_id: get(metadata, "bos_token_id")?,
        eos_token_id: get(metadata, "eos_token_id")?,
        eot_token_id: get(metadata, "eot_token_id")?,
        eom_token_id: get(metadata, "eom_token_id")?,
        unknown_token_id: get(metadata, "unknown_token_id")?,
        add_bos_token: get(metadata, "add_bos_token")?,
        add_space_prefix: get(metadata, "add_space_prefix")?,
    })
}
