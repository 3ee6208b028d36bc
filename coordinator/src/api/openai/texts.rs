//! A text or a list of texts, such as `stop`, of which few can be meant.
//! Invariant: a list that is too long is refused where it is, so that no body costs many times its size.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, SeqAccess, Visitor},
};

/// Most texts of a list; what is served may be less.
const MAX_TEXTS: usize = 64;

/// A text or an array of texts.
#[derive(Debug, PartialEq)]
pub struct Texts(pub Vec<String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextsVisitor)
    }
}

struct TextsVisitor;

impl<'de> Visitor<'de> for TextsVisitor {
    type Value = Texts;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a text or an array of texts")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Texts, E> {
        Ok(Texts(vec![text.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Texts, A::Error> {
        let mut texts = Vec::new();
        while let Some(text) = entries.next_element()? {
            if texts.len() == MAX_TEXTS {
                return Err(A::Error::custom(format!("has more than {MAX_TEXTS} entries")));
            }
            texts.push(text);
        }
        Ok(Texts(texts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_ends_where_it_is_too_long() {
        let texts = |json: &str| serde_json::from_str::<Texts>(json).map_err(|error| error.to_string());
        assert_eq!(texts(r#""a""#).unwrap().0, ["a"]);
        assert_eq!(texts(r#"["a", "b"]"#).unwrap().0, ["a", "b"]);
        assert!(texts("[1]").is_err() && texts("5").is_err());
        // What follows is not read: it is no JSON.
        let long = format!("[{}]", r#""a","#.repeat(MAX_TEXTS + 1));
        assert!(texts(&long).unwrap_err().starts_with("has more than 64 entries"), "{long}");
    }
}
