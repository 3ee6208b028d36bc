//! Makes what is served match what is wanted: desired models × live workers → plans, loads, unloads.
//! For: the admin service commands it, the router reads the table that it publishes.
//! Invariant: one task owns all state ([`reconciler`]); slow work runs in tasks of its own and comes back as events.

mod attempts;
mod deploy;
mod desired;
mod drains;
mod estranged;
mod ledger;
mod mirror;
mod model_state;
mod orders;
mod reconciler;
mod replacing;
mod reports;
mod starts;
mod topology;
mod unloads;
mod worker_calls;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockstep_transport::Outbound;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use self::desired::Desired;
use crate::{
    cluster::{PlanStore, Registry},
    config::ModelSpec,
    error::RequestError,
    router::Router,
    served::ModelTable,
};

/// Commands that wait for the reconciler.
const COMMAND_QUEUE: usize = 64;

/// What the planner needs to know.
pub struct PlannerConfig {
    /// Model to serve from the start.
    pub model: Option<ModelSpec>,
    /// Of the settings that say so; see `CoordinatorConfig`.
    pub settings_revision: u64,
    /// How long no worker has to come or go before models are planned without their `min_workers`, if ever.
    pub min_workers_timeout: Option<Duration>,
    /// How long workers have to stay before a model that is served is planned anew to use them, if ever.
    pub replan_delay: Option<Duration>,
    /// Longest wait for running requests when a model is unloaded.
    pub drain_timeout: Duration,
    /// How workers are reached.
    pub outbound: Outbound,
}

type Reply<T> = oneshot::Sender<Result<T, RequestError>>;

enum Command {
    Load(ModelSpec, Reply<bool>),
    Unload(String, Reply<()>),
    Discard(String, Reply<()>),
    DrainWorker(String, Reply<()>),
}

/// Commands the planner; cheap to clone.
#[derive(Clone)]
pub struct Planner {
    commands: mpsc::Sender<Command>,
    models: watch::Receiver<ModelTable>,
    is_complete: Arc<AtomicBool>,
    /// Where orders are left for the coordinator that leads, if there are several.
    desired: Option<Desired>,
}

impl Planner {
    /// Starts the reconciler; it ends when `closing` fires. `store` is what it shares with other coordinators.
    pub fn start(
        config: PlannerConfig,
        registry: Arc<dyn Registry>,
        store: Option<Arc<dyn PlanStore>>,
        closing: CancellationToken,
    ) -> Self {
        let (commands, command_receiver) = mpsc::channel(COMMAND_QUEUE);
        let published = watch::Sender::new(ModelTable::default());
        let models = published.subscribe();
        let desired = store.clone().map(|store| Desired::new(store, models.clone()));
        let is_claimed = Arc::new(AtomicBool::new(config.model.is_none() || desired.is_none()));
        if let Some((desired, spec)) = desired.clone().zip(config.model.clone()) {
            let (revision, is_claimed) = (config.settings_revision, Arc::clone(&is_claimed));
            let ensure = async move {
                desired.ensure(spec, revision).await;
                is_claimed.store(true, Ordering::Release);
            };
            tokio::spawn(closing.clone().run_until_cancelled_owned(ensure));
        }
        let is_complete = Arc::new(AtomicBool::new(false));
        let published = reconciler::Published { table: published, is_claimed, is_complete: Arc::clone(&is_complete) };
        let reconciler = reconciler::Reconciler::new(config, registry.watch(), store, published);
        tokio::spawn(reconciler.run(command_receiver, closing));
        Self { commands, models, is_complete, desired }
    }

    /// Finds models in the published table.
    pub fn router(&self) -> Router {
        Router::new(self.models.clone(), Arc::clone(&self.is_complete))
    }

    /// The published table.
    pub fn models(&self) -> watch::Receiver<ModelTable> {
        self.models.clone()
    }

    /// Wants a model from now on; returns before it is loaded, whether it is new. Wanting the same again only makes the
    /// next attempt come at once.
    ///
    /// # Errors
    /// [`RequestError::ModelExists`] if the name stands for something else; [`RequestError::Store`].
    pub async fn load(&self, spec: ModelSpec) -> Result<bool, RequestError> {
        if let Some(desired) = &self.desired {
            return desired.add(spec).await;
        }
        self.ask(|reply| Command::Load(spec, reply)).await
    }

    /// Drains and frees a model; returns when its memory is free.
    ///
    /// # Errors
    /// [`RequestError::UnknownModel`], [`RequestError::Store`].
    pub async fn unload(&self, name: String) -> Result<(), RequestError> {
        if let Some(desired) = &self.desired {
            return desired.remove(&name).await;
        }
        self.ask(|reply| Command::Unload(name, reply)).await
    }

    /// Unloads a model that never served; one that did stays.
    ///
    /// # Errors
    /// [`RequestError::UnknownModel`], [`RequestError::Store`].
    pub async fn discard(&self, name: String) -> Result<(), RequestError> {
        if let Some(desired) = &self.desired {
            return desired.discard(&name).await;
        }
        self.ask(|reply| Command::Discard(name, reply)).await
    }

    /// Gives a worker no new work from now on.
    ///
    /// # Errors
    /// [`RequestError::UnknownWorker`].
    pub async fn drain_worker(&self, worker_id: String) -> Result<(), RequestError> {
        self.ask(|reply| Command::DrainWorker(worker_id, reply)).await
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, RequestError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| RequestError::ShuttingDown)?;
        answer.await.map_err(|_| RequestError::ShuttingDown)?
    }
}
