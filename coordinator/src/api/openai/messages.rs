//! `messages` of a chat. Content is a text or an array of parts, of which those of type `text` are served.

use std::fmt;

use lockstep_proto::v1;
use serde::{
    Deserialize, Deserializer,
    de::{Error, SeqAccess, Visitor},
};

use super::{error::ApiError, unserved::Unserved};

/// One message; unknown fields (such as `name`) are ignored.
#[derive(Debug, Deserialize)]
pub struct Message {
    role: String,
    content: Option<Content>,
    #[serde(default)]
    tool_calls: Unserved,
    #[serde(default)]
    function_call: Unserved,
}

/// The text of a message; parts are joined by line breaks.
#[derive(Debug, PartialEq)]
struct Content(String);

#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

/// The conversation as the model's template takes it.
///
/// # Errors
/// 400 for what belongs to tools.
pub fn chat(messages: Vec<Message>) -> Result<v1::Chat, ApiError> {
    let message = |(index, message): (usize, Message)| {
        let refuse = |field, problem: &str| Err(ApiError::invalid(&format!("messages[{index}].{field}"), problem));
        if message.tool_calls.is_set || message.function_call.is_set {
            return refuse("tool_calls", "tools are not served");
        }
        let role = match message.role.as_str() {
            "tool" | "function" => return refuse("role", "tools are not served"),
            // OpenAI's newer word, which no template knows.
            "developer" => "system".into(),
            _ => message.role,
        };
        let Some(Content(content)) = message.content else { return refuse("content", "is missing") };
        Ok(v1::Message { role, content })
    };
    let messages = messages.into_iter().enumerate().map(message).collect::<Result<_, _>>()?;
    Ok(v1::Chat { messages })
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a text or an array of parts of type text")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Content, E> {
        Ok(Content(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Content, A::Error> {
        let mut content: Option<String> = None;
        while let Some(part) = parts.next_element::<Part>()? {
            let text = match (part.kind.as_str(), part.text) {
                ("text", Some(text)) => text,
                ("text", None) => return Err(A::Error::missing_field("text")),
                (kind, _) => return Err(A::Error::custom(format!("parts of type {kind:?} are not served, only text"))),
            };
            match &mut content {
                None => content = Some(text),
                Some(content) => {
                    content.push('\n');
                    content.push_str(&text);
                }
            }
        }
        Ok(Content(content.unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<v1::Chat, String> {
        let messages: Vec<Message> = serde_json::from_str(json).map_err(|error| error.to_string())?;
        chat(messages).map_err(|error| format!("{error:?}"))
    }

    #[test]
    fn contents_are_texts_or_parts() {
        let got = read(
            r#"[{"role": "developer", "content": "a", "name": "x"},
                {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
                {"role": "assistant", "content": "", "tool_calls": []}]"#,
        );
        let expected = [("system", "a"), ("user", "b\nc"), ("assistant", "")];
        let message = |(role, content): (&str, &str)| v1::Message { role: role.into(), content: content.into() };
        assert_eq!(got.unwrap().messages, expected.map(message));
    }

    #[test]
    fn what_is_no_text_is_refused() {
        let cases = [
            (r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]"#, "image_url"),
            (r#"[{"role": "user", "content": 5}]"#, "a text or an array of parts"),
            (r#"[{"role": "user"}]"#, "messages[0].content: is missing"),
            (r#"[{"role": "tool", "content": "x"}]"#, "tools are not served"),
            (r#"[{"role": "assistant", "content": "x", "tool_calls": [{}]}]"#, "tools are not served"),
        ];
        for (json, expected) in cases {
            let error = read(json).unwrap_err();
            assert!(error.contains(expected), "got {error:?}, expected {expected:?}");
        }
    }
}
