//! SentencePiece from GGUF metadata (`tokenizer.ggml.model` = `llama`: tokens with scores, no merges).
//!
//! The models are BPE by training: joining the best-scored pair first is the same as ranked merges, which are rebuilt
//! here from the scores. Characters outside the vocabulary fall back to their bytes.
//! Invariant: the work is bounded by the length of a token ([`MAX_TOKEN_BYTES`]) times the size of the file.

use ahash::AHashMap;
use rayon::prelude::*;
use tokenizers::{
    DecoderWrapper, NormalizerWrapper, Tokenizer as HfTokenizer,
    decoders::{byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence as DecoderSequence, strip::Strip},
    models::bpe::BPE,
    normalizers::{Prepend, Replace, Sequence as NormalizerSequence},
};

use super::gguf::{CheckedVocabulary, TokenType, invalid};
use crate::ModelError;

/// Longest text that is taken for a token; SentencePiece trains up to 16 characters, runs of spaces are some 100 bytes.
const MAX_TOKEN_BYTES: usize = 1024;

/// What SentencePiece writes for a space.
const SPACE: &str = "▁";

/// # Errors
/// [`ModelError::Tokenizer`] if scores are missing or not numbers, or a token is too long.
pub(super) fn build(
    vocabulary: CheckedVocabulary,
    scores: &[f32],
    unknown_token_id: Option<u32>,
    add_space_prefix: bool,
) -> Result<HfTokenizer, ModelError> {
    let num_tokens = vocabulary.tokens.len();
    if scores.len() != num_tokens {
        return Err(invalid("scores", format_args!("has {} entries for {num_tokens} tokens", scores.len())));
    }
    if let Some(id) = scores.iter().position(|score| score.is_nan()) {
        return Err(invalid("scores", format_args!("token {id} has a score that is not a number")));
    }
    if let Some(id) = vocabulary.tokens.iter().position(|token| token.len() > MAX_TOKEN_BYTES) {
        let length = vocabulary.tokens[id].len();
        return Err(invalid("tokens", format_args!("token {id} has {length} bytes, more than {MAX_TOKEN_BYTES}")));
    }

    let merges = merges_from_scores(&vocabulary, scores);
    let mut model = BPE::builder().vocab_and_merges(vocabulary.ids, merges).fuse_unk(false).byte_fallback(true);
    if let Some(unknown) = unknown_token_id.and_then(|id| vocabulary.tokens.get(id as usize)) {
        model = model.unk_token(unknown.clone());
    }
    let mut hf = HfTokenizer::new(model.build().map_err(|error| invalid("tokens", error))?);
    hf.with_normalizer(Some(normalizer(add_space_prefix)?))
        .map_err(|error| invalid("tokens", error))?
        .with_decoder(Some(decoder(add_space_prefix)?));
    Ok(hf)
}

/// Every way to put a token together from two others, best-scored token first; among equals by id, then by the ids
/// of the parts, which is the order in which SentencePiece's own converters write them.
fn merges_from_scores(vocabulary: &CheckedVocabulary, scores: &[f32]) -> Vec<(String, String)> {
    let splits = |id: u32| -> Vec<(u32, u32, u32)> {
        let token = &vocabulary.tokens[id as usize];
        if !matches!(vocabulary.token_types[id as usize], TokenType::Normal | TokenType::UserDefined) {
            return Vec::new();
        }
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let pairs = cuts.filter_map(|(left, right)| lookup_pair(&vocabulary.ids, left, right));
        pairs.map(|(left, right)| (id, left, right)).collect()
    };
    let num_tokens = vocabulary.tokens.len() as u32;
    let mut merges: Vec<(u32, u32, u32)> = (0..num_tokens).into_par_iter().flat_map_iter(splits).collect();
    merges.par_sort_unstable_by(|a, b| {
        let by_score = scores[b.0 as usize].total_cmp(&scores[a.0 as usize]);
        by_score.then_with(|| a.cmp(b))
    });
    let text = |id: u32| vocabulary.tokens[id as usize].clone();
    merges.into_iter().map(|(_, left, right)| (text(left), text(right))).collect()
}

fn lookup_pair(ids: &AHashMap<String, u32>, left: &str, right: &str) -> Option<(u32, u32)> {
    Some((*ids.get(left)?, *ids.get(right)?))
}

fn normalizer(add_space_prefix: bool) -> Result<NormalizerSequence, ModelError> {
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if add_space_prefix {
        steps.push(Prepend::new(SPACE.to_owned()).into());
    }
    steps.push(Replace::new(" ", SPACE).map_err(|error| invalid("tokens", error))?.into());
    Ok(NormalizerSequence::new(steps))
}

fn decoder(add_space_prefix: bool) -> Result<DecoderSequence, ModelError> {
    let replace = Replace::new(SPACE, " ").map_err(|error| invalid("tokens", error))?;
    let mut steps: Vec<DecoderWrapper> = vec![replace.into(), ByteFallback::new().into(), Fuse::new().into()];
    if add_space_prefix {
        steps.push(Strip::new(' ', 1, 0).into());
    }
    Ok(DecoderSequence::new(steps))
}
