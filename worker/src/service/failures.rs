//! Models of which a part could not be loaded here.
//! For: readiness. A rollout of workers that lack the file, its memory or a driver is to stop at the first of them, while
//! others serve.
//! What counts is this worker's own failure: its file, its device, a plan that does not fit them. A load that another worker
//! of the replica let down, or that was cancelled, says nothing about this one: workers of a tensor-parallel replica that are replaced one by one would else wait for each
//! other, the new one for the old one's part and the old one for its turn.
//! Invariant: a failure stands until a part of the model loads here, until the coordinator that asked for it is gone, or
//! until no coordinator has asked again for [`STANDS_FOR`]: then the plan does without this worker.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::WorkerError;

/// Coordinators wait 30 seconds at most before they try a model again, and may leave a worker out of every second attempt.
const STANDS_FOR: Duration = Duration::from_secs(120);

/// Models by name, with when and why.
#[derive(Default)]
pub(super) struct Failures(Mutex<BTreeMap<String, (Instant, String)>>);

impl Failures {
    /// Notes how a load of a part ended that was not cancelled.
    pub fn note<T>(&self, model: &str, outcome: &Result<T, WorkerError>, now: Instant) {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Ok(_) => drop(failures.remove(model)),
            Err(
                error @ (WorkerError::Model(_)
                | WorkerError::Kernel(_)
                | WorkerError::Plan(_)
                | WorkerError::Mismatch(_)),
            ) => drop(failures.insert(model.to_owned(), (now, error.to_string()))),
            Err(_) => {}
        }
    }

    /// Forgets all: whoever plans from now on will ask again.
    pub fn forget(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Why this worker is not ready, if it failed.
    pub fn standing(&self, now: Instant) -> Option<String> {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        failures.retain(|_, (at, _)| now.saturating_duration_since(*at) < STANDS_FOR);
        let (model, (_, problem)) = failures.first_key_value()?;
        Some(format!("a part of model {model:?} could not be loaded: {problem}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_stands_until_it_is_made_good_or_no_longer_asked_for() {
        let (failures, start) = (Failures::default(), Instant::now());
        let fail = |model: &str, error| failures.note::<()>(model, &Err(error), start);
        fail("m", WorkerError::Mismatch("no file".to_owned()));
        fail("n", WorkerError::Mismatch("no memory".to_owned()));
        assert!(
            failures.standing(start).unwrap().contains("\"m\" could not be loaded: the plan does not fit: no file")
        );
        failures.note("m", &Ok(()), start);
        assert!(failures.standing(start + STANDS_FOR / 2).unwrap().contains("\"n\""));
        assert_eq!(failures.standing(start + STANDS_FOR), None);
        fail("m", WorkerError::Mismatch("no file".to_owned()));
        failures.forget();
        assert_eq!(failures.standing(start), None);
    }

    #[test]
    fn another_workers_failure_is_not_ours() {
        let (failures, now) = (Failures::default(), Instant::now());
        let link = WorkerError::Link { peer: 1, what: "is gone".to_owned() };
        for error in [link, WorkerError::ReplicaBroken("its load was cancelled".to_owned())] {
            failures.note::<()>("m", &Err(error), now);
        }
        assert_eq!(failures.standing(now), None);
    }
}
