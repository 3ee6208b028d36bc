//! `POST /v1/chat/completions`.

use axum::{
    Extension,
    extract::{Request, State},
    response::Response,
};
use lockstep_proto::v1::{self, generate_request::Input};
use serde::Serialize;

use super::{
    answer::{Order, Shape, answer},
    error::ApiError,
    json_body, messages,
    request::{Body, id_of, timeout_of},
};
use crate::api::{auth::Caller, http::HttpState};

/// Answers a chat.
///
/// # Errors
/// Any failure in OpenAI's shape.
pub async fn create(
    State(state): State<HttpState>,
    Extension(Caller(tenant)): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    answer(&state.intake, &tenant, order(request)).await
}

async fn order(request: Request) -> Result<(Order, Chat), ApiError> {
    let (timeout, id) = (timeout_of(request.headers())?, id_of("chatcmpl", request.headers()));
    let mut body = Body::read(&json_body(request).await?)?;
    let messages = body.messages.take().ok_or_else(|| ApiError::invalid("messages", "is missing"))?;
    let chat = messages::chat(messages)?;
    let top_logprobs = body.chat_logprobs()?;
    let max_tokens = body.max_completion_tokens.or(body.max_tokens);
    let request = body.generate(Input::Chat(chat), max_tokens, top_logprobs, id.clone())?;
    let (samples, delivery) = (body.samples(1)?, body.delivery()?);
    Ok((Order { id, requests: vec![request], samples, delivery, timeout }, Chat { top_logprobs }))
}

struct Chat {
    /// Alternatives wanted; `None`: no log-probabilities.
    top_logprobs: Option<u32>,
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Message>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Delta>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: String,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

#[derive(Serialize)]
struct Logprobs {
    content: Vec<TokenLogprobs>,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct TokenLogprobs {
    #[serde(flatten)]
    chosen: TokenLogprob,
    top_logprobs: Vec<TokenLogprob>,
}

#[derive(Serialize)]
struct TokenLogprob {
    token: String,
    logprob: f32,
    /// Null for a token that is part of a character.
    bytes: Option<Vec<u8>>,
}

impl Chat {
    fn logprobs(&self, logprobs: Vec<v1::TokenLogprobs>) -> Option<Logprobs> {
        let num_top = self.top_logprobs? as usize;
        let content = logprobs.into_iter().map(|logprobs| TokenLogprobs {
            chosen: token_logprob(logprobs.chosen.unwrap_or_default()),
            top_logprobs: logprobs.top.into_iter().take(num_top).map(token_logprob).collect(),
        });
        Some(Logprobs { content: content.collect(), refusal: None })
    }
}

fn token_logprob(token: v1::TokenLogprob) -> TokenLogprob {
    let is_whole = !token.text.contains(char::REPLACEMENT_CHARACTER);
    let bytes = is_whole.then(|| token.text.clone().into_bytes());
    TokenLogprob { logprob: finite(token.logprob), token: token.text, bytes }
}

/// OpenAI's number for "impossible" in place of minus infinity, which JSON does not know.
pub fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

impl Shape for Chat {
    type Choice = Choice;

    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";
    const INPUT: &'static str = "messages";

    fn opening(&mut self, index: usize) -> Option<Choice> {
        let delta = Some(Delta { role: Some("assistant"), content: Some(String::new()) });
        Some(Choice { index, message: None, delta, logprobs: None, finish_reason: None })
    }

    fn piece(&mut self, index: usize, delta: v1::Delta, finish_reason: Option<&'static str>) -> Choice {
        let logprobs = if finish_reason.is_some() { None } else { self.logprobs(delta.logprobs) };
        let delta = Some(Delta { role: None, content: finish_reason.is_none().then_some(delta.text) });
        Choice { index, message: None, delta, logprobs, finish_reason }
    }

    fn whole(&mut self, index: usize, output: v1::Delta, finish_reason: &'static str) -> Choice {
        let message = Some(Message { role: "assistant", content: output.text, refusal: None });
        let logprobs = self.logprobs(output.logprobs);
        Choice { index, message, delta: None, logprobs, finish_reason: Some(finish_reason) }
    }
}
