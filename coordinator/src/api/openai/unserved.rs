//! Parameters that would change the output but are not served: refused, unless their value asks for nothing.
//! Invariant: whatever such a value holds, none of it is kept.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

/// Their names: OpenAI's, then vLLM's. What is in no list is ignored, as OpenAI's servers and vLLM do.
const NAMES: [&str; 31] = [
    "audio",
    "best_of",
    "function_call",
    "functions",
    "logit_bias",
    "prediction",
    "suffix",
    "tools",
    "web_search_options",
    "allowed_token_ids",
    "bad_words",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "length_penalty",
    "logits_processors",
    "min_tokens",
    "mm_processor_kwargs",
    "prompt_embeds",
    "prompt_logprobs",
    "return_token_ids",
    "structural_tag",
    "structured_outputs",
    "truncate_prompt_tokens",
    "use_beam_search",
    "vllm_xargs",
];

/// Values of them that mean what is done anyway.
const NEUTRAL: [(&str, u64); 2] = [("best_of", 1), ("length_penalty", 1)];

/// A value of which only that is known: whether it asks for something (null, false, 0 and what is empty do not).
#[derive(Clone, Copy, Debug, Default)]
pub struct Unserved {
    /// It does.
    pub is_set: bool,
    number: Option<u64>,
}

/// The first parameter of a JSON object that is set and not served.
#[derive(Debug)]
pub struct FirstUnserved(pub Option<&'static str>);

impl<'de> Deserialize<'de> for FirstUnserved {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor)
    }
}

struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = FirstUnserved;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<FirstUnserved, A::Error> {
        let mut first = None;
        while let Some(key) = fields.next_key::<String>()? {
            let Some(name) = NAMES.into_iter().find(|name| *name == key) else {
                fields.next_value::<IgnoredAny>()?;
                continue;
            };
            let value: Unserved = fields.next_value()?;
            let is_neutral = NEUTRAL.iter().any(|(field, number)| *field == name && value.number == Some(*number));
            if value.is_set && !is_neutral {
                first = first.or(Some(name));
            }
        }
        Ok(FirstUnserved(first))
    }
}

impl<'de> Deserialize<'de> for Unserved {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl ValueVisitor {
    fn found<E>(is_set: bool) -> Result<Unserved, E> {
        Ok(Unserved { is_set, number: None })
    }
}

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Unserved;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("any value")
    }

    fn visit_unit<E: Error>(self) -> Result<Unserved, E> {
        Self::found(false)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Unserved, E> {
        Self::found(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Unserved, E> {
        Ok(Unserved { is_set: value != 0, number: Some(value) })
    }

    fn visit_i64<E: Error>(self, _value: i64) -> Result<Unserved, E> {
        Self::found(true)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Unserved, E> {
        Ok(Unserved { is_set: value != 0.0, number: (value == 1.0).then_some(1) })
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Unserved, E> {
        Self::found(!value.is_empty())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Unserved, A::Error> {
        let mut is_set = false;
        while entries.next_element::<IgnoredAny>()?.is_some() {
            is_set = true;
        }
        Self::found(is_set)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Unserved, A::Error> {
        let mut is_set = false;
        while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            is_set = true;
        }
        Self::found(is_set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_values_that_ask_for_something_are_found() {
        let cases = [
            (r#"{"tools": [], "logit_bias": {}, "suffix": null, "functions": null}"#, None),
            (r#"{"use_beam_search": false, "min_tokens": 0, "best_of": 1, "length_penalty": 1.0}"#, None),
            (r#"{"temperature": 1, "unknown": [1, 2]}"#, None),
            (r#"{"logit_bias": {"5": -100}}"#, Some("logit_bias")),
            (r#"{"tools": [{"type": "function"}], "suffix": "x"}"#, Some("tools")),
            (r#"{"best_of": 2}"#, Some("best_of")),
            (r#"{"min_tokens": 1}"#, Some("min_tokens")),
            (r#"{"guided_json": "{}"}"#, Some("guided_json")),
        ];
        for (json, expected) in cases {
            assert_eq!(serde_json::from_str::<FirstUnserved>(json).unwrap().0, expected, "{json}");
        }
        assert!(serde_json::from_str::<FirstUnserved>("[]").is_err());
    }
}
