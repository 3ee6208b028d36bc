//! The body of a completion or chat request → [`v1::GenerateRequest`]s.
//! Invariants: a value of the wrong type is refused with its path; what would change the output and is not served is
//! refused by name; what is in no list is ignored. Ranges are not checked here: [`validate`](crate::api::validate) does.

use std::time::Duration;

use axum::http::HeaderMap;
use lockstep_proto::{
    sampling::MAX_LOGPROBS,
    v1::{self, generate_request::Input},
};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::{
    error::ApiError,
    messages::Message,
    prompt::{MAX_CHOICES, Prompts},
    texts::Texts,
    unserved::FirstUnserved,
};

/// A client's deadline for the whole answer, milliseconds.
const REQUEST_TIMEOUT: &str = "x-request-timeout-ms";
/// A client's name for a request, the same when it tries again.
const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// What both endpoints read; each takes its own input and `logprobs`.
#[derive(Debug, Deserialize)]
pub struct Body {
    model: Option<String>,
    /// Input of a completion.
    pub prompt: Option<Prompts>,
    /// Input of a chat.
    pub messages: Option<Vec<Message>>,
    /// The prompt is part of a completion's text.
    pub echo: Option<bool>,
    /// Most tokens of the output.
    pub max_tokens: Option<u32>,
    /// The newer name of it.
    pub max_completion_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    seed: Option<i64>,
    stop: Option<Texts>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    logprobs: Option<Logprobs>,
    top_logprobs: Option<u32>,
    n: Option<usize>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    response_format: Option<ResponseFormat>,
    modalities: Option<Texts>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected true, false or a number of tokens")]
enum Logprobs {
    Wanted(bool),
    Count(u32),
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
}

/// How the answer is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// As one JSON object.
    Whole,
    /// As server-sent events.
    Stream {
        /// The last one holds the usage.
        include_usage: bool,
    },
}

impl Body {
    /// Reads a body.
    ///
    /// # Errors
    /// 400 for what is no JSON object, has a value of the wrong type, or asks for what is not served.
    pub fn read(json: &[u8]) -> Result<Self, ApiError> {
        let mut reader = serde_json::Deserializer::from_slice(json);
        let body: Self = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
            let path = error.path().to_string();
            ApiError::invalid(if path == "." { "" } else { &path }, error.inner())
        })?;
        reader.end().map_err(|error| ApiError::invalid("", error))?;
        let FirstUnserved(unserved) = serde_json::from_slice(json).map_err(|error| ApiError::invalid("", error))?;
        if let Some(name) = unserved {
            return Err(ApiError::invalid(name, "is not served"));
        }
        if let Some(format) = body.response_format.as_ref().filter(|format| format.kind != "text") {
            let problem = format!("is {:?}, only text is served", format.kind);
            return Err(ApiError::invalid("response_format.type", problem));
        }
        let modalities = body.modalities.iter().flat_map(|Texts(modalities)| modalities);
        if let Some(modality) = modalities.into_iter().find(|modality| *modality != "text") {
            return Err(ApiError::invalid("modalities", format!("has {modality:?}, only text is served")));
        }
        Ok(body)
    }

    /// Choices for each prompt.
    ///
    /// # Errors
    /// 400 if that makes none or too many for `num_prompts`.
    pub fn samples(&self, num_prompts: usize) -> Result<usize, ApiError> {
        let samples = self.n.unwrap_or(1);
        let most = MAX_CHOICES / num_prompts.max(1);
        if samples == 0 || samples > most {
            let problem = format!("is {samples} for {num_prompts} prompts, allowed are 1 to {most}");
            return Err(ApiError::invalid("n", problem));
        }
        Ok(samples)
    }

    /// How to answer.
    ///
    /// # Errors
    /// 400 for options of a stream that is none.
    pub fn delivery(&self) -> Result<Delivery, ApiError> {
        match (self.stream.unwrap_or(false), &self.stream_options) {
            (true, options) => {
                let include_usage = options.as_ref().and_then(|options| options.include_usage).unwrap_or(false);
                Ok(Delivery::Stream { include_usage })
            }
            (false, None) => Ok(Delivery::Whole),
            (false, Some(_)) => Err(ApiError::invalid("stream_options", "needs stream to be true")),
        }
    }

    /// Alternatives for which a completion wants log-probabilities: its `logprobs` is a number.
    ///
    /// # Errors
    /// 400 if it is too large, or true.
    pub fn completion_logprobs(&self) -> Result<Option<u32>, ApiError> {
        match self.logprobs {
            None | Some(Logprobs::Wanted(false)) => Ok(None),
            Some(Logprobs::Wanted(true)) => Err(ApiError::invalid("logprobs", "is true, expected a number of tokens")),
            Some(Logprobs::Count(count)) => within("logprobs", count).map(Some),
        }
    }

    /// The same for a chat, where `logprobs` is a switch and `top_logprobs` the number.
    ///
    /// # Errors
    /// 400 if it is too large, or given without the switch.
    pub fn chat_logprobs(&self) -> Result<Option<u32>, ApiError> {
        match (&self.logprobs, self.top_logprobs) {
            (Some(Logprobs::Wanted(true)), count) => within("top_logprobs", count.unwrap_or(0)).map(Some),
            (Some(Logprobs::Count(_)), _) => Err(ApiError::invalid("logprobs", "is a number, expected true or false")),
            (_, None | Some(0)) => Ok(None),
            (_, Some(_)) => Err(ApiError::invalid("top_logprobs", "needs logprobs to be true")),
        }
    }

    /// The request for one prompt. `logprobs` counts the alternatives that are wanted.
    ///
    /// # Errors
    /// 400 for a `top_k` out of range.
    pub fn generate(
        &self,
        input: Input,
        max_tokens: Option<u32>,
        logprobs: Option<u32>,
        request_id: String,
    ) -> Result<v1::GenerateRequest, ApiError> {
        let top_k = match self.top_k {
            // vLLM's word for all.
            None | Some(-1) => None,
            Some(top_k) => {
                let refuse = |_| ApiError::invalid("top_k", format!("is {top_k}, allowed are -1 and above"));
                Some(u32::try_from(top_k).map_err(refuse)?)
            }
        };
        let sampling = v1::SamplingParams {
            max_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k,
            min_p: self.min_p,
            seed: self.seed.map(i64::cast_unsigned),
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            stop: self.stop.as_ref().map_or_else(Vec::new, |Texts(stops)| stops.clone()),
            stop_token_ids: self.stop_token_ids.clone().unwrap_or_default(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            // The chosen token's alone cannot be asked for; what is too much is left out of the answer.
            logprobs: logprobs.map_or(0, |count| count.max(1)),
        };
        let model = self.model.clone().unwrap_or_default();
        Ok(v1::GenerateRequest { model, request_id, input: Some(input), sampling: Some(sampling), received: None })
    }
}

/// How long a client waits for the whole answer: `x-request-timeout-ms`, up to a day.
///
/// # Errors
/// 400 for what is no such number.
pub fn timeout_of(headers: &HeaderMap) -> Result<Option<Duration>, ApiError> {
    let Some(value) = headers.get(REQUEST_TIMEOUT) else { return Ok(None) };
    let millis = value.to_str().ok().and_then(|text| text.parse().ok());
    let millis = millis.filter(|millis| (1..=86_400_000).contains(millis));
    let refuse = || ApiError::invalid(REQUEST_TIMEOUT, format!("is {value:?}, allowed are 1 to 86400000"));
    millis.map(|millis| Some(Duration::from_millis(millis))).ok_or_else(refuse)
}

/// The id of an answer. Where a client names its request (`idempotency-key`) it follows from that name, and with it the
/// draws: the same request under the same key has the same answer, whichever coordinator and replica gives it.
pub fn id_of(kind: &str, headers: &HeaderMap) -> String {
    let id = match headers.get(IDEMPOTENCY_KEY) {
        None => uuid::Uuid::new_v4().as_u128(),
        Some(key) => {
            let digest: [u8; 32] = Sha256::digest(key.as_bytes()).into();
            digest.first_chunk().map_or(0, |first| u128::from_be_bytes(*first))
        }
    };
    format!("{kind}-{id:032x}")
}

fn within(field: &str, count: u32) -> Result<u32, ApiError> {
    if count > MAX_LOGPROBS {
        return Err(ApiError::invalid(field, format!("is {count}, the limit is {MAX_LOGPROBS}")));
    }
    Ok(count)
}
