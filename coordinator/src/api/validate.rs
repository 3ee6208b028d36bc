//! Refuses what can never be served, by field, value and allowed range; fills in the defaults.
//! Invariant: what passes here can run on a worker as it is: `max_tokens` and `seed` are set and every id is in range.

use lockstep_model::ChatMessage;
use lockstep_proto::v1::{self, generate_request::Input};

use crate::{error::RequestError, served::ModelDescription};

/// Longest role of a message, bytes.
const MAX_ROLE_BYTES: usize = 64;
/// What rendering a message costs beside its text, as bytes of a prompt.
const MESSAGE_BYTES: usize = 64;
/// Longest request id, bytes.
pub const MAX_REQUEST_ID_BYTES: usize = 128;
/// Highest temperature.
const MAX_TEMPERATURE: f32 = 100.0;
/// Highest repetition penalty.
const MAX_REPETITION_PENALTY: f32 = 100.0;
/// Bound of presence and frequency penalty, either sign.
const MAX_ADDITIVE_PENALTY: f32 = 2.0;
/// Most alternatives for which log-probabilities are given.
const MAX_LOGPROBS: u32 = 20;
/// Most stop texts.
const MAX_STOPS: usize = 16;
/// Longest stop text, bytes.
const MAX_STOP_BYTES: usize = 256;
/// Most stop tokens.
const MAX_STOP_TOKENS: usize = 64;

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
        Some(Input::TokenIds(tokens)) => check_token_ids("token_ids", &tokens.ids, vocab_size)?,
        Some(Input::Chat(chat)) => check_chat(chat)?,
        Some(Input::Prompt(_)) => {}
    }
    check_sampling(request.sampling.as_ref().unwrap_or(&v1::SamplingParams::default()), vocab_size)
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

fn check_token_ids(field: &'static str, ids: &[u32], vocab_size: usize) -> Result<(), RequestError> {
    match ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab_size) {
        Some((index, id)) => {
            let problem = format!("has {id} at index {index}, the vocabulary has {vocab_size} tokens");
            Err(RequestError::invalid(field, problem))
        }
        None => Ok(()),
    }
}

fn check_sampling(sampling: &v1::SamplingParams, vocab_size: usize) -> Result<(), RequestError> {
    if sampling.max_tokens == Some(0) {
        return Err(RequestError::invalid("sampling.max_tokens", "is 0, at least 1 is needed"));
    }
    let in_range = |field, value: Option<f32>, least: f32, most: f32| match value {
        Some(value) if !(least..=most).contains(&value) => {
            Err(RequestError::invalid(field, format!("is {value}, allowed are {least} to {most}")))
        }
        _ => Ok(()),
    };
    let above_zero = |field, value: Option<f32>, most: f32| match value {
        Some(value) if !(value > 0.0 && value <= most) => {
            Err(RequestError::invalid(field, format!("is {value}, allowed is more than 0, up to {most}")))
        }
        _ => Ok(()),
    };
    in_range("sampling.temperature", sampling.temperature, 0.0, MAX_TEMPERATURE)?;
    above_zero("sampling.top_p", sampling.top_p, 1.0)?;
    in_range("sampling.min_p", sampling.min_p, 0.0, 1.0)?;
    above_zero("sampling.repetition_penalty", sampling.repetition_penalty, MAX_REPETITION_PENALTY)?;
    let most = MAX_ADDITIVE_PENALTY;
    in_range("sampling.presence_penalty", sampling.presence_penalty, -most, most)?;
    in_range("sampling.frequency_penalty", sampling.frequency_penalty, -most, most)?;
    if sampling.logprobs > MAX_LOGPROBS {
        let problem = format!("is {}, the limit is {MAX_LOGPROBS}", sampling.logprobs);
        return Err(RequestError::invalid("sampling.logprobs", problem));
    }
    check_stops(sampling)?;
    check_token_ids("sampling.stop_token_ids", &sampling.stop_token_ids, vocab_size)
}

fn check_stops(sampling: &v1::SamplingParams) -> Result<(), RequestError> {
    let too_many = |field, got: usize, limit: usize| {
        Err(RequestError::invalid(field, format!("has {got} entries, the limit is {limit}")))
    };
    if sampling.stop.len() > MAX_STOPS {
        return too_many("sampling.stop", sampling.stop.len(), MAX_STOPS);
    }
    if sampling.stop_token_ids.len() > MAX_STOP_TOKENS {
        return too_many("sampling.stop_token_ids", sampling.stop_token_ids.len(), MAX_STOP_TOKENS);
    }
    match sampling.stop.iter().enumerate().find(|(_, stop)| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
        Some((index, stop)) => {
            let problem =
                format!("has an entry of {} bytes at index {index}, allowed are 1 to {MAX_STOP_BYTES}", stop.len());
            Err(RequestError::invalid("sampling.stop", problem))
        }
        None => Ok(()),
    }
}

/// Checks the length of a prompt and returns the sampling parameters with every default that workers rely on.
///
/// # Errors
/// [`RequestError::Invalid`] if nothing can be generated after a prompt of `prompt_tokens`.
pub fn complete_sampling(
    sampling: Option<v1::SamplingParams>,
    prompt_tokens: usize,
    max_sequence_tokens: usize,
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
    sampling.max_tokens = Some(sampling.max_tokens.map_or(room, |wanted| wanted.min(room)));
    sampling.seed.get_or_insert_with(rand::random);
    Ok(sampling)
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

    fn refused_sampling(change: impl FnOnce(&mut v1::SamplingParams)) -> String {
        refused(|request| change(request.sampling.as_mut().unwrap()))
    }

    #[test]
    fn every_bad_field_is_named_with_its_value() {
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
            (refused_sampling(|s| s.max_tokens = Some(0)), "sampling.max_tokens: is 0, at least 1"),
            (
                refused_sampling(|s| s.temperature = Some(f32::NAN)),
                "sampling.temperature: is NaN, allowed are 0 to 100",
            ),
            (refused_sampling(|s| s.temperature = Some(-0.5)), "sampling.temperature: is -0.5"),
            (refused_sampling(|s| s.temperature = Some(f32::INFINITY)), "sampling.temperature: is inf"),
            (refused_sampling(|s| s.top_p = Some(0.0)), "sampling.top_p: is 0, allowed is more than 0, up to 1"),
            (refused_sampling(|s| s.top_p = Some(1.5)), "sampling.top_p: is 1.5"),
            (refused_sampling(|s| s.top_p = Some(f32::NAN)), "sampling.top_p: is NaN"),
            (refused_sampling(|s| s.min_p = Some(-0.1)), "sampling.min_p: is -0.1, allowed are 0 to 1"),
            (refused_sampling(|s| s.repetition_penalty = Some(0.0)), "sampling.repetition_penalty: is 0"),
            (
                refused_sampling(|s| s.presence_penalty = Some(3.0)),
                "sampling.presence_penalty: is 3, allowed are -2 to 2",
            ),
            (refused_sampling(|s| s.frequency_penalty = Some(f32::NAN)), "sampling.frequency_penalty: is NaN"),
            (refused_sampling(|s| s.logprobs = 21), "sampling.logprobs: is 21, the limit is 20"),
            (refused_sampling(|s| s.stop = vec!["x".into(); 17]), "sampling.stop: has 17 entries, the limit is 16"),
            (refused_sampling(|s| s.stop = vec![String::new()]), "sampling.stop: has an entry of 0 bytes at index 0"),
            (refused_sampling(|s| s.stop = vec!["x".repeat(257)]), "sampling.stop: has an entry of 257 bytes"),
            (refused_sampling(|s| s.stop_token_ids = vec![100]), "sampling.stop_token_ids: has 100 at index 0"),
            (refused_sampling(|s| s.stop_token_ids = vec![1; 65]), "sampling.stop_token_ids: has 65 entries"),
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
        assert!(complete_sampling(None, 0, 10).is_err());
        let error = complete_sampling(None, 10, 10).unwrap_err().to_string();
        assert_eq!(error, "input: has 10 tokens, the model serves 10, output included");
        let sampling = complete_sampling(None, 4, 10).unwrap();
        assert_eq!(sampling.max_tokens, Some(6));
        assert!(sampling.seed.is_some());
        let wanted = v1::SamplingParams { max_tokens: Some(100), seed: Some(7), ..Default::default() };
        let sampling = complete_sampling(Some(wanted), 4, 10).unwrap();
        assert_eq!((sampling.max_tokens, sampling.seed), (Some(6), Some(7)));
    }
}
