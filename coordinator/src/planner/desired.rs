//! Orders where there are several coordinators: each changes what is desired, the one that leads sees to it.
//! Invariant: a change is made to what was last read, and made again to what is there if another coordinator was faster.

use std::{sync::Arc, time::Duration};

use lockstep_proto::v1;
use tokio::sync::watch;

use crate::{
    cluster::{
        PlanStore,
        store::{StoreError, StoreState, Write},
    },
    config::ModelSpec,
    error::RequestError,
    served::ModelTable,
};

/// Most attempts to be the first to change a value.
const ATTEMPTS: usize = 10;
/// Longest wait for what another coordinator wrote, and for our own table to show a change.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two attempts to make the model of the command line known.
const ENSURE_INTERVAL: Duration = Duration::from_secs(1);

/// What is desired, as orders change it; cheap to clone.
#[derive(Clone)]
pub struct Desired {
    store: Arc<dyn PlanStore>,
    models: watch::Receiver<ModelTable>,
}

impl Desired {
    /// Changes are made in `store` and show in `models`.
    pub fn new(store: Arc<dyn PlanStore>, models: watch::Receiver<ModelTable>) -> Self {
        Self { store, models }
    }

    /// Wants a model, or wants it tried again at once; says whether it is new. Returns when the table shows it.
    ///
    /// # Errors
    /// [`RequestError::ModelExists`], [`RequestError::Store`].
    pub async fn add(&self, spec: ModelSpec) -> Result<bool, RequestError> {
        let wanted = desired_model(&spec, 0);
        let is_new = self
            .change(|models| match models.iter_mut().find(|model| model.name == spec.name) {
                Some(model) if (v1::DesiredModel { attempt: 0, ..model.clone() }) == wanted => {
                    model.attempt += 1;
                    Ok(false)
                }
                Some(_) => Err(RequestError::ModelExists { name: spec.name.clone() }),
                None => {
                    models.push(wanted.clone());
                    Ok(true)
                }
            })
            .await?;
        let mut models = self.models.clone();
        // The reconciler takes it up in its next round; a closed table means that the process ends.
        let _ = tokio::time::timeout(PATIENCE, models.wait_for(|models| models.contains_key(&spec.name))).await;
        Ok(is_new)
    }

    /// Wants a model no more; returns when it is gone.
    ///
    /// # Errors
    /// [`RequestError::UnknownModel`], [`RequestError::Store`].
    pub async fn remove(&self, name: &str) -> Result<(), RequestError> {
        let mut models = self.models.clone();
        let is_served = models.borrow().contains_key(name);
        self.change(|desired| {
            let num_before = desired.len();
            desired.retain(|model| model.name != name);
            if desired.len() == num_before && !is_served {
                let loaded = desired.iter().map(|model| model.name.clone()).collect::<Vec<_>>().join(", ");
                return Err(RequestError::UnknownModel { name: name.to_owned(), loaded });
            }
            Ok(())
        })
        .await?;
        let gone = models.wait_for(|models| !models.contains_key(name)).await;
        gone.map(drop).map_err(|_| RequestError::ShuttingDown)
    }

    /// Removes a model unless it serves.
    ///
    /// # Errors
    /// As [`Self::remove`].
    pub async fn discard(&self, name: &str) -> Result<(), RequestError> {
        let serves = self.models.borrow().get(name).is_some_and(|model| model.is_ready());
        if serves { Ok(()) } else { self.remove(name).await }
    }

    /// Wants a model as soon as the store can be reached, unless its name is known there.
    pub async fn ensure(&self, spec: ModelSpec) {
        let mut state = self.store.watch();
        loop {
            let is_known = |state: &StoreState| state.desired.value.models.iter().any(|model| model.name == spec.name);
            let Ok(known) = state.wait_for(StoreState::is_connected).await.map(|state| is_known(&state)) else {
                return;
            };
            let outcome = if known { Ok(false) } else { self.add(spec.clone()).await };
            match outcome {
                Ok(is_new) => {
                    tracing::info!(model = spec.name, is_new, "the model is desired");
                    return;
                }
                Err(error) => tracing::warn!(model = spec.name, %error, "the model cannot be made known"),
            }
            tokio::time::sleep(ENSURE_INTERVAL).await;
        }
    }

    async fn change<T>(
        &self,
        change: impl Fn(&mut Vec<v1::DesiredModel>) -> Result<T, RequestError>,
    ) -> Result<T, RequestError> {
        let mut state = self.store.watch();
        let mut attempts = 1;
        loop {
            let seen = state.borrow_and_update().desired.clone();
            let mut value = v1::DesiredState::clone(&seen.value);
            let outcome = change(&mut value.models)?;
            if value == *seen.value {
                return Ok(outcome);
            }
            let expected = seen.revision;
            match self.store.write(Write::Desired { expected, value }).await {
                Ok(()) => return Ok(outcome),
                Err(StoreError::Conflict) if attempts < ATTEMPTS => {
                    attempts += 1;
                    let is_newer = |state: &StoreState| state.desired.revision != expected;
                    let _ = tokio::time::timeout(PATIENCE, state.wait_for(is_newer)).await;
                }
                Err(error) => return Err(RequestError::Store(error)),
            }
        }
    }
}

/// A desired model as it is kept.
pub fn desired_model(spec: &ModelSpec, attempt: u64) -> v1::DesiredModel {
    v1::DesiredModel {
        name: spec.name.clone(),
        source: spec.source.clone(),
        policy: spec.policy.to_string(),
        min_workers: u32::try_from(spec.min_workers).unwrap_or(u32::MAX),
        attempt,
    }
}

/// What is kept as a desired model; `None` if this version does not know its policy.
pub fn spec_of(model: &v1::DesiredModel) -> Option<ModelSpec> {
    let policy = model.policy.parse().inspect_err(|error| {
        tracing::error!(model = model.name, policy = model.policy, %error, "the policy of a desired model cannot be read");
    });
    Some(ModelSpec {
        name: model.name.clone(),
        source: model.source.clone(),
        policy: policy.ok()?,
        min_workers: model.min_workers as usize,
    })
}
