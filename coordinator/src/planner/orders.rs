//! Orders to the only coordinator, and the end of a model wherever that was ordered.
//! Not here: orders where there are several coordinators ([`desired`](super::desired)).

use futures::FutureExt;
use tokio::{sync::oneshot, time::Instant};

use super::{
    Command,
    model_state::{ModelState, Removal},
    reconciler::{Event, Reconciler},
    worker_calls,
};
use crate::{config::ModelSpec, error::RequestError};

impl Reconciler {
    pub(super) fn obey(&mut self, command: Command, now: Instant) {
        match command {
            Command::Load(spec, reply) => drop(reply.send(self.want(spec))),
            Command::Unload(name, reply) => self.unwant(&name, reply, now),
            Command::Discard(name, reply) if self.models.get(&name).is_some_and(|model| model.has_served) => {
                drop(reply.send(Ok(())));
            }
            Command::Discard(name, reply) => self.unwant(&name, reply, now),
            Command::DrainWorker(worker_id, reply) => {
                let outcome = match self.workers.get_mut(&worker_id) {
                    None => Err(RequestError::UnknownWorker(worker_id)),
                    Some(known) => {
                        known.is_draining = true;
                        let client = known.client.clone();
                        let drain = worker_calls::drain(client).map(|()| Event::Drained);
                        self.spawn(drain, |_| Event::Drained);
                        Ok(())
                    }
                };
                drop(reply.send(outcome));
            }
        }
    }

    /// Says whether the model is new.
    fn want(&mut self, spec: ModelSpec) -> Result<bool, RequestError> {
        match self.models.get_mut(&spec.name) {
            Some(model) if model.spec == spec && model.removal.is_none() => {
                // What failed before may have been mended.
                (model.retry_at, model.failed_attempts) = (None, 0);
                Ok(false)
            }
            Some(_) => Err(RequestError::ModelExists { name: spec.name }),
            None => {
                self.models.insert(spec.name.clone(), ModelState::new(spec));
                Ok(true)
            }
        }
    }

    fn unwant(&mut self, name: &str, reply: oneshot::Sender<Result<(), RequestError>>, now: Instant) {
        if !self.models.contains_key(name) {
            let loaded = self.models.keys().cloned().collect::<Vec<_>>().join(", ");
            drop(reply.send(Err(RequestError::UnknownModel { name: name.into(), loaded })));
            return;
        }
        self.remove(name, Some(reply), now);
    }

    /// Begins to let go of a model; `reply` is told when it is gone.
    pub(super) fn remove(
        &mut self,
        name: &str,
        reply: Option<oneshot::Sender<Result<(), RequestError>>>,
        now: Instant,
    ) {
        let deadline = now + self.config.drain_timeout;
        self.note(name, |model| {
            let removal = model.removal.get_or_insert_with(|| Removal { deadline, replies: Vec::new() });
            removal.replies.extend(reply);
        });
    }
}
