//! Token bytes to text, one token at a time: what a stream of output tokens is read through.
//!
//! Invariant: the texts of all pushes and the finish, put together, are `String::from_utf8_lossy` of all bytes put
//! together, and no push emits part of a character. Work and memory of a push depend on that token alone.
//! Not here: what bytes a token has (`token_bytes`); stop strings (the router's).

use std::sync::Arc;

use super::token_bytes::TokenBytes;
use crate::ModelError;

/// Turns a stream of token ids into text without ever emitting half a UTF-8 character.
pub struct IncrementalDecoder {
    token_bytes: Arc<TokenBytes>,
    assembler: Utf8Assembler,
}

impl IncrementalDecoder {
    pub(super) fn new(token_bytes: Arc<TokenBytes>) -> Self {
        Self { token_bytes, assembler: Utf8Assembler::default() }
    }

    /// Text that became certain with this token, possibly empty.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] for an id past the vocabulary.
    pub fn push(&mut self, token_id: u32) -> Result<String, ModelError> {
        let mut text = String::new();
        self.assembler.push(self.token_bytes.output(token_id)?, &mut text);
        Ok(text)
    }

    /// What is left at the end: an incomplete character becomes U+FFFD.
    pub fn finish(self) -> String {
        let mut text = String::new();
        self.assembler.finish(&mut text);
        text
    }
}

/// Holds back the bytes of a character until it is whole or can no longer become one.
#[derive(Default)]
pub(super) struct Utf8Assembler {
    /// A valid beginning of a character: at most 3 bytes between calls.
    pending: Vec<u8>,
}

impl Utf8Assembler {
    /// Appends to `text` what `bytes` make certain.
    pub(super) fn push(&mut self, bytes: &[u8], text: &mut String) {
        if self.pending.is_empty() {
            let rest = decode_certain(bytes, text);
            self.pending.extend_from_slice(rest);
        } else {
            let mut joined = std::mem::take(&mut self.pending);
            joined.extend_from_slice(bytes);
            let rest = decode_certain(&joined, text).len();
            joined.drain(..joined.len() - rest);
            self.pending = joined;
        }
    }

    /// Appends U+FFFD if a character was left incomplete.
    pub(super) fn finish(self, text: &mut String) {
        if !self.pending.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Decodes `bytes` up to an incomplete last character, which is returned. Each maximal part that cannot become a
/// character gives one U+FFFD, as in `String::from_utf8_lossy`.
fn decode_certain<'b>(mut bytes: &'b [u8], text: &mut String) -> &'b [u8] {
    loop {
        let error = match std::str::from_utf8(bytes) {
            Ok(valid) => {
                text.push_str(valid);
                return &[];
            }
            Err(error) => error,
        };
        let (valid, rest) = bytes.split_at(error.valid_up_to());
        text.push_str(&String::from_utf8_lossy(valid));
        let Some(invalid) = error.error_len() else { return rest };
        text.push(char::REPLACEMENT_CHARACTER);
        bytes = &rest[invalid..];
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn assemble<'b>(chunks: impl IntoIterator<Item = &'b [u8]>) -> Vec<String> {
        let mut assembler = Utf8Assembler::default();
        let mut texts = Vec::new();
        for chunk in chunks {
            let mut text = String::new();
            assembler.push(chunk, &mut text);
            assert!(assembler.pending.len() <= 3);
            texts.push(text);
        }
        let mut text = String::new();
        assembler.finish(&mut text);
        texts.push(text);
        texts
    }

    #[test]
    fn a_character_is_held_back_until_it_is_whole() {
        let emoji = "a😀é".as_bytes();
        assert_eq!(assemble(emoji.chunks(1)), ["a", "", "", "", "😀", "", "é", ""]);
        assert_eq!(assemble([&emoji[..3], &emoji[3..6], &emoji[6..]]), ["a", "😀", "é", ""]);
    }

    #[test]
    fn what_cannot_become_a_character_is_replaced_as_soon_as_that_is_known() {
        assert_eq!(assemble([&b"\xf0\x9f"[..], b"x"]), ["", "\u{fffd}x", ""]);
        assert_eq!(assemble([&b"\xff"[..], b"\x80"]), ["\u{fffd}", "\u{fffd}", ""]);
        assert_eq!(assemble([&b"\xe2\x82"[..]]), ["", "\u{fffd}"]);
        // A surrogate and an overlong form are wrong from their second byte on.
        assert_eq!(assemble([&b"\xed"[..], b"\xa0", b"\x80"]), ["", "\u{fffd}\u{fffd}", "\u{fffd}", ""]);
    }

    /// Pieces of text and of rubbish, cut without regard to characters.
    fn chunks() -> impl Strategy<Value = Vec<Vec<u8>>> {
        let text = prop::sample::select(vec!["a", "é", "漢字", "😀", "👩‍🚀", "\u{fffd}", " ", "\u{10ffff}"]);
        let chunk = prop_oneof![
            text.clone().prop_map(|text| text.as_bytes().to_vec()),
            (text, 0..4_usize).prop_map(|(text, cut)| text.as_bytes()[..cut.min(text.len())].to_vec()),
            prop::collection::vec(any::<u8>(), 0..4),
            prop::collection::vec(0x80..=0xbf_u8, 0..4),
            prop::sample::select(vec![0xc2_u8, 0xe0, 0xe2, 0xed, 0xf0, 0xf4]).prop_map(|byte| vec![byte]),
        ];
        prop::collection::vec(chunk, 0..24)
    }

    proptest! {
        #[test]
        fn pieces_together_are_the_whole_decoded_at_once(chunks in chunks()) {
            let streamed = assemble(chunks.iter().map(Vec::as_slice)).concat();
            prop_assert_eq!(streamed, String::from_utf8_lossy(&chunks.concat()).into_owned());
        }
    }
}
