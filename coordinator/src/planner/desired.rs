//! What is desired where there are several coordinators: each changes it, the one that leads sees to it.
//! Invariants: a change is made to what was last read, and made again to what is there if another coordinator was faster.
//! A coordinator says what its settings want once, when it first reaches the store: so one that goes on under older settings
//! while others are replaced never puts them back, and between two the revision of the settings decides.

use std::{sync::Arc, time::Duration};

use lockstep_model::source::shown;
use lockstep_proto::v1;
use lockstep_sharding::PlanOptions;
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
        let is_new = self
            .change(|models| match models.iter_mut().find(|model| model.name == spec.name) {
                Some(model) if spec_of(model).as_ref() == Some(&spec) => {
                    model.attempt += 1;
                    Ok(false)
                }
                Some(_) => Err(RequestError::ModelExists { name: spec.name.clone() }),
                None => {
                    models.push(desired_model(&spec, 0));
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

    /// Wants the model of this coordinator's settings, and no other of earlier settings, as soon as the store can be reached.
    pub async fn ensure(&self, spec: ModelSpec, revision: u64) {
        let mut state = self.store.watch();
        while state.wait_for(StoreState::is_connected).await.is_ok() {
            match self.change(|models| Ok(claim(models, &spec, revision))).await {
                Ok(Claim::Made(changes)) => {
                    tracing::info!(model = spec.name, revision, changes, "these settings are in force");
                    return;
                }
                Ok(Claim::Outdated { newest }) => {
                    tracing::warn!(
                        model = spec.name,
                        revision,
                        newest,
                        "these settings do not count: a coordinator with a higher settings revision was here"
                    );
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

/// What became of a coordinator's settings.
#[derive(Debug, PartialEq, Eq)]
enum Claim {
    /// They are in force; what they changed, in words.
    Made(String),
    /// Those of a higher revision are.
    Outdated { newest: u64 },
}

/// Puts settings into force: their model as they want it, and none of earlier settings. Models of orders stay.
fn claim(models: &mut Vec<v1::DesiredModel>, spec: &ModelSpec, revision: u64) -> Claim {
    let newest = models.iter().filter(|model| model.is_of_settings).map(|model| model.settings_revision).max();
    if let Some(newest) = newest.filter(|newest| *newest > revision) {
        return Claim::Outdated { newest };
    }
    let mut changes = Vec::new();
    models.retain(|model| {
        let is_kept = model.name == spec.name || !model.is_of_settings;
        if !is_kept {
            changes.push(format!("model {:?} is not wanted any more", model.name));
        }
        is_kept
    });
    let known = models.iter_mut().find(|model| model.name == spec.name);
    let ours = v1::DesiredModel {
        is_of_settings: true,
        settings_revision: revision,
        ..desired_model(spec, known.as_ref().map_or(0, |known| known.attempt))
    };
    match known {
        Some(known) => {
            changes.extend(difference(known, &ours));
            *known = ours;
        }
        None => {
            changes.push("it is new".to_owned());
            models.push(ours);
        }
    }
    Claim::Made(if changes.is_empty() { "none".to_owned() } else { changes.join("; ") })
}

/// What of a desired model changes; `None` if nothing does.
fn difference(known: &v1::DesiredModel, ours: &v1::DesiredModel) -> Option<String> {
    let fields = |model: &v1::DesiredModel| {
        let limits = model.limits.map_or_else(|| "the defaults".to_owned(), |limits| format!("{limits:?}"));
        [
            ("model", model.source.clone()),
            ("policy", model.policy.clone()),
            ("min_workers", model.min_workers.to_string()),
            ("limits", limits),
        ]
    };
    let pairs = fields(known).into_iter().zip(fields(ours)).filter(|(known, ours)| known != ours);
    let words: Vec<_> = pairs
        .map(|((field, known), (_, ours))| format!("{field} was {}, is {}", shown(&known), shown(&ours)))
        .collect();
    (!words.is_empty()).then(|| words.join("; "))
}

/// A desired model as it is kept.
pub fn desired_model(spec: &ModelSpec, attempt: u64) -> v1::DesiredModel {
    let options = spec.plan_options;
    let wide = |number: Option<usize>| number.map(|number| number as u64);
    let limits = v1::PlanLimits {
        block_size: options.block_size as u64,
        max_sequence_tokens: wide(options.max_sequence_tokens),
        max_num_sequences: options.max_num_sequences as u64,
        max_step_tokens: wide(options.max_step_tokens),
        num_kv_blocks: wide(options.num_kv_blocks),
    };
    v1::DesiredModel {
        name: spec.name.clone(),
        source: spec.source.clone(),
        policy: spec.policy.to_string(),
        min_workers: u32::try_from(spec.min_workers).unwrap_or(u32::MAX),
        attempt,
        // The defaults need no words, whatever they are in the version that reads this.
        limits: (options != PlanOptions::default()).then_some(limits),
        is_of_settings: false,
        settings_revision: 0,
    }
}

/// What is kept as a desired model; `None` if this version does not know its policy, and is to leave it alone.
pub fn spec_of(model: &v1::DesiredModel) -> Option<ModelSpec> {
    Some(ModelSpec {
        name: model.name.clone(),
        source: model.source.clone(),
        policy: model.policy.parse().ok()?,
        min_workers: model.min_workers as usize,
        plan_options: model.limits.as_ref().map_or_else(PlanOptions::default, plan_options),
    })
}

fn plan_options(limits: &v1::PlanLimits) -> PlanOptions {
    let narrow = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    PlanOptions {
        block_size: narrow(limits.block_size),
        max_sequence_tokens: limits.max_sequence_tokens.map(narrow),
        max_num_sequences: narrow(limits.max_num_sequences),
        max_step_tokens: limits.max_step_tokens.map(narrow),
        num_kv_blocks: limits.num_kv_blocks.map(narrow),
    }
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

    fn spec(name: &str, min_workers: usize) -> ModelSpec {
        let plan_options = PlanOptions { num_kv_blocks: Some(7), ..PlanOptions::default() };
        ModelSpec { name: name.into(), source: "/m".into(), policy: "auto".parse().unwrap(), min_workers, plan_options }
    }

    #[test]
    fn what_is_kept_is_what_was_wanted() {
        let spec = spec("m", 2);
        assert_eq!(spec_of(&desired_model(&spec, 3)), Some(spec.clone()));
        let usual = ModelSpec { plan_options: PlanOptions::default(), ..spec };
        assert_eq!(spec_of(&desired_model(&usual, 3)), Some(usual));
    }

    #[test]
    fn settings_take_the_place_of_earlier_ones_and_no_others() {
        let mut models = vec![desired_model(&spec("ordered", 1), 0)];
        let made = |changes: &str| Claim::Made(changes.to_owned());
        let names = |models: &[v1::DesiredModel]| {
            models.iter().map(|model| (model.name.clone(), model.is_of_settings)).collect::<Vec<_>>()
        };
        assert_eq!(claim(&mut models, &spec("m", 2), 1), made("it is new"));
        models[1].attempt = 3;
        assert_eq!(claim(&mut models, &spec("m", 1), 1), made("min_workers was 2, is 1"), "who comes last counts");
        assert_eq!((models[1].min_workers, models[1].attempt), (1, 3));
        let first = spec("n", 1);
        assert_eq!(claim(&mut models, &first, 2), made("model \"m\" is not wanted any more; it is new"));
        assert_eq!(names(&models), [("ordered".into(), false), ("n".into(), true)]);
        // One with older settings is started again.
        let before = models.clone();
        assert_eq!(claim(&mut models, &spec("m", 1), 1), Claim::Outdated { newest: 2 });
        assert_eq!(models, before);
        assert_eq!(claim(&mut models, &first, 3), made("none"));
        assert_eq!(models[1].settings_revision, 3);
        // From now on it belongs to the settings.
        claim(&mut models, &spec("ordered", 1), 3);
        assert_eq!(names(&models), [("ordered".into(), true)]);
    }

    #[tokio::test]
    async fn an_order_that_nobody_carries_out_is_not_waited_for() {
        let spec = spec("m", 1);
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
