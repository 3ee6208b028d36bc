//! Byte-level BPE from GGUF metadata (`tokenizer.ggml.model` = `gpt2`).
//!
//! Invariant: a pre-tokenizer that is not known is refused, never guessed: other splits give other ids without any
//! sign of it. Merges are checked against the vocabulary before the library sees them.
//! Source of the names and patterns: llama.cpp, which reads the same files.

use tokenizers::{
    SplitDelimiterBehavior, Tokenizer as HfTokenizer,
    models::bpe::BPE,
    pre_tokenizers::{
        PreTokenizerWrapper,
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

use super::gguf::{CheckedVocabulary, invalid};
use crate::ModelError;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How a text is split into words before merging.
pub(super) struct PreTokenizer {
    /// Applied one after the other, each to the pieces of the one before.
    patterns: &'static [&'static str],
    /// A word that is a token is taken whole, whatever the merges say.
    ignore_merges: bool,
    /// Whether prompts start with BOS where the file does not say.
    pub(super) add_bos: bool,
}

impl PreTokenizer {
    /// Looks up `tokenizer.ggml.pre`; without one (files from before the key) the words are GPT-2's with the further
    /// splits that llama.cpp makes there.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] with the unknown name.
    pub(super) fn by_name(name: Option<&str>) -> Result<Self, ModelError> {
        let splits = |patterns| Self { patterns, ignore_merges: false, add_bos: false };
        let whole_words = |patterns| Self { patterns, ignore_merges: true, add_bos: true };
        Ok(match name.unwrap_or("default") {
            "default" => splits(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
            "gpt-2" | "phi-2" | "gigachat" | "a.x-4.0" | "mellum" | "mpt" | "olmo" | "jais" | "trillion"
            | "granite-docling" | "exaone4" => splits(&[GPT2]),
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" | "mellum2" => {
                splits(&[DIGIT, GPT2])
            }
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" => {
                whole_words(&[LLAMA3])
            }
            "dbrx" | "smaug-bpe" => splits(&[LLAMA3]),
            "qwen2" | "deepseek-r1-qwen" | "kormo" | "megrez" | "stablelm2" | "hunyuan" | "solar-open" => {
                splits(&[QWEN2])
            }
            "tekken" => whole_words(&[TEKKEN]),
            other => return Err(invalid("pre", format_args!("pre-tokenizer {other:?} is not supported"))),
        })
    }

    fn build(&self) -> Result<Sequence, ModelError> {
        let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
        for &pattern in self.patterns {
            let pattern = SplitPattern::Regex(pattern.to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
            steps.push(split.map_err(|error| invalid("pre", error))?.into());
        }
        steps.push(byte_level().into());
        Ok(Sequence::new(steps))
    }
}

/// Bytes as printable characters, without a space before the text and without splitting.
fn byte_level() -> ByteLevel {
    ByteLevel::new(false, false, false)
}

/// # Errors
/// [`ModelError::Tokenizer`] if a merge is no pair of tokens or yields none.
pub(super) fn build(
    vocabulary: CheckedVocabulary,
    merges: Vec<String>,
    pre_tokenizer: PreTokenizer,
) -> Result<HfTokenizer, ModelError> {
    if merges.is_empty() {
        return Err(invalid("merges", "is missing or empty"));
    }
    let merges = merges.iter().enumerate().map(|merge| split_merge(merge, &vocabulary)).collect::<Result<_, _>>()?;
    let model = BPE::builder().vocab_and_merges(vocabulary.ids, merges).ignore_merges(pre_tokenizer.ignore_merges);
    let mut hf = HfTokenizer::new(model.build().map_err(|error| invalid("merges", error))?);
    hf.with_pre_tokenizer(Some(pre_tokenizer.build()?)).with_decoder(Some(byte_level()));
    Ok(hf)
}

fn split_merge(
    (rank, merge): (usize, &String),
    vocabulary: &CheckedVocabulary,
) -> Result<(String, String), ModelError> {
    // The left text may itself begin with a space in vocabularies that are not byte-level throughout.
    let first = merge.chars().next().map_or(0, char::len_utf8);
    let Some((left, right)) = merge[first..].find(' ').map(|at| (&merge[..first + at], &merge[first + at + 1..]))
    else {
        return Err(invalid("merges", format_args!("entry {rank} {merge:?} is not two texts with a space between")));
    };
    let product = [left, right].concat();
    for text in [left, right, &product] {
        if !vocabulary.ids.contains_key(text) {
            return Err(invalid("merges", format_args!("entry {rank} {merge:?}: {text:?} is not a token")));
        }
    }
    Ok((left.to_owned(), right.to_owned()))
}
