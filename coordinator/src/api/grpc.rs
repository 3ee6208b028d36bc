//! The Inference service.
//! Invariant: a request is refused before it costs anything: admission, model, values, prompt length, replica.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, stream};
use lockstep_proto::v1::{self, generate_request::Input};
use tokio::time::Instant;
use tonic::{Request, Response, Status, metadata::MetadataMap};

use super::{
    generation::{Generation, Running},
    output::Output,
    validate::{self, PromptText},
};
use crate::{
    admission::{Admission, Permit},
    error::RequestError,
    metrics::Metrics,
    router::Router,
    served::{ModelDescription, ServedModel},
};

/// Prompts up to so many bytes are tokenized in place, which is faster than a hop to another thread.
const INLINE_PROMPT_BYTES: usize = 4096;

/// Serves Inference; cheap to clone.
#[derive(Clone)]
pub struct InferenceService {
    /// Bounds the requests.
    pub admission: Admission,
    /// Chooses replicas.
    pub router: Router,
    /// Counts requests.
    pub metrics: Arc<Metrics>,
}

impl InferenceService {
    async fn start(
        &self,
        request: v1::GenerateRequest,
        permit: Permit,
        accepted: Instant,
        deadline: Option<Instant>,
    ) -> Result<Generation, RequestError> {
        let model = self.router.model(&request.model)?;
        let description = described(&model)?;
        validate::check_request(&request, description.shape.vocab_size)?;
        let encode = |text| tokenize(text, &description, |token_ids, _| token_ids);
        let prompt = match request.input {
            Some(Input::TokenIds(tokens)) => tokens.ids,
            Some(Input::Prompt(text)) => encode(PromptText::Prompt(text)).await?,
            Some(Input::Chat(chat)) => encode(PromptText::Chat(chat)).await?,
            None => Vec::new(),
        };
        let mut sampling = validate::complete_sampling(request.sampling, prompt.len(), model.max_sequence_tokens())?;
        let stops = std::mem::take(&mut sampling.stop);
        let prompt_tokens = prompt.len() as u32;
        let load = self.router.replica(&model, prompt.len() as u64 + u64::from(sampling.max_tokens()))?;
        let request_id =
            if request.request_id.is_empty() { uuid::Uuid::new_v4().to_string() } else { request.request_id };
        let eos_token_ids = if sampling.ignore_eos { Vec::new() } else { description.eos_token_ids.clone() };
        let sequence = v1::RunSequenceRequest {
            model: model.spec.name.clone(),
            plan_epoch: load.replica.plan_epoch,
            replica: load.replica.index as u32,
            request_id: request_id.clone(),
            token_ids: prompt,
            sampling: Some(sampling),
            eos_token_ids,
        };
        self.metrics.prompt_tokens.increment(u64::from(prompt_tokens));
        let metrics = Arc::clone(&self.metrics);
        let running = Running { request_id, permit, load, deadline, accepted, prompt_tokens, metrics };
        Generation::start(running, sequence, Output::new(description.tokenizer.clone(), stops)).await
    }
}

#[tonic::async_trait]
impl v1::inference_server::Inference for InferenceService {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<v1::GenerateResponse, Status>> + Send>>;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let accepted = Instant::now();
        let deadline = timeout_of(request.metadata()).map(|timeout| accepted + timeout);
        let started = match self.admission.enter() {
            Ok(permit) => self.start(request.into_inner(), permit, accepted, deadline).await,
            Err(error) => Err(error),
        };
        match started {
            Ok(generation) => {
                let messages = stream::unfold(generation, |mut generation| async move {
                    generation.next().await.map(|message| (message, generation))
                });
                Ok(Response::new(Box::pin(messages)))
            }
            Err(error) => {
                self.metrics.count_request(error.class().reason());
                Err(error.into())
            }
        }
    }

    async fn tokenize(&self, request: Request<v1::TokenizeRequest>) -> Result<Response<v1::TokenizeResponse>, Status> {
        let _permit = self.admission.enter()?;
        let request = request.into_inner();
        let model = self.router.model(&request.model)?;
        let description = described(&model)?;
        let text = match request.input {
            None => Err(RequestError::invalid("input", "is missing: one of prompt, chat is needed"))?,
            Some(v1::tokenize_request::Input::Prompt(text)) => PromptText::Prompt(text),
            Some(v1::tokenize_request::Input::Chat(chat)) => {
                validate::check_chat(&chat)?;
                PromptText::Chat(chat)
            }
        };
        let tokenized = tokenize(text, &description, |token_ids, model| {
            let text_of = |id: &u32| model.tokenizer.token_text(*id).unwrap_or_default();
            let tokens = token_ids.iter().map(text_of).collect();
            v1::TokenizeResponse { token_ids, tokens }
        });
        Ok(Response::new(tokenized.await?))
    }

    async fn list_models(
        &self,
        _request: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let models = self.router.models();
        let models = models.iter().map(|(name, model)| v1::Model {
            name: name.clone(),
            max_sequence_tokens: model.max_sequence_tokens() as u32,
            vocab_size: model.description.as_ref().map_or(0, |description| description.shape.vocab_size as u32),
            ready: model.is_ready(),
        });
        Ok(Response::new(v1::ListModelsResponse { models: models.collect() }))
    }
}

fn described(model: &ServedModel) -> Result<Arc<ModelDescription>, RequestError> {
    let not_ready = || RequestError::NotReady { model: model.spec.name.clone(), problem: model.explain().public };
    model.description.clone().ok_or_else(not_ready)
}

/// Tokenizes a text and does `finish` with it, both on a thread of its own if the text is long.
async fn tokenize<T: Send + 'static>(
    text: PromptText,
    model: &Arc<ModelDescription>,
    finish: impl FnOnce(Vec<u32>, &ModelDescription) -> T + Send + 'static,
) -> Result<T, RequestError> {
    let is_short = text.num_bytes() <= INLINE_PROMPT_BYTES;
    let model = Arc::clone(model);
    let work = move || text.encode(&model).map(|token_ids| finish(token_ids, &model));
    if is_short {
        return work();
    }
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| RequestError::Internal(format!("tokenizing failed: {error}")))?
}

/// The client's `grpc-timeout`: up to eight digits and a unit.
fn timeout_of(metadata: &MetadataMap) -> Option<Duration> {
    let value = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    let count: u64 = digits.parse().ok().filter(|_| digits.len() <= 8)?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_grpc_timeouts() {
        let timeout = |value: &'static str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", value.parse().unwrap());
            timeout_of(&metadata)
        };
        assert_eq!(timeout("250m"), Some(Duration::from_millis(250)));
        assert_eq!(timeout("1S"), Some(Duration::from_secs(1)));
        assert_eq!(timeout("S"), None);
        assert_eq!(timeout("123456789m"), None);
        assert_eq!(timeout("5x"), None);
    }
}
