//! The raw bytes of every token, in one arena: what decoding looks up.
//!
//! For: `Tokenizer::decode`, the incremental decoder, logprobs. Built from the vocabulary and the decoder that a
//! `tokenizer.json` declares, of which two kinds exist for the models served here: byte-level (GPT-2's alphabet) and
//! SentencePiece (`▁` for a space, `<0x0A>` for a byte).
//! Invariant: the table covers every id from 0; an id that the vocabulary leaves out has no bytes.
//! Not here: joining bytes to characters (`incremental`).

use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer as HfTokenizer};

use crate::ModelError;

/// Ids beyond this are taken for damage; the largest vocabularies in use have 262,144 tokens.
const MAX_VOCAB_SIZE: usize = 1 << 22;

/// Bytes by token id.
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    /// `[vocab_size + 1]` positions in `bytes`.
    starts: Vec<usize>,
    /// `[vocab_size]`: gives no text in an output.
    is_special: Vec<bool>,
    has_space_prefix: bool,
}

impl TokenBytes {
    /// # Errors
    /// [`ModelError::Tokenizer`] for a decoder of another kind and for ids out of all proportion.
    pub(super) fn new(hf: &HfTokenizer) -> Result<Self, ModelError> {
        let decoder = serde_json::to_value(hf.get_decoder())
            .map_err(|error| ModelError::Tokenizer(format!("decoder: {error}")))?;
        let scheme = ByteScheme::detect(&decoder)?;
        let added = hf.get_added_tokens_decoder();
        let vocabulary = hf.get_vocab(true);
        let vocab_size = vocabulary.values().max().map_or(0, |&id| id as usize + 1);
        if vocab_size > MAX_VOCAB_SIZE {
            let largest = vocab_size - 1;
            return Err(ModelError::Tokenizer(format!("vocab: token id {largest} exceeds {MAX_VOCAB_SIZE}")));
        }

        let mut texts = vec![""; vocab_size];
        for (text, &id) in &vocabulary {
            texts[id as usize] = text;
        }
        let alphabet = byte_level_alphabet();
        let mut table = Self {
            bytes: Vec::with_capacity(texts.iter().map(|text| text.len()).sum()),
            starts: vec![0],
            is_special: Vec::with_capacity(vocab_size),
            has_space_prefix: matches!(scheme, ByteScheme::SentencePiece { has_space_prefix: true }),
        };
        for (id, text) in (0..).zip(texts) {
            let added = added.get(&id);
            match scheme {
                ByteScheme::ByteLevel => push_byte_level(text, added, &alphabet, &mut table.bytes),
                ByteScheme::SentencePiece { .. } => push_sentence_piece(text, added, &mut table.bytes),
            }
            table.starts.push(table.bytes.len());
            table.is_special.push(added.is_some_and(|token| token.special));
        }
        Ok(table)
    }

    /// Number of ids.
    pub(super) fn len(&self) -> usize {
        self.is_special.len()
    }

    /// Whether encoding puts a space before a text.
    pub(super) fn has_space_prefix(&self) -> bool {
        self.has_space_prefix
    }

    /// Bytes of any token; `None` past the vocabulary.
    pub(super) fn get(&self, id: u32) -> Option<&[u8]> {
        let start = *self.starts.get(id as usize)?;
        let end = *self.starts.get(id as usize + 1)?;
        self.bytes.get(start..end)
    }

    /// Bytes that a token contributes to an output: none for a special one.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] past the vocabulary.
    pub(super) fn output(&self, id: u32) -> Result<&[u8], ModelError> {
        let bytes = self.get(id).ok_or_else(|| {
            ModelError::Tokenizer(format!("token id {id} is past the vocabulary of {} tokens", self.len()))
        })?;
        Ok(if self.is_special[id as usize] { &[] } else { bytes })
    }
}

/// How token texts spell bytes.
#[derive(Clone, Copy)]
enum ByteScheme {
    ByteLevel,
    SentencePiece { has_space_prefix: bool },
}

impl ByteScheme {
    /// Reads it off a decoder as `tokenizer.json` writes it.
    fn detect(decoder: &Value) -> Result<Self, ModelError> {
        let steps = match decoder.get("decoders").and_then(Value::as_array) {
            Some(steps) => steps.iter().collect(),
            None => vec![decoder],
        };
        let (mut is_byte_level, mut is_sentence_piece, mut has_space_prefix) = (false, false, false);
        for step in steps {
            let text = |pointer: &str| step.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
            match text("/type") {
                "ByteLevel" => is_byte_level = true,
                "Replace" if text("/pattern/String") == "▁" && text("/content") == " " => is_sentence_piece = true,
                "Metaspace" if text("/replacement") == "▁" => {
                    is_sentence_piece = true;
                    has_space_prefix = text("/prepend_scheme") != "never";
                }
                "Strip" if text("/content") == " " && step["start"] == 1 && step["stop"] == 0 => {
                    has_space_prefix = true;
                }
                "ByteFallback" | "Fuse" => {}
                _ => return Err(unsupported_decoder(step)),
            }
        }
        match (is_byte_level, is_sentence_piece) {
            (true, false) if !has_space_prefix => Ok(Self::ByteLevel),
            (false, true) => Ok(Self::SentencePiece { has_space_prefix }),
            _ => Err(unsupported_decoder(decoder)),
        }
    }
}

fn unsupported_decoder(decoder: &Value) -> ModelError {
    ModelError::Tokenizer(format!("decoder {decoder} is not supported: neither byte-level nor SentencePiece"))
}

/// GPT-2's alphabet: the character of each byte is itself where that is printable, else the next one from U+0100 on.
fn byte_level_alphabet() -> ahash::AHashMap<char, u8> {
    let is_printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let printable = (0..=255).filter(|&byte| is_printable(byte)).map(|byte| (char::from(byte), byte));
    let others = ('\u{100}'..).zip((0..=255).filter(|&byte| !is_printable(byte)));
    printable.chain(others).collect()
}

/// Added tokens are written as they are; so is a token with a character outside the alphabet.
fn push_byte_level(text: &str, added: Option<&AddedToken>, alphabet: &ahash::AHashMap<char, u8>, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    if added.is_none() {
        for character in text.chars() {
            match alphabet.get(&character) {
                Some(&byte) => bytes.push(byte),
                None => {
                    bytes.truncate(start);
                    break;
                }
            }
        }
    }
    if bytes.len() == start {
        bytes.extend_from_slice(text.as_bytes());
    }
}

fn push_sentence_piece(text: &str, added: Option<&AddedToken>, bytes: &mut Vec<u8>) {
    let hex = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|hex| hex.len() == 2);
    match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) if added.is_none() => bytes.push(byte),
        _ => bytes.extend_from_slice(text.replace('▁', " ").as_bytes()),
    }
}
