//! `prompt` of a completion: a text, several texts, token ids, or several lists of token ids.
//! Invariant: it is read without buffering, so a long list of ids costs four bytes an id, and no further than there may be
//! prompts.

use std::fmt;

use lockstep_proto::v1::{self, generate_request::Input};
use serde::{
    Deserialize, Deserializer,
    de::{Error, SeqAccess, Visitor},
};

/// Most choices of a request: prompts times `n`.
pub const MAX_CHOICES: usize = 128;

/// The prompts of one request, in their order.
#[derive(Debug, PartialEq)]
pub struct Prompts(pub Vec<Input>);

/// What an array of prompts begins with.
enum First {
    Text(String),
    TokenId(u32),
    TokenIds(Vec<u32>),
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptsVisitor)
    }
}

struct PromptsVisitor;

impl<'de> Visitor<'de> for PromptsVisitor {
    type Value = Prompts;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a text, an array of texts, an array of token ids, or an array of such arrays")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts(vec![Input::Prompt(text.to_owned())]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Prompts, A::Error> {
        let mut prompts = Vec::new();
        match entries.next_element()? {
            None => {}
            Some(First::Text(text)) => {
                prompts.push(Input::Prompt(text));
                while let Some(text) = entries.next_element()? {
                    add(&mut prompts, Input::Prompt(text))?;
                }
            }
            Some(First::TokenId(id)) => {
                let mut ids = vec![id];
                while let Some(id) = entries.next_element()? {
                    ids.push(id);
                }
                prompts.push(token_ids(ids));
            }
            Some(First::TokenIds(ids)) => {
                prompts.push(token_ids(ids));
                while let Some(ids) = entries.next_element()? {
                    add(&mut prompts, token_ids(ids))?;
                }
            }
        }
        Ok(Prompts(prompts))
    }
}

/// One more, unless they are too many already: what follows is not read.
fn add<E: Error>(prompts: &mut Vec<Input>, prompt: Input) -> Result<(), E> {
    if prompts.len() == MAX_CHOICES {
        return Err(E::custom(format!("has more than {MAX_CHOICES} prompts")));
    }
    prompts.push(prompt);
    Ok(())
}

fn token_ids(ids: Vec<u32>) -> Input {
    Input::TokenIds(v1::TokenIds { ids })
}

impl<'de> Deserialize<'de> for First {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FirstVisitor)
    }
}

struct FirstVisitor;

impl<'de> Visitor<'de> for FirstVisitor {
    type Value = First;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a text, a token id or an array of token ids")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<First, E> {
        Ok(First::Text(text.to_owned()))
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<First, E> {
        u32::try_from(id).map(First::TokenId).map_err(|_| E::custom(format!("{id} is no token id")))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<First, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = entries.next_element()? {
            ids.push(id);
        }
        Ok(First::TokenIds(ids))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_four_forms_are_read() {
        let text = |text: &str| Input::Prompt(text.into());
        let cases = [
            (r#""a""#, vec![text("a")]),
            (r#"["a", "b"]"#, vec![text("a"), text("b")]),
            ("[1, 2]", vec![token_ids(vec![1, 2])]),
            ("[[1, 2], [3]]", vec![token_ids(vec![1, 2]), token_ids(vec![3])]),
            ("[]", vec![]),
        ];
        for (json, expected) in cases {
            assert_eq!(serde_json::from_str::<Prompts>(json).unwrap(), Prompts(expected), "{json}");
        }
        for json in ["5", "null", r#"["a", 1]"#, r#"[1, "a"]"#, "[[1], 2]", "[-1]", "[4294967296]", "[1.5]", "[{}]"] {
            assert!(serde_json::from_str::<Prompts>(json).is_err(), "{json}");
        }
        for prompt in [r#""a","#, "[1],"] {
            let error = serde_json::from_str::<Prompts>(&format!("[{}", prompt.repeat(MAX_CHOICES + 1))).unwrap_err();
            assert!(error.to_string().starts_with("has more than 128 prompts"), "{error}");
        }
    }
}
