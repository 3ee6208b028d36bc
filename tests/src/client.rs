//! Requests as a client makes them.

use std::time::{Duration, Instant};

use anyhow::Context;
use lockstep_proto::{
    status::Class,
    v1::{
        self, admin_client::AdminClient, generate_request::Input, generate_response::Event,
        inference_client::InferenceClient,
    },
};
use tonic::{
    Request, Status, Streaming,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::Channel,
};

use crate::process::PATIENCE;

/// Between two tries.
const PAUSE: Duration = Duration::from_millis(100);
/// Nats by which log-probabilities of different cuts may differ.
const LAST_BITS: f32 = 1e-4;
/// Nats below which a sequence alone, whose activations have 8 bits, may part from one that is computed otherwise: a last
/// bit that differs flips a rounding, which flips others a layer later. In three such comparisons of ten outputs on GPUs,
/// six of which part, the largest gaps were 0.119, 0.163 and 0.324; this is nearly half as much again.
pub const EIGHT_BITS: f32 = 0.45;
/// What coordinators, and only they, say in a status.
const REASON: &str = "lockstep-reason";

/// A connection that shows an API key, if there is one.
pub type Server = InterceptedService<Channel, ApiKey>;

/// An API key as calls carry it.
#[derive(Clone, Default)]
pub struct ApiKey(Option<MetadataValue<Ascii>>);

impl Interceptor for ApiKey {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

/// A connection; cheap to clone.
#[derive(Clone)]
pub struct Client {
    /// Inference.
    pub inference: InferenceClient<Server>,
    /// Admin.
    pub admin: AdminClient<Server>,
}

/// Everything that a stream brought.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// All text.
    pub text: String,
    /// All tokens.
    pub token_ids: Vec<u32>,
    /// All log-probabilities, one a token if asked for.
    pub logprobs: Vec<v1::TokenLogprobs>,
    /// The last message.
    pub finish: v1::Finish,
    /// Longest time between two messages, those of several streams included that were read one after the other.
    pub longest_gap: Duration,
    last_message: Option<Instant>,
}

impl Client {
    /// Connects to `host:port`.
    ///
    /// # Errors
    /// If nothing answers there.
    pub async fn connect(address: &str) -> anyhow::Result<Self> {
        Self::connect_with(address, ApiKey::default()).await
    }

    /// The same as the tenant of an API key.
    ///
    /// # Errors
    /// If nothing answers there, or the key is no text of a header.
    pub async fn connect_as(address: &str, key: &str) -> anyhow::Result<Self> {
        Self::connect_with(address, ApiKey(Some(format!("Bearer {key}").parse()?))).await
    }

    async fn connect_with(address: &str, key: ApiKey) -> anyhow::Result<Self> {
        let channel = Channel::from_shared(format!("http://{address}"))?.connect().await?;
        Ok(Self {
            inference: InferenceClient::with_interceptor(channel.clone(), key.clone()),
            admin: AdminClient::with_interceptor(channel, key),
        })
    }

    /// Starts a request.
    ///
    /// # Errors
    /// The server's refusal.
    pub async fn start(&self, request: v1::GenerateRequest) -> Result<Streaming<v1::GenerateResponse>, Status> {
        Ok(self.inference.clone().generate(request).await?.into_inner())
    }

    /// Runs a request to its end.
    ///
    /// # Errors
    /// The server's refusal or a break.
    pub async fn generate(&self, request: v1::GenerateRequest) -> Result<Output, Status> {
        read_to_end(self.start(request).await?).await
    }

    /// Token ids of a text.
    ///
    /// # Errors
    /// The server's refusal.
    pub async fn tokenize(&self, text: &str) -> Result<Vec<u32>, Status> {
        let input = Some(v1::tokenize_request::Input::Prompt(text.into()));
        let request = v1::TokenizeRequest { model: String::new(), input };
        Ok(self.inference.clone().tokenize(request).await?.into_inner().token_ids)
    }

    /// Whether the only model is served.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn is_ready(&self) -> Result<bool, Status> {
        let models = self.inference.clone().list_models(v1::ListModelsRequest {}).await?.into_inner().models;
        Ok(models.iter().all(|model| model.ready))
    }

    /// The engine of the only replica, as its leader last reported it.
    ///
    /// # Errors
    /// If there is none.
    pub async fn engine(&self) -> anyhow::Result<v1::EngineStatus> {
        let cluster = self.admin.clone().get_cluster(v1::GetClusterRequest {}).await?.into_inner();
        let replica = cluster.models.first().and_then(|model| model.replicas.first()).context("no replica")?;
        replica.engine.context("no report of the engine yet")
    }
}

impl Output {
    /// Adds what a stream brings until it ends, well or not.
    ///
    /// # Errors
    /// The status that ended it early.
    pub async fn read(&mut self, mut stream: Streaming<v1::GenerateResponse>) -> Result<(), Status> {
        while let Some(message) = stream.message().await? {
            let now = Instant::now();
            let gap = self.last_message.replace(now).map_or(Duration::ZERO, |last| now - last);
            self.longest_gap = self.longest_gap.max(gap);
            match message.event {
                Some(Event::Delta(delta)) => {
                    self.text.push_str(&delta.text);
                    self.token_ids.extend(delta.token_ids);
                    self.logprobs.extend(delta.logprobs);
                }
                Some(Event::Finish(finish)) => self.finish = finish,
                None => {}
            }
        }
        Ok(())
    }

    /// What a client that has this need not be sent again.
    pub fn received(&self) -> v1::Received {
        v1::Received { token_ids: self.token_ids.clone(), text_bytes: self.text.len() as u64 }
    }
}

/// Reads a stream to its end.
///
/// # Errors
/// The status that ended it early.
pub async fn read_to_end(stream: Streaming<v1::GenerateResponse>) -> Result<Output, Status> {
    let mut output = Output::default();
    output.read(stream).await?;
    Ok(output)
}

/// Runs a request to its end at the first of these coordinators; when that one is lost, shuts down or has nothing that
/// serves, the next one goes on with it. `request_id` must name it. Returns how often that was so.
///
/// # Errors
/// Whatever else a coordinator says, or the last refusal once nothing has come for [`PATIENCE`].
pub async fn generate_at_any(clients: &[Client], request: &v1::GenerateRequest) -> Result<(Output, usize), Status> {
    let (mut output, mut progress) = (Output::default(), Instant::now());
    for (num_tries, client) in clients.iter().cycle().enumerate() {
        let received = Some(output.received());
        let num_received = output.token_ids.len();
        let ended = match client.start(v1::GenerateRequest { received, ..request.clone() }).await {
            Ok(stream) => output.read(stream).await,
            Err(status) => Err(status),
        };
        let Err(status) = ended else { return Ok((output, num_tries)) };
        if output.token_ids.len() > num_received {
            progress = Instant::now();
        }
        let is_lost = !status.metadata().contains_key(REASON);
        let is_refused = matches!(Class::of(&status), Class::NotReady | Class::ShuttingDown);
        if !(is_lost || is_refused) || progress.elapsed() > PATIENCE {
            return Err(status);
        }
        tokio::time::sleep(PAUSE).await;
    }
    Err(Status::invalid_argument("no coordinator"))
}

/// A greedy request with the log-probabilities of the two best tokens, which goes on past the end of sequence.
pub fn greedy(input: Input, max_tokens: u32) -> v1::GenerateRequest {
    let sampling = v1::SamplingParams {
        max_tokens: Some(max_tokens),
        temperature: Some(0.0),
        logprobs: 2,
        ignore_eos: true,
        ..Default::default()
    };
    v1::GenerateRequest { input: Some(input), sampling: Some(sampling), ..Default::default() }
}

/// Token ids as an input.
pub fn tokens(ids: &[u32]) -> Input {
    Input::TokenIds(v1::TokenIds { ids: ids.to_vec() })
}

/// How far the best two tokens of a step lie apart, nats; infinite if fewer were given.
pub fn gap(logprobs: &v1::TokenLogprobs) -> f32 {
    match logprobs.top.as_slice() {
        [first, second, ..] => first.logprob - second.logprob,
        _ => f32::INFINITY,
    }
}

/// Where two greedy outputs part: the position, and how far the best two tokens lie apart there, nats.
///
/// Up to that position both saw the same tokens; what follows is not comparable.
pub fn parting(reference: &Output, other: &Output) -> Option<(usize, f32)> {
    let position = reference.token_ids.iter().zip(&other.token_ids).position(|(one, other)| one != other)?;
    Some((position, reference.logprobs.get(position).map_or(f32::INFINITY, gap)))
}

/// Refuses an output that is not what came undisturbed. Log-probabilities may differ in last bits: the cut of the model over
/// workers follows their measured speeds, and cuts add up in different orders. How much of the prompt was cached depends on
/// where it ran.
///
/// # Errors
/// Naming what differs.
pub fn check_undisturbed(undisturbed: &Output, output: &Output) -> anyhow::Result<()> {
    let tokens = |output: &Output| output.token_ids.clone();
    anyhow::ensure!(tokens(output) == tokens(undisturbed), "tokens {output:?} instead of {undisturbed:?}");
    anyhow::ensure!(output.text == undisturbed.text, "{:?} instead of {:?}", output.text, undisturbed.text);
    let (got, expected) = (&output.finish, &undisturbed.finish);
    let counts = |finish: &v1::Finish| finish.usage.map(|usage| (usage.prompt_tokens, usage.completion_tokens));
    let is_same = (got.reason, counts(got)) == (expected.reason, counts(expected));
    anyhow::ensure!(is_same, "{got:?} instead of {expected:?}");
    let chosen = |output: &Output| output.logprobs.iter().map(|it| it.chosen.clone()).collect::<Option<Vec<_>>>();
    let (got, expected) = (chosen(output).context("no log-probability")?, chosen(undisturbed).unwrap_or_default());
    anyhow::ensure!(got.len() == expected.len(), "{} log-probabilities instead of {}", got.len(), expected.len());
    for (got, expected) in got.iter().zip(&expected) {
        let is_same = (&got.text, got.token_id) == (&expected.text, expected.token_id);
        anyhow::ensure!(
            is_same && (got.logprob - expected.logprob).abs() < LAST_BITS,
            "{got:?} instead of {expected:?}"
        );
    }
    Ok(())
}

/// Refuses outputs that part where rounding cannot explain it: where the best two tokens lie `tolerance` nats apart or
/// more.
///
/// # Errors
/// Naming the position, tokens and gap.
pub fn check_same(reference: &Output, other: &Output, tolerance: f32) -> anyhow::Result<()> {
    let Some((position, found)) = parting(reference, other) else {
        let (one, two) = (reference.token_ids.len(), other.token_ids.len());
        anyhow::ensure!(one == two, "{one} tokens against {two}");
        return Ok(());
    };
    let (one, two) = (reference.token_ids[position], other.token_ids[position]);
    anyhow::ensure!(found < tolerance, "token {position} is {one} against {two} at a gap of {found} nats");
    Ok(())
}
