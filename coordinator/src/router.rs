//! Which model a request means and which of its replicas serves it.
//! Invariant: only ready replicas are chosen, the one with the fewest outstanding tokens first.

use std::sync::Arc;

use tokio::sync::watch;

use crate::{
    error::RequestError,
    served::{ModelTable, ReplicaLoad, ServedModel},
};

/// Chooses replicas from the planner's table; cheap to clone.
#[derive(Clone)]
pub struct Router {
    models: watch::Receiver<ModelTable>,
}

impl Router {
    /// Routes by what the planner publishes.
    pub fn new(models: watch::Receiver<ModelTable>) -> Self {
        Self { models }
    }

    /// Every desired model now.
    pub fn models(&self) -> ModelTable {
        Arc::clone(&self.models.borrow())
    }

    /// Changes of the table.
    pub fn watch(&self) -> watch::Receiver<ModelTable> {
        self.models.clone()
    }

    /// The model of that name; the only one if the name is empty.
    ///
    /// # Errors
    /// [`RequestError::UnknownModel`], or [`RequestError::Invalid`] if the name is empty and several are loaded.
    pub fn model(&self, name: &str) -> Result<Arc<ServedModel>, RequestError> {
        let models = self.models.borrow();
        if let Some(model) = models.get(name) {
            return Ok(Arc::clone(model));
        }
        if name.is_empty() && models.len() == 1 {
            return models.values().next().cloned().ok_or_else(|| unknown(name, &models));
        }
        if name.is_empty() && models.len() > 1 {
            return Err(RequestError::invalid(
                "model",
                format!("is empty, and several are loaded: {}", names(&models)),
            ));
        }
        Err(unknown(name, &models))
    }

    /// The least loaded ready replica of a model, charged with `tokens`.
    ///
    /// # Errors
    /// [`RequestError::NotReady`] with the model's problem.
    pub fn replica(&self, model: &ServedModel, tokens: u64) -> Result<ReplicaLoad, RequestError> {
        let not_ready = || RequestError::NotReady { model: model.spec.name.clone(), problem: model.explain().public };
        model.least_loaded(tokens, |_| true).ok_or_else(not_ready)
    }
}

fn names(models: &ModelTable) -> String {
    if models.is_empty() { "none".into() } else { models.keys().cloned().collect::<Vec<_>>().join(", ") }
}

fn unknown(name: &str, models: &ModelTable) -> RequestError {
    RequestError::UnknownModel { name: name.into(), loaded: names(models) }
}
