//! The tokenizer of a GGUF file: checks its metadata, builds what both kinds of vocabulary share.
//!
//! For: `Checkpoint::tokenizer`, which fills a [`GgufVocabulary`] with the plain values.
//! Invariant: ids, lengths, types and texts are checked here, so that the builders of the kinds may rely on them; what
//! a key leaves out gets the default that llama.cpp gives it.
//! Not here: the file format ([`crate::gguf`]), pre-tokenizers and merges (`gguf_bpe`), merges from scores (`gguf_spm`).

use ahash::AHashMap;
use tokenizers::{AddedToken, Tokenizer as HfTokenizer};

use super::{TokenizerConfig, gguf_bpe, gguf_spm};
use crate::{ModelError, gguf::Metadata};

/// End of a text or of a turn, whatever the metadata say: the texts for which llama.cpp stops too.
const END_TEXTS: [&str; 16] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<eos>",
    "</s>",
    "<｜end▁of▁sentence｜>",
];

/// `tokenizer.ggml.*` as plain values; what the file does not give is `None` or empty.
#[derive(Clone, Debug, Default)]
pub struct GgufVocabulary {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub model: String,
    /// `tokenizer.ggml.pre`: how a `gpt2` vocabulary splits text into words.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`: texts by id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.scores`, of `llama` vocabularies.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.merges`, of `gpt2` vocabularies: two texts with a space between.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos_token_id: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos_token_id: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`.
    pub eot_token_id: Option<u32>,
    /// `tokenizer.ggml.eom_token_id`.
    pub eom_token_id: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unknown_token_id: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos_token: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`.
    pub add_space_prefix: Option<bool>,
}

impl GgufVocabulary {
    /// Takes the values out of a file's metadata.
    ///
    /// # Errors
    /// [`ModelError::Invalid`] if a key is missing or of another type.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, ModelError> {
        let id = |key| metadata.get::<u32>(key);
        Ok(Self {
            model: metadata.require::<&str>("tokenizer.ggml.model")?.to_owned(),
            pre: metadata.get::<&str>("tokenizer.ggml.pre")?.map(str::to_owned),
            tokens: metadata.require::<&[String]>("tokenizer.ggml.tokens")?.to_vec(),
            token_types: metadata.get::<&[i32]>("tokenizer.ggml.token_type")?.unwrap_or_default().to_vec(),
            scores: metadata.get::<&[f32]>("tokenizer.ggml.scores")?.unwrap_or_default().to_vec(),
            merges: metadata.get::<&[String]>("tokenizer.ggml.merges")?.unwrap_or_default().to_vec(),
            bos_token_id: id("tokenizer.ggml.bos_token_id")?,
            eos_token_id: id("tokenizer.ggml.eos_token_id")?,
            eot_token_id: id("tokenizer.ggml.eot_token_id")?,
            eom_token_id: id("tokenizer.ggml.eom_token_id")?,
            unknown_token_id: id("tokenizer.ggml.unknown_token_id")?,
            add_bos_token: metadata.get("tokenizer.ggml.add_bos_token")?,
            add_space_prefix: metadata.get("tokenizer.ggml.add_space_prefix")?,
        })
    }
}

/// What a token is, as `tokenizer.ggml.token_type` numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// A vocabulary whose values agree with each other.
pub(super) struct CheckedVocabulary {
    /// Texts by id, none empty, none twice.
    pub(super) tokens: Vec<String>,
    /// `[tokens.len()]`.
    pub(super) token_types: Vec<TokenType>,
    /// Ids by text.
    pub(super) ids: AHashMap<String, u32>,
}

/// An error about one metadata key.
pub(super) fn invalid(key: &str, problem: impl std::fmt::Display) -> ModelError {
    ModelError::Tokenizer(format!("tokenizer.ggml.{key}: {problem}"))
}

/// Builds the encoder and what goes with it.
///
/// # Errors
/// [`ModelError::Tokenizer`] naming the key.
pub(super) fn build(mut source: GgufVocabulary) -> Result<(HfTokenizer, TokenizerConfig), ModelError> {
    let is_sentence_piece = match source.model.as_str() {
        "gpt2" => false,
        "llama" => true,
        other => return Err(invalid("model", format_args!("{other:?} is not supported (gpt2 and llama are)"))),
    };
    if is_sentence_piece {
        // Files of the first Llama leave these out; SentencePiece trains them in this order.
        source.unknown_token_id.get_or_insert(0);
        source.bos_token_id.get_or_insert(1);
        source.eos_token_id.get_or_insert(2);
    }
    let mut vocabulary = check_tokens(std::mem::take(&mut source.tokens), &source.token_types)?;
    check_ids(&source, vocabulary.tokens.len())?;
    let eos_token_ids = find_eos_tokens(&source, &mut vocabulary);

    let added = added_tokens(&vocabulary);
    let (mut hf, add_bos_default) = if is_sentence_piece {
        let add_space_prefix = source.add_space_prefix.unwrap_or(true);
        (gguf_spm::build(vocabulary, &source.scores, source.unknown_token_id, add_space_prefix)?, true)
    } else {
        if source.add_space_prefix == Some(true) {
            return Err(invalid("add_space_prefix", "true is not supported for a gpt2 vocabulary"));
        }
        let pre_tokenizer = gguf_bpe::PreTokenizer::by_name(source.pre.as_deref())?;
        let add_bos = pre_tokenizer.add_bos;
        (gguf_bpe::build(vocabulary, source.merges, pre_tokenizer)?, add_bos)
    };
    hf.add_tokens(added).map_err(|error| invalid("tokens", error))?;

    let config = TokenizerConfig {
        bos_token_id: source.bos_token_id,
        add_bos_token: source.add_bos_token.unwrap_or(add_bos_default) && source.bos_token_id.is_some(),
        eos_token_ids,
    };
    Ok((hf, config))
}

fn check_tokens(mut tokens: Vec<String>, token_types: &[i32]) -> Result<CheckedVocabulary, ModelError> {
    if tokens.is_empty() {
        return Err(invalid("tokens", "is missing or empty"));
    }
    let num_tokens = tokens.len();
    let token_types = match token_types {
        [] => vec![TokenType::Normal; num_tokens],
        types if types.len() != num_tokens => {
            let got = types.len();
            return Err(invalid("token_type", format_args!("has {got} entries for {num_tokens} tokens")));
        }
        types => types.iter().enumerate().map(token_type).collect::<Result<_, _>>()?,
    };
    let mut ids = AHashMap::with_capacity(num_tokens);
    for (id, token) in (0_u32..).zip(&mut tokens) {
        if token.is_empty() {
            *token = format!("[EMPTY_{id}]");
        }
        if let Some(first) = ids.insert(token.clone(), id) {
            return Err(invalid("tokens", format_args!("token {id} repeats token {first} ({token:?})")));
        }
    }
    Ok(CheckedVocabulary { tokens, token_types, ids })
}

fn token_type((id, &number): (usize, &i32)) -> Result<TokenType, ModelError> {
    match number {
        // 0 is "undefined": such tokens are matched like normal ones.
        0 | 1 => Ok(TokenType::Normal),
        2 => Ok(TokenType::Unknown),
        3 => Ok(TokenType::Control),
        4 => Ok(TokenType::UserDefined),
        5 => Ok(TokenType::Unused),
        6 => Ok(TokenType::Byte),
        _ => Err(invalid("token_type", format_args!("token {id} has type {number}, expected 0 to 6"))),
    }
}

fn check_ids(source: &GgufVocabulary, num_tokens: usize) -> Result<(), ModelError> {
    let ids = [
        ("bos_token_id", source.bos_token_id),
        ("eos_token_id", source.eos_token_id),
        ("eot_token_id", source.eot_token_id),
        ("eom_token_id", source.eom_token_id),
        ("unknown_token_id", source.unknown_token_id),
    ];
    for (key, id) in ids {
        if let Some(id) = id.filter(|&id| id as usize >= num_tokens) {
            return Err(invalid(key, format_args!("{id} is past the vocabulary of {num_tokens} tokens")));
        }
    }
    Ok(())
}

/// Sorted ids that end a text or a turn. Those known by their text become control tokens: converters have been seen
/// to leave them normal, and then a chat never ends.
fn find_eos_tokens(source: &GgufVocabulary, vocabulary: &mut CheckedVocabulary) -> Vec<u32> {
    let mut eos: Vec<u32> =
        [source.eos_token_id, source.eot_token_id, source.eom_token_id].into_iter().flatten().collect();
    for text in END_TEXTS {
        let Some(&id) = vocabulary.ids.get(text) else { continue };
        let token_type = &mut vocabulary.token_types[id as usize];
        // Where it is no control token it is markup for strike-through, which a model may well write.
        if text != "</s>" || *token_type == TokenType::Control {
            *token_type = TokenType::Control;
            eos.push(id);
        }
    }
    eos.sort_unstable();
    eos.dedup();
    eos
}

/// Tokens that are recognised in a text before it is split into words.
fn added_tokens(vocabulary: &CheckedVocabulary) -> Vec<AddedToken> {
    let tokens = vocabulary.tokens.iter().zip(&vocabulary.token_types);
    let added = tokens.filter_map(|(text, token_type)| {
        let is_special = match token_type {
            TokenType::Unknown | TokenType::Control => true,
            TokenType::UserDefined => false,
            TokenType::Normal | TokenType::Unused | TokenType::Byte => return None,
        };
        Some(AddedToken::from(text.clone(), is_special).normalized(false))
    });
    added.collect()
}
