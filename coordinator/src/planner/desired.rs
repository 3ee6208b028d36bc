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
/// As long as another coordinator may take to lead, twice.
const LEADERLESS: Duration = Duration::from_secs(10);
/// Between two attempts to make the model of the command line known.
const ENSURE_INTERVAL: Duration = Duration::from_secs(1);

/// What is desired, as orders change it; cheap to clone.
#[derive(Clone)]
pub struct Desired {
    store: Arc<dyn PlanStore>,
    models: watch::Receiver<ModelTable>,
    /// Without a leader for so long an order is not waited for.
    leaderless: Duration,
}

impl Desired {
    /// Changes are made in `store` and show in `models`.
    pub fn new(store: Arc<dyn PlanStore>, models: watch::Receiver<ModelTable>) -> Self {
        Self { store, models, leaderless: LEADERLESS }
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

    /// Wants a model no more; returns when it is gone, or when nobody is there to let go of it.
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
        tokio::select! {
            gone = models.wait_for(|models| !models.contains_key(name)) => {
                gone.map(drop).map_err(|_| RequestError::ShuttingDown)
            }
            () = self.nobody_leads() => Err(RequestError::Store(StoreError::Away(format!(
                "the order is kept, but no coordinator has led for {} s",
                self.leaderless.as_secs()
            )))),
        }
    }

    /// Returns when nobody has carried out orders for a while, as far as this coordinator can see.
    async fn nobody_leads(&self) {
        let mut state = self.store.watch();
        let leads = |state: &StoreState| state.is_connected() && state.leader.is_some();
        loop {
            // A closed channel means that the process ends, which whoever waits is told elsewhere.
            if state.wait_for(|state| !leads(state)).await.is_err() {
                return std::future::pending().await;
            }
            if tokio::time::timeout(self.leaderless, state.wait_for(leads)).await.is_err() {
                return;
            }
        }
    }

    /// Removes a model that never served.
    ///
    /// # Errors
    /// As [`Self::remove`].
    pub async fn discard(&self, name: &str) -> Result<(), RequestError> {
        let has_served = self.models.borrow().get(name).is_some_and(|model| model.has_served);
        if has_served { Ok(()) } else { self.remove(name).await }
    }

    /// Wants a model as soon as the store can be reached, unless its name is known there.
    pub async fn ensure(&self, spec: ModelSpec) {
        let mut state = self.store.watch();
        loop {
            let known = |state: &StoreState| state.desired.value.models.iter().find(|it| it.name == spec.name).cloned();
            let Ok(known) = state.wait_for(StoreState::is_connected).await.map(|state| known(&state)) else {
                return;
            };
            if let Some(difference) = known.as_ref().and_then(|known| difference(known, &spec)) {
                tracing::warn!(
                    model = spec.name,
                    difference,
                    "the model is desired otherwise than this coordinator's settings say: to have them count, unload it, \
                     then start a coordinator with them"
                );
            }
            let outcome = if known.is_some() { Ok(false) } else { self.add(spec.clone()).await };
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

/// What of a desired model is in force and what `spec` says instead; `None` if that is the same.
fn difference(known: &v1::DesiredModel, spec: &ModelSpec) -> Option<String> {
    let ours = desired_model(spec, known.attempt);
    let fields = [
        ("model", known.source.clone(), ours.source),
        ("policy", known.policy.clone(), ours.policy),
        ("min_workers", known.min_workers.to_string(), ours.min_workers.to_string()),
    ];
    let differing = fields.iter().filter(|(_, known, ours)| known != ours);
    let words: Vec<_> = differing.map(|(field, known, ours)| format!("{field} is {known}, not {ours}")).collect();
    (!words.is_empty()).then(|| words.join("; "))
}

/// What is kept as a desired model; `None` if this version does not know its policy, and is to leave it alone.
pub fn spec_of(model: &v1::DesiredModel) -> Option<ModelSpec> {
    Some(ModelSpec {
        name: model.name.clone(),
        source: model.source.clone(),
        policy: model.policy.parse().ok()?,
        min_workers: model.min_workers as usize,
    })
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, future::BoxFuture};

    use super::*;
    use crate::cluster::store::{Link, Versioned};

    /// Takes orders that nobody carries out.
    struct Leaderless(watch::Sender<StoreState>);

    impl PlanStore for Leaderless {
        fn id(&self) -> &str {
            "a"
        }

        fn watch(&self) -> watch::Receiver<StoreState> {
            self.0.subscribe()
        }

        fn write(&self, write: Write) -> BoxFuture<'static, Result<(), StoreError>> {
            if let Write::Desired { expected, value } = write {
                let desired = Versioned { value: Arc::new(value), revision: expected + 1 };
                self.0.send_modify(|state| state.desired = desired);
            }
            std::future::ready(Ok(())).boxed()
        }
    }

    #[test]
    fn settings_that_do_not_count_are_named() {
        let spec = ModelSpec { name: "m".into(), source: "/m".into(), policy: "auto".parse().unwrap(), min_workers: 2 };
        let known = desired_model(&spec, 3);
        assert_eq!(difference(&known, &spec), None);
        let said = difference(&known, &ModelSpec { min_workers: 1, source: "/n".into(), ..spec }).unwrap();
        assert_eq!(said, "model is /m, not /n; min_workers is 2, not 1");
    }

    #[tokio::test]
    async fn an_order_that_nobody_carries_out_is_not_waited_for() {
        let spec = ModelSpec { name: "m".into(), source: "/m".into(), policy: "auto".parse().unwrap(), min_workers: 1 };
        let value = v1::DesiredState { models: vec![desired_model(&spec, 0)] };
        let state = StoreState {
            desired: Versioned { value: Arc::new(value), revision: 1 },
            link: Link::Connected("here".into()),
            ..StoreState::new()
        };
        let model = super::super::model_state::ModelState::new(spec).snapshot();
        let models = watch::Sender::new(ModelTable::new([("m".to_owned(), Arc::new(model))].into()));
        let store = Arc::new(Leaderless(watch::Sender::new(state)));
        let leaderless = Duration::from_millis(50);
        let desired = Desired { leaderless, ..Desired::new(store.clone(), models.subscribe()) };
        let refused = desired.remove("m").await.unwrap_err();
        assert!(refused.to_string().contains("no coordinator has led"), "{refused}");
        assert!(store.0.borrow().desired.value.models.is_empty(), "the order stands");
    }
}
