//! When a cluster begins anew: all its workers are gone, and `min_workers` counts again for the next plan.
//! For: a restart of everything, whose first worker is not to get a plan for itself alone.

use std::time::Duration;

use tokio::time::Instant;

use super::reconciler::Reconciler;

/// So long a coordinator that plans must have seen no worker. One that has just taken over finds those that live sooner.
const DESERTED: Duration = Duration::from_secs(2);

impl Reconciler {
    /// Lets every model start anew once no worker was there for a while.
    pub(super) fn note_desertion(&mut self, leads: bool, now: Instant) {
        if !leads || !self.workers.is_empty() {
            self.deserted_since = None;
        } else if now >= *self.deserted_since.get_or_insert(now) + DESERTED {
            self.models.values_mut().for_each(|model| model.has_started = false);
        }
    }
}
