//! Which model a request means and which of its replicas serves it.
//!
//! [`choice`]: the best of a model's replicas; [`prefix_index`]: what each of them holds, as far as is known;
//! [`reports`]: how that becomes known.

pub mod choice;
pub mod prefix_index;
pub mod reports;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::sync::watch;

use crate::{
    error::RequestError,
    served::{ModelTable, ServedModel},
};

/// Finds models in the planner's table; cheap to clone.
#[derive(Clone)]
pub struct Router {
    models: watch::Receiver<ModelTable>,
    is_complete: Arc<AtomicBool>,
}

impl Router {
    /// Routes by what the planner publishes; before that `is_complete`, a model that is not there may be wanted all the same.
    pub fn new(models: watch::Receiver<ModelTable>, is_complete: Arc<AtomicBool>) -> Self {
        Self { models, is_complete }
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
    /// [`RequestError::UnknownModel`], or [`RequestError::Invalid`] if the name is empty and several are loaded;
    /// [`RequestError::NotReady`] as long as it is not known which models are wanted.
    pub fn model(&self, name: &str) -> Result<Arc<ServedModel>, RequestError> {
        // Asked first: the table may become complete meanwhile.
        let is_complete = self.is_complete.load(Ordering::Acquire);
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
        if !is_complete {
            let problem = "this coordinator has not read yet which models are wanted".to_owned();
            return Err(RequestError::NotReady { model: name.to_owned(), problem });
        }
        Err(unknown(name, &models))
    }
}

fn names(models: &ModelTable) -> String {
    if models.is_empty() { "none".into() } else { models.keys().cloned().collect::<Vec<_>>().join(", ") }
}

fn unknown(name: &str, models: &ModelTable) -> RequestError {
    RequestError::UnknownModel { name: name.into(), loaded: names(models) }
}
