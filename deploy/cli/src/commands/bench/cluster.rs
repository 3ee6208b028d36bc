//! A running cluster as the target: token ids in, token ids out, over gRPC.

use std::time::Instant;

use lockstep_proto::v1::{
    GenerateRequest, ListModelsRequest, SamplingParams, TokenIds, generate_request::Input, generate_response::Event,
    inference_client::InferenceClient,
};

use super::measure::TokenTimes;
use crate::client::{Reached, Server, ServerArgs, answer, refused};

/// A connection and the model's limits.
pub struct ClusterTarget {
    client: InferenceClient<Server>,
    address: String,
    model: String,
    /// For the report.
    pub description: String,
    /// Token ids below it are valid.
    pub vocab_size: usize,
    /// Longest sequence.
    pub max_sequence_tokens: usize,
}

impl ClusterTarget {
    /// Connects and looks the model up.
    ///
    /// # Errors
    /// If the server cannot be reached or does not serve the model.
    pub async fn connect(server: &ServerArgs, name: &str) -> anyhow::Result<Self> {
        let Reached { mut client, address } = server.inference().await?;
        let models = answer(&address, client.list_models(ListModelsRequest {})).await?;
        let mut named = models.models.into_iter().filter(|model| name.is_empty() || model.name == name);
        let (Some(model), None) = (named.next(), named.next()) else {
            anyhow::bail!("{} serves no model {name:?}, or several: name one with --model-name", server.server);
        };
        anyhow::ensure!(model.ready, "model {} is not ready", model.name);
        Ok(Self {
            client,
            description: format!("{} at {address}", model.name),
            address,
            model: model.name,
            vocab_size: model.vocab_size as usize,
            max_sequence_tokens: model.max_sequence_tokens as usize,
        })
    }

    /// Runs one request to its end.
    ///
    /// # Errors
    /// If the server refuses or fails.
    pub async fn generate(&self, prompt: Vec<u32>, max_tokens: usize) -> anyhow::Result<TokenTimes> {
        let request = GenerateRequest {
            model: self.model.clone(),
            request_id: String::new(),
            input: Some(Input::TokenIds(TokenIds { ids: prompt })),
            sampling: Some(SamplingParams {
                max_tokens: Some(u32::try_from(max_tokens)?),
                temperature: Some(0.0),
                ignore_eos: true,
                ..SamplingParams::default()
            }),
            received: None,
        };
        let start = Instant::now();
        let call = self.client.clone().generate(request).await;
        let mut stream = call.map_err(|status| refused(&self.address, &status))?.into_inner();
        let mut tokens = Vec::with_capacity(max_tokens);
        while let Some(response) = stream.message().await.map_err(|status| refused(&self.address, &status))? {
            if let Some(Event::Delta(delta)) = response.event {
                tokens.resize(tokens.len() + delta.token_ids.len(), Instant::now());
            }
        }
        Ok(TokenTimes { start, tokens })
    }
}
