//! `POST /v1/completions`.

use axum::{
    Extension,
    extract::{Request, State},
    response::Response,
};
use lockstep_proto::v1::{self, generate_request::Input};
use serde::{Serialize, Serializer, ser::SerializeMap};

use super::{
    answer::{Order, Shape, answer},
    chat::finite,
    error::ApiError,
    json_body,
    prompt::Prompts,
    request::{Body, id_of, timeout_of},
};
use crate::api::{auth::Caller, http::HttpState, intake::Prepared};

/// Most tokens if a request does not say it, as OpenAI's servers do.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Answers a completion.
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

async fn order(request: Request) -> Result<(Order, Completion), ApiError> {
    let (timeout, id) = (timeout_of(request.headers())?, id_of("cmpl", request.headers()));
    let mut body = Body::read(&json_body(request).await?)?;
    let Prompts(prompts) = body.prompt.take().ok_or_else(|| ApiError::invalid("prompt", "is missing"))?;
    if prompts.is_empty() {
        return Err(ApiError::invalid("prompt", "is empty"));
    }
    let samples = body.samples(prompts.len())?;
    let logprobs = body.completion_logprobs()?;
    let is_echo = body.echo.unwrap_or(false);
    if is_echo && logprobs.is_some() {
        return Err(ApiError::invalid("echo", "cannot be combined with logprobs: a prompt's are not computed"));
    }
    let max_tokens = Some(body.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS));
    let texts = prompts.iter().map(|prompt| is_echo.then(|| text_of(prompt))).collect();
    let request = |(index, input)| {
        let request_id = if index == 0 { id.clone() } else { format!("{id}-{index}") };
        body.generate(input, max_tokens, logprobs, request_id)
    };
    let offsets = vec![0; prompts.len() * samples];
    let requests = prompts.into_iter().enumerate().map(request).collect::<Result<_, _>>()?;
    let order = Order { id, requests, samples, delivery: body.delivery()?, timeout };
    Ok((order, Completion { logprobs, samples, texts, offsets }))
}

/// The text of a prompt; none for token ids, which only the model's tokenizer can tell.
fn text_of(prompt: &Input) -> Option<String> {
    match prompt {
        Input::Prompt(text) => Some(text.clone()),
        _ => None,
    }
}

struct Completion {
    /// Alternatives wanted; `None`: no log-probabilities.
    logprobs: Option<u32>,
    samples: usize,
    /// For each prompt its text if it is echoed: inside, `None` until the tokenizer told it.
    texts: Vec<Option<Option<String>>>,
    /// For each choice the length of its text so far, characters.
    offsets: Vec<usize>,
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    text: String,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<Alternatives>,
    text_offset: Vec<usize>,
}

/// An object of tokens and log-probabilities, most likely first.
struct Alternatives(Vec<v1::TokenLogprob>);

impl Serialize for Alternatives {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_map(Some(self.0.len()))?;
        for token in &self.0 {
            object.serialize_entry(&token.text, &finite(token.logprob))?;
        }
        object.end()
    }
}

impl Completion {
    fn echo(&self, index: usize) -> Option<String> {
        self.texts.get(index / self.samples)?.clone()?
    }

    fn logprobs(&mut self, index: usize, output: &v1::Delta) -> Option<Logprobs> {
        let num_top = self.logprobs? as usize;
        let offset = self.offsets.get_mut(index)?;
        let mut logprobs = Logprobs::default();
        for token in &output.logprobs {
            let chosen = token.chosen.clone().unwrap_or_default();
            logprobs.text_offset.push(*offset);
            *offset += chosen.text.chars().count();
            logprobs.token_logprobs.push(finite(chosen.logprob));
            logprobs.tokens.push(chosen.text);
            logprobs.top_logprobs.push(Alternatives(token.top.iter().take(num_top).cloned().collect()));
        }
        Some(logprobs)
    }
}

impl Shape for Completion {
    type Choice = Choice;

    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";
    const INPUT: &'static str = "prompt";

    fn prepare(&mut self, prompts: &[Prepared]) {
        for (text, prompt) in self.texts.iter_mut().zip(prompts) {
            if let Some(text @ None) = text {
                // Ids past the vocabulary were refused.
                *text = prompt.description.tokenizer.decode(&prompt.token_ids).ok();
            }
        }
    }

    fn opening(&mut self, index: usize) -> Option<Choice> {
        Some(Choice { index, text: self.echo(index)?, logprobs: None, finish_reason: None })
    }

    fn piece(&mut self, index: usize, delta: v1::Delta, finish_reason: Option<&'static str>) -> Choice {
        let logprobs = if finish_reason.is_some() { None } else { self.logprobs(index, &delta) };
        Choice { index, text: delta.text, logprobs, finish_reason }
    }

    fn whole(&mut self, index: usize, output: v1::Delta, finish_reason: &'static str) -> Choice {
        let logprobs = self.logprobs(index, &output);
        let text = self.echo(index).unwrap_or_default() + &output.text;
        Choice { index, text, logprobs, finish_reason: Some(finish_reason) }
    }
}
