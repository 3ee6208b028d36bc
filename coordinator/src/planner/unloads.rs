//! Which parts workers were told to free. Plain state; time is passed in.
//! Invariant: a part is asked for once at a time, and again only after a while: heartbeats may still show what is gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

/// After an unload ended, so long the same part is not asked for again.
const RETRY: Duration = Duration::from_secs(3);

/// A part of a replica on one registration of a worker.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Part {
    /// Who holds it.
    pub worker_id: String,
    /// Its registration.
    pub session: u64,
    /// Name of the model.
    pub model: String,
    /// Version of the plan.
    pub plan_epoch: u64,
    /// Index of the replica in its plan.
    pub replica: u32,
}

/// How a call ended.
struct End {
    at: Instant,
    is_freed: bool,
}

/// Unload calls, by part, with their ends.
#[derive(Default)]
pub struct Unloads(BTreeMap<Part, Option<End>>);

impl Unloads {
    /// The workers that still hold what nobody wants: an attempt to free it has failed.
    pub fn cluttered(&self, unwanted: Vec<Part>) -> BTreeSet<String> {
        unwanted.into_iter().filter(|part| !self.is_freed(part)).map(|part| part.worker_id).collect()
    }

    /// Whether a call for `part` should start now; notes that it does.
    pub fn start(&mut self, part: &Part, now: Instant) -> bool {
        self.0.retain(|_, end| end.as_ref().is_none_or(|end| now < end.at + RETRY));
        let is_new = !self.0.contains_key(part);
        if is_new {
            self.0.insert(part.clone(), None);
        }
        is_new
    }

    /// Notes that the call ended, and whether the worker has freed the part.
    pub fn end(&mut self, part: &Part, is_freed: bool, now: Instant) {
        if let Some(end) = self.0.get_mut(part) {
            *end = Some(End { at: now, is_freed });
        }
    }

    /// Forgets the calls to a registration that ended: nobody plans with it, so nobody has to wait for them.
    pub fn forget(&mut self, worker_id: &str, session: u64) {
        self.0.retain(|part, _| part.worker_id != worker_id || part.session != session);
    }

    /// Whether the part was freed lately: a heartbeat that lists it is older.
    pub fn is_freed(&self, part: &Part) -> bool {
        self.0.get(part).is_some_and(|end| end.as_ref().is_some_and(|end| end.is_freed))
    }

    /// The parts that are being freed.
    pub fn running(&self) -> impl Iterator<Item = &Part> {
        self.0.iter().filter(|(_, end)| end.is_none()).map(|(part, _)| part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_asked_for_again_after_a_while() {
        let part = Part { worker_id: "w".into(), session: 1, model: "m".into(), plan_epoch: 1, replica: 0 };
        let begin = Instant::now();
        let mut unloads = Unloads::default();
        assert!(unloads.start(&part, begin));
        assert!(!unloads.start(&part, begin + 2 * RETRY), "it is under way");
        assert_eq!(unloads.running().count(), 1);
        unloads.end(&part, false, begin);
        assert!(!unloads.is_freed(&part));
        assert_eq!(unloads.running().count(), 0);
        assert!(!unloads.start(&part, begin + RETRY / 2), "a late heartbeat may show it");
        assert!(unloads.start(&part, begin + RETRY));
        unloads.end(&part, true, begin + RETRY);
        assert!(unloads.is_freed(&part));
        unloads.forget("w", 2);
        assert!(unloads.is_freed(&part));
        unloads.forget("w", 1);
        assert!(!unloads.is_freed(&part));
    }
}
