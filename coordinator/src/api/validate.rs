//! Refuses what can never be served, by field, value and allowed range; fills in the defaults.
//! Invariant: what passes here can run on a worker as it is: `max_tokens` and `seed` are set and every id is in range.

use lockstep_model::ChatMessage;
use lockstep_proto::{
    sampling,
    v1::{self, generate_request::Input},
};

use crate::{error::RequestError, served::ModelDescription};

/// Longest role of a message, bytes.
const MAX_ROLE_BYTES: usize = 64;
/// What rendering a message costs beside its text, as bytes of a prompt.
const MESSAGE_BYTES: usize = 64;
/// Longest request id, bytes.
pub const MAX_REQUEST_ID_BYTES: usize = 128;

/// Checks everything in a request that does not depend on the prompt's tokens.
///
/// # Errors
/// [`RequestError::Invalid`] naming the field.
pub fn check_request(request: &v1::GenerateRequest, vocab_size: usize) -> Result<(), RequestError> {
    let id = &request.request_id;
    if id.len() > MAX_REQUEST_ID_BYTES {
        let problem = format!("has {} bytes, the limit is {MAX_REQUEST_ID_BYTES}", id.len());
        return Err(RequestError::invalid("request_id", problem));
    }
    if id.chars().any(char::is_control) {
        return Err(RequestError::invalid("request_id", "has a control character"));
    }
    match &request.input {
        None => return Err(RequestError::invalid("input", "is missing: one of prompt, token_ids, chat is needed")),
        Some(Input::Prompt(prompt)) if prompt.is_empty() => return Err(RequestError::invalid("prompt", "is empty")),
        Some(Input::TokenIds(tokens)) => sampling::check_token_ids("token_ids", &tokens.ids, vocab_size)?,
        Some(Input::Chat(chat)) => check_chat(chat)?,
        Some(Input::Prompt(_)) => {}
    }
    if let Some(received) = &request.received {
        if id.is_empty() {
            return Err(RequestError::invalid(
                "request_id",
                "is empty, and received is given: it is that of the first try",
            ));
        }
        sampling::check_token_ids("received.token_ids", &received.token_ids, vocab_size)?;
    }
    if let Some(params) = &request.sampling {
        sampling::check(params, vocab_size)?;
    }
    Ok(())
}

/// Checks a conversation.
///
/// # Errors
/// [`RequestError::Invalid`] naming the field.
pub fn check_chat(chat: &v1::Chat) -> Result<(), RequestError> {
    if chat.messages.is_empty() {
        return Err(RequestError::invalid("chat.messages", "is empty"));
    }
    let is_refused = |role: &str| role.is_empty() || role.len() > MAX_ROLE_BYTES;
    match chat.messages.iter().enumerate().find(|(_, message)| is_refused(&message.role)) {
        Some((index, message)) => {
            let problem =
                format!("has {} bytes in message {index}, allowed are 1 to {MAX_ROLE_BYTES}", message.role.len());
            Err(RequestError::invalid("chat.messages.role", problem))
        }
        None => Ok(()),
    }
}

/// Checks the length of a prompt and returns the sampling parameters with every default that workers rely on.
///
/// # Errors
/// [`RequestError::Invalid`] if nothing, or not all that is asked for, can be generated after a prompt of `prompt_tokens`.
pub fn complete_sampling(
    sampling: Option<v1::SamplingParams>,
    prompt_tokens: usize,
    max_sequence_tokens: usize,
    request_id: &str,
) -> Result<v1::SamplingParams, RequestError> {
    if prompt_tokens == 0 {
        return Err(RequestError::invalid("input", "has no tokens"));
    }
    if prompt_tokens >= max_sequence_tokens {
        let problem = format!("has {prompt_tokens} tokens, the model serves {max_sequence_tokens}, output included");
        return Err(RequestError::invalid("input", problem));
    }
    let room = u32::try_from(max_sequence_tokens - prompt_tokens).unwrap_or(u32::MAX);
    let mut sampling = sampling.unwrap_or_default();
    let wanted = *sampling.max_tokens.get_or_insert(room);
    if wanted > room {
        let problem = format!(
            "is {wanted} after a prompt of {prompt_tokens} tokens, the model serves {max_sequence_tokens} together: at most {room}"
        );
        return Err(RequestError::invalid("sampling.max_tokens", problem));
    }
    sampling.seed.get_or_insert_with(|| seed_of(request_id));
    Ok(sampling)
}

/// The seed of a request that names none: FNV-1a of its id, the same in every coordinator.
fn seed_of(request_id: &str) -> u64 {
    request_id.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Checks how much of an answer there is already.
///
/// # Errors
/// [`RequestError::Invalid`] if it is more than was asked for.
pub fn check_received(received: &v1::Received, sampling: &v1::SamplingParams) -> Result<(), RequestError> {
    let (count, most) = (received.token_ids.len(), sampling.max_tokens());
    if count > most as usize {
        let problem = format!("has {count} tokens, at most {most} are generated");
        return Err(RequestError::invalid("received.token_ids", problem));
    }
    Ok(())
}

/// What a prompt is made of.
pub enum PromptText {
    /// Raw text.
    Prompt(String),
    /// To be rendered with the model's template.
    Chat(v1::Chat),
}

impl PromptText {
    /// Rough size of the work to render and tokenize it, bytes.
    pub fn num_bytes(&self) -> usize {
        match self {
            Self::Prompt(text) => text.len(),
            Self::Chat(chat) => {
                chat.messages.iter().map(|message| message.role.len() + message.content.len() + MESSAGE_BYTES).sum()
            }
        }
    }

    /// Its token ids.
    ///
    /// # Errors
    /// [`RequestError::Invalid`] if the model has no chat template, or with what the template raised.
    pub fn encode(self, model: &ModelDescription) -> Result<Vec<u32>, RequestError> {
        let refuse = |field| move |error: lockstep_model::ModelError| RequestError::invalid(field, error.to_string());
        match self {
            Self::Prompt(text) => model.tokenizer.encode(&text, true).map_err(refuse("prompt")),
            Self::Chat(chat) => {
                let template = model.chat_template.as_ref().ok_or_else(|| {
                    RequestError::invalid("chat", "the model has no chat template; send a prompt instead")
                })?;
                let messages: Vec<ChatMessage> = chat
                    .messages
                    .into_iter()
                    .map(|message| ChatMessage { role: message.role, content: message.content })
                    .collect();
                let text = template.render(&messages).map_err(refuse("chat"))?;
                // The template prints the BOS itself where the model wants one.
                model.tokenizer.encode(&text, false).map_err(refuse("chat"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut v1::GenerateRequest)) -> String {
        let mut request = v1::GenerateRequest {
            input: Some(Input::Prompt("hello".into())),
            sampling: Some(v1::SamplingParams::default()),
            ..Default::default()
        };
        assert!(check_request(&request, 100).is_ok());
        change(&mut request);
        check_request(&request, 100).unwrap_err().to_string()
    }

    #[test]
    fn every_bad_field_is_named_with_its_value() {
        let params = v1::SamplingParams { temperature: Some(-0.5), ..Default::default() };
        let cases = [
            (refused(|r| r.input = None), "input: is missing"),
            (refused(|r| r.input = Some(Input::Prompt(String::new()))), "prompt: is empty"),
            (refused(|r| r.input = Some(Input::Chat(v1::Chat::default()))), "chat.messages: is empty"),
            (
                refused(|r| r.input = Some(Input::TokenIds(v1::TokenIds { ids: vec![5, 100] }))),
                "token_ids: has 100 at index 1, the vocabulary has 100 tokens",
            ),
            (refused(|r| r.request_id = "x".repeat(129)), "request_id: has 129 bytes, the limit is 128"),
            (refused(|r| r.request_id = "a\nb".into()), "request_id: has a control character"),
            (refused(|r| r.sampling = Some(params.clone())), "sampling.temperature: is -0.5, allowed are 0 to 100"),
        ];
        for (got, expected) in cases {
            assert!(got.starts_with(expected), "got {got:?}, expected {expected:?}");
        }
    }

    #[test]
    fn every_part_of_a_chat_counts_as_work() {
        let message = |role: String, content: String| v1::Message { role, content };
        let chat = |messages| v1::Chat { messages };
        assert!(check_chat(&chat(vec![message("r".repeat(64), String::new())])).is_ok());
        let refused = check_chat(&chat(vec![message("r".repeat(16 << 20), String::new())])).unwrap_err().to_string();
        assert_eq!(refused, "chat.messages.role: has 16777216 bytes in message 0, allowed are 1 to 64");
        let many = chat(vec![message("user".into(), String::new()); 1000]);
        assert!(PromptText::Chat(many).num_bytes() >= 64_000);
        assert!(PromptText::Chat(chat(vec![message("user".into(), "x".repeat(100))])).num_bytes() < 300);
    }

    #[test]
    fn prompt_must_leave_room_for_a_token() {
        assert!(complete_sampling(None, 0, 10, "id").is_err());
        let error = complete_sampling(None, 10, 10, "id").unwrap_err().to_string();
        assert_eq!(error, "input: has 10 tokens, the model serves 10, output included");
        let sampling = complete_sampling(None, 4, 10, "id").unwrap();
        assert_eq!(sampling.max_tokens, Some(6));
        assert_eq!(sampling.seed, complete_sampling(None, 4, 10, "id").unwrap().seed);
        assert_ne!(sampling.seed, complete_sampling(None, 4, 10, "other").unwrap().seed);
        let wanted =
            |max_tokens| v1::SamplingParams { max_tokens: Some(max_tokens), seed: Some(7), ..Default::default() };
        let sampling = complete_sampling(Some(wanted(6)), 4, 10, "id").unwrap();
        assert_eq!((sampling.max_tokens, sampling.seed), (Some(6), Some(7)));
        let error = complete_sampling(Some(wanted(7)), 4, 10, "id").unwrap_err().to_string();
        let expected = "is 7 after a prompt of 4 tokens, the model serves 10 together: at most 6";
        assert_eq!(error, format!("sampling.max_tokens: {expected}"));
    }
}
