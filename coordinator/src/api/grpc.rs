//! The Inference service.
//! Not here: how a request becomes a stream of tokens ([`intake`](super::intake)).

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, StreamExt};
use lockstep_proto::v1;
use lockstep_telemetry::trace;
use tokio::time::Instant;
use tonic::{Request, Response, Status, metadata::MetadataMap};
use tracing::{Instrument, Span};

use super::{
    auth::Caller,
    delivery::deliver,
    generation::Generation,
    intake::{Intake, Times, described},
    validate::{self, PromptText},
};
use crate::{error::RequestError, tenants::Tenant};

/// By so much a deadline passes here before it does in tonic, which would answer CANCELLED.
const DEADLINE_MARGIN: Duration = Duration::from_millis(2);

/// Serves Inference; cheap to clone.
#[derive(Clone)]
pub struct InferenceService {
    /// Takes the requests.
    pub intake: Intake,
}

impl InferenceService {
    async fn start(
        &self,
        tenant: &Arc<Tenant>,
        request: v1::GenerateRequest,
        times: Times,
    ) -> Result<Generation, RequestError> {
        let mut permit = self.intake.enter(tenant)?;
        let prepared = self.intake.prepare(request).await?;
        trace::set_request_id(&Span::current(), &prepared.request_id);
        prepared.reserve(&mut permit)?;
        self.intake.start(&prepared, 0, permit, times).await
    }
}

#[tonic::async_trait]
impl v1::inference_server::Inference for InferenceService {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<v1::GenerateResponse, Status>> + Send>>;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let accepted = Instant::now();
        let timeout = timeout_of(request.metadata());
        let deadline = timeout.map(|timeout| accepted + timeout.saturating_sub(DEADLINE_MARGIN));
        let Caller(tenant) = Caller::of(&request)?;
        let span = trace::generate_span(request.metadata().as_ref());
        let times = Times { accepted, deadline };
        let pending = self.intake.pending(&tenant, &span);
        let started = self.start(&tenant, request.into_inner(), times).instrument(span).await;
        match started {
            Ok(generation) => {
                pending.started();
                let messages = deliver(generation.into_messages(), self.intake.slow_reader_timeout);
                Ok(Response::new(Box::pin(messages.map(|message| message.map_err(Status::from)))))
            }
            Err(error) => {
                pending.refused(error.class());
                Err(error.into())
            }
        }
    }

    async fn tokenize(&self, request: Request<v1::TokenizeRequest>) -> Result<Response<v1::TokenizeResponse>, Status> {
        let _permit = self.intake.enter(&Caller::of(&request)?.0)?;
        let request = request.into_inner();
        let model = self.intake.router.model(&request.model)?;
        let description = described(&model)?;
        let text = match request.input {
            None => Err(RequestError::invalid("input", "is missing: one of prompt, chat is needed"))?,
            Some(v1::tokenize_request::Input::Prompt(text)) => PromptText::Prompt(text),
            Some(v1::tokenize_request::Input::Chat(chat)) => {
                validate::check_chat(&chat)?;
                PromptText::Chat(chat)
            }
        };
        let tokenized = self.intake.tokenizing.encode(text, &description, |token_ids, model| {
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
        let models = self.intake.router.models();
        let models = models.iter().map(|(name, model)| v1::Model {
            name: name.clone(),
            max_sequence_tokens: model.max_sequence_tokens() as u32,
            vocab_size: model.description.as_ref().map_or(0, |description| description.shape.vocab_size as u32),
            ready: model.is_ready(),
        });
        Ok(Response::new(v1::ListModelsResponse { models: models.collect() }))
    }
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
