//! Workers that could not reach each other: plans keep them apart for a while, if they can.
//! For: a cut between the ranks of a replica, which nobody else notices, is not to break the next plan as well.
//! Plain state; time is passed in. Invariant: a pair that fails again is kept apart for twice as long, up to a limit, so that a lasting
//! cut is tried ever more seldom.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use crate::served::Member;

/// A pair is kept apart for so long the first time, and at most for so long.
const APART: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));

/// A registration of a worker.
type Registration = (String, u64);

struct Distance {
    since: Instant,
    until: Instant,
}

/// The pairs, by the registrations of the workers.
#[derive(Default)]
pub struct Estranged(BTreeMap<(Registration, Registration), Distance>);

impl Estranged {
    /// Notes that two workers could not reach each other.
    pub fn note(&mut self, one: &Member, other: &Member, now: Instant) {
        let key = |member: &Member| (member.worker_id.clone(), member.session);
        let (one, other) = (key(one), key(other));
        if one.0 == other.0 {
            return;
        }
        let pair = if one < other { (one, other) } else { (other, one) };
        let before = self.0.get(&pair);
        // Both of them tell of it.
        if before.is_some_and(|before| now < before.until) {
            return;
        }
        let apart = before.map_or(APART.0, |before| ((before.until - before.since) * 2).min(APART.1));
        tracing::warn!(
            one = pair.0.0,
            other = pair.1.0,
            ?apart,
            "two workers cannot reach each other: plans keep them apart"
        );
        self.0.insert(pair, Distance { since: now, until: now + apart });
    }

    /// Forgets pairs of which a registration has ended.
    pub fn retain(&mut self, is_there: impl Fn(&str, u64) -> bool) {
        self.0.retain(|(one, other), _| is_there(&one.0, one.1) && is_there(&other.0, other.1));
    }

    /// Whether any pair is kept apart now.
    pub fn is_active(&self, now: Instant) -> bool {
        self.0.values().any(|distance| now < distance.until)
    }

    /// Sets of workers without which no such pair is left, the best first; none if there is no pair.
    pub fn avoidable(&self, now: Instant) -> Vec<BTreeSet<String>> {
        let active: Vec<[&str; 2]> = self
            .0
            .iter()
            .filter(|(_, distance)| now < distance.until)
            .map(|((one, other), _)| [one.0.as_str(), other.0.as_str()])
            .collect();
        if active.is_empty() {
            return Vec::new();
        }
        // Whoever is in the most pairs goes; where that is equal, the one or the other.
        let cover = |prefers_first: bool| {
            let (mut left, mut cover) = (active.clone(), BTreeSet::new());
            while let Some(pair) = left.first() {
                let count = |id: &str| left.iter().flatten().filter(|other| **other == id).count();
                let [first, second] = *pair;
                let goes = match count(first).cmp(&count(second)) {
                    std::cmp::Ordering::Less => second,
                    std::cmp::Ordering::Greater => first,
                    std::cmp::Ordering::Equal if prefers_first => first,
                    std::cmp::Ordering::Equal => second,
                };
                left.retain(|pair| !pair.contains(&goes));
                cover.insert(goes.to_owned());
            }
            cover
        };
        vec![cover(false), cover(true)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(worker_id: &str) -> Member {
        Member { worker_id: worker_id.into(), session: 1 }
    }

    #[test]
    fn who_cannot_reach_others_is_avoided_for_a_while() {
        let begin = Instant::now();
        let mut estranged = Estranged::default();
        assert!(estranged.avoidable(begin).is_empty());
        estranged.note(&member("b"), &member("a"), begin);
        estranged.note(&member("a"), &member("b"), begin);
        estranged.note(&member("a"), &member("a"), begin);
        let sets = |estranged: &Estranged, at| {
            let sets = estranged.avoidable(at).into_iter();
            sets.map(|set| set.into_iter().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
        };
        assert_eq!(sets(&estranged, begin), ["b", "a"]);
        let later = begin + APART.0;
        assert!(!estranged.is_active(later));
        // Again: twice as long.
        estranged.note(&member("a"), &member("b"), later);
        assert!(estranged.is_active(later + APART.0 * 2 - Duration::from_secs(1)));
        assert!(!estranged.is_active(later + APART.0 * 2));
        estranged.note(&member("c"), &member("a"), later);
        assert_eq!(sets(&estranged, later), ["a", "a"], "one worker explains both");
        estranged.retain(|worker_id, session| (worker_id, session) != ("a", 1));
        assert!(!estranged.is_active(later));
    }
}
