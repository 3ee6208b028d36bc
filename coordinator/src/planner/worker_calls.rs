//! What the planner asks of workers: describe a model, load a replica, unload it.
//! Invariant: every call ends: by its time limit, or when the worker's lease is lost and its replica broken.

use std::{collections::BTreeMap, sync::Arc, sync::atomic::Ordering, time::Duration};

use futures::{StreamExt, stream::FuturesUnordered};
use lockstep_model::{ChatTemplate, Tokenizer, TokenizerConfig};
use lockstep_proto::{status::unreachable_worker, v1, v1::worker_client::WorkerClient};
use lockstep_transport::explain;
use tokio_util::sync::CancellationToken;
use tonic::{Status, transport::Channel};

use super::unloads::Part;
use crate::served::{Member, ModelDescription, Replica, ReplicaState};

/// Reading a header and tokenizer from a slow disk.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(120);
/// Between two progress messages of a load.
const LOAD_SILENCE: Duration = Duration::from_secs(300);
/// Freeing memory.
const UNLOAD_TIMEOUT: Duration = Duration::from_secs(10);

/// A registration as the planner last saw it.
pub struct KnownWorker {
    /// Distinguishes it from the same worker's other registrations.
    pub session: u64,
    /// Its service.
    pub client: WorkerClient<Channel>,
    /// It has said what it holds.
    pub has_reported: bool,
    /// It takes no new work.
    pub is_draining: bool,
    /// Cancelled when it is not registered any more.
    pub gone: CancellationToken,
}

/// The clients of a replica's workers; `None` if one of them is not registered any more.
pub fn clients_of(
    workers: &BTreeMap<String, KnownWorker>,
    members: &[Member],
) -> Option<Vec<(String, WorkerClient<Channel>)>> {
    members
        .iter()
        .map(|member| {
            let known = workers.get(&member.worker_id).filter(|known| known.session == member.session)?;
            Some((member.worker_id.clone(), known.client.clone()))
        })
        .collect()
}

/// Asks a worker what a checkpoint says, and builds the text side of it. Nothing is waited for once the worker is `gone`.
pub async fn describe(
    mut worker: WorkerClient<Channel>,
    gone: CancellationToken,
    source: String,
) -> Result<Arc<ModelDescription>, String> {
    let call = worker.describe_model(v1::DescribeModelRequest { source });
    let call = gone.run_until_cancelled(tokio::time::timeout(DESCRIBE_TIMEOUT, call));
    let description = match call.await.ok_or("the worker that describes the model was lost")? {
        Err(_) => return Err(format!("the worker did not describe the model within {} s", DESCRIBE_TIMEOUT.as_secs())),
        Ok(answer) => answer.map_err(|status| text_of(&status))?.into_inner(),
    };
    let built = tokio::task::spawn_blocking(move || build_description(description)).await;
    built.map_err(|error| format!("reading the model's description failed: {error}"))?
}

fn build_description(description: v1::DescribeModelResponse) -> Result<Arc<ModelDescription>, String> {
    let shape = lockstep_sharding::codec::decode_shape(&description.shape).map_err(|error| error.to_string())?;
    let config = TokenizerConfig {
        bos_token_id: description.bos_token_id,
        add_bos_token: description.add_bos_token,
        eos_token_ids: description.eos_token_ids.clone(),
    };
    let tokenizer = Tokenizer::from_json(&description.tokenizer_json, config).map_err(|error| error.to_string())?;
    let text_of_token = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default();
    let chat_template = if description.chat_template.is_empty() {
        None
    } else {
        let bos = text_of_token(description.bos_token_id);
        let eos = text_of_token(description.eos_token_ids.first().copied());
        Some(ChatTemplate::new(&description.chat_template, &bos, &eos).map_err(|error| error.to_string())?)
    };
    Ok(Arc::new(ModelDescription { shape, tokenizer, chat_template, eos_token_ids: description.eos_token_ids }))
}

/// Why a replica could not be loaded.
#[derive(Debug)]
pub struct LoadFailure {
    /// In words, for operators.
    pub problem: String,
    /// The workers that could not reach each other, if that was it.
    pub estranged: Option<[String; 2]>,
}

impl From<String> for LoadFailure {
    fn from(problem: String) -> Self {
        Self { problem, estranged: None }
    }
}

/// Loads every part of a replica in parallel; adds its progress to the replica. The first failure is the outcome.
///
/// `requests` pairs each of its workers' ids with its client.
pub async fn load(
    replica: Arc<Replica>,
    workers: Vec<(String, WorkerClient<Channel>)>,
    request: v1::LoadReplicaRequest,
) -> Result<(), LoadFailure> {
    let mut state = replica.watch();
    let mut parts: FuturesUnordered<_> = workers
        .into_iter()
        .map(|(worker_id, client)| {
            let (replica, request) = (&replica, request.clone());
            async move {
                load_part(replica, client, request).await.map_err(|failure| LoadFailure {
                    problem: format!("worker {worker_id}: {}", failure.problem),
                    estranged: failure.unreachable.map(|other| [worker_id, other]),
                })
            }
        })
        .collect();
    loop {
        tokio::select! {
            part = parts.next() => match part {
                Some(outcome) => outcome?,
                None => return Ok(()),
            },
            broken = state.wait_for(|state| matches!(state, ReplicaState::Broken(_))) => {
                return Err(match broken.as_deref() {
                    Ok(ReplicaState::Broken(breakage)) => breakage.detail.clone(),
                    _ => "the load was given up".to_owned(),
                }
                .into());
            }
        }
    }
}

/// Why a part of a replica could not be loaded.
struct PartFailure {
    problem: String,
    /// The worker that the one which loads it could not reach.
    unreachable: Option<String>,
}

impl From<Status> for PartFailure {
    fn from(status: Status) -> Self {
        Self { problem: text_of(&status), unreachable: unreachable_worker(&status) }
    }
}

async fn load_part(
    replica: &Replica,
    mut client: WorkerClient<Channel>,
    request: v1::LoadReplicaRequest,
) -> Result<(), PartFailure> {
    let failed = |problem: String| PartFailure { problem, unreachable: None };
    let silent = |_| failed(format!("nothing was heard of the load for {} s", LOAD_SILENCE.as_secs()));
    let answer = tokio::time::timeout(LOAD_SILENCE, client.load_replica(request)).await.map_err(silent)?;
    let mut progress = answer?.into_inner();
    let (mut loaded, mut total) = (0, 0);
    loop {
        let message = tokio::time::timeout(LOAD_SILENCE, progress.message()).await.map_err(silent)?;
        let Some(message) = message? else {
            return Err(failed("the load ended before it was ready".to_owned()));
        };
        // Each worker reports sums of its own; only their growth is added to the replica's.
        replica.loaded_bytes.fetch_add(message.loaded_bytes.saturating_sub(loaded), Ordering::Relaxed);
        replica.total_bytes.fetch_add(message.total_bytes.saturating_sub(total), Ordering::Relaxed);
        (loaded, total) = (loaded.max(message.loaded_bytes), total.max(message.total_bytes));
        if message.ready {
            return Ok(());
        }
    }
}

/// Frees a part, as who leads in `leader_term`, and says whether it is freed. If not, the worker's heartbeats go on to list it.
pub async fn unload(mut client: WorkerClient<Channel>, part: &Part, leader_term: u64) -> bool {
    let Part { worker_id, model, plan_epoch, replica, .. } = part;
    let (plan_epoch, replica) = (*plan_epoch, *replica);
    let call =
        client.unload_replica(v1::UnloadReplicaRequest { model: model.clone(), plan_epoch, replica, leader_term });
    match tokio::time::timeout(UNLOAD_TIMEOUT, call).await {
        Ok(Ok(_)) => return true,
        Ok(Err(status)) => {
            tracing::warn!(worker_id, model, plan_epoch, replica, error = status.message(), "unload failed");
        }
        Err(_) => tracing::warn!(worker_id, model, plan_epoch, replica, "unload timed out"),
    }
    false
}

/// Tells a worker to take no new work; its heartbeats say so from then on.
pub async fn drain(mut client: WorkerClient<Channel>) {
    match tokio::time::timeout(UNLOAD_TIMEOUT, client.drain(v1::DrainRequest {})).await {
        Ok(Ok(_)) => {}
        Ok(Err(status)) => tracing::warn!(error = status.message(), "drain failed"),
        Err(_) => tracing::warn!("drain timed out"),
    }
}

fn text_of(status: &Status) -> String {
    explain(status).unwrap_or_else(|| status.message().to_owned())
}
