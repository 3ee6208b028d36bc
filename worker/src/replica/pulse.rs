//! Whether the steps of a replica come back: the one measure of its health that no thread or device can fake.
//! For: the engine's thread notes steps; heartbeats, probes and the end of a load ask.
//! Invariants: while nothing runs a canary goes through every rank each [`CANARY_INTERVAL`]; what takes longer than it may
//! is a stall within [`PATIENCE`], also if the engine's thread itself hangs, since it has to move the limit on.
//! Not here: what a canary computes ([`lockstep_executor::step::StepPlan::is_canary`]).

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use lockstep_executor::step::StepPlan;

/// Idle time after which the ranks are tried.
const CANARY_INTERVAL: Duration = Duration::from_secs(1);
/// How much later than it should a step may come back. With the interval and a heartbeat it stays below five seconds.
const PATIENCE: Duration = Duration::from_millis(2500);
/// A replica whose steps have not come back for so long after that is given up.
pub(super) const GIVE_UP: Duration = Duration::from_secs(10);
/// A step may take so many times what its tokens would take in the slowest of the last steps.
const SLOWDOWN: f64 = 4.0;
/// What remains, after each step, of the pace of a slow one.
const FADING: f64 = 0.98;

/// When the next sign of life is due, and when the last one came.
#[derive(Clone, Copy, Debug)]
struct Signs {
    due: Instant,
    last_step: Option<Instant>,
}

/// What others may ask; cheap to clone.
#[derive(Clone)]
pub(super) struct Pulse(Arc<Mutex<Signs>>);

impl Pulse {
    /// How long a sign of life is overdue; `None` if none is.
    pub fn overdue(&self, now: Instant) -> Option<Duration> {
        let due = self.signs().due;
        (now > due).then(|| now - due)
    }

    /// Since the last step that came back; `None` before the first.
    pub fn age(&self, now: Instant) -> Option<Duration> {
        self.signs().last_step.map(|at| now.saturating_duration_since(at))
    }

    fn signs(&self) -> MutexGuard<'_, Signs> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct InFlight {
    sent: Instant,
    num_tokens: usize,
    is_canary: bool,
}

/// The engine's thread's side of it.
pub(super) struct Heart {
    pulse: Pulse,
    in_flight: VecDeque<InFlight>,
    /// A canary's time, so many times over, is that of a whole step of one token.
    canary_parts: f64,
    /// Seconds a token in the slowest of the last steps.
    pace: Option<f64>,
    last_step: Option<Instant>,
}

impl Heart {
    /// A replica that nothing came back from yet. Its steps pass `num_layers` layers, canaries one in each of `num_stages`.
    pub fn new(num_layers: usize, num_stages: usize, now: Instant) -> Self {
        let signs = Signs { due: now + CANARY_INTERVAL + PATIENCE, last_step: None };
        Self {
            pulse: Pulse(Arc::new(Mutex::new(signs))),
            in_flight: VecDeque::new(),
            canary_parts: num_layers as f64 / num_stages.max(1) as f64,
            pace: None,
            last_step: None,
        }
    }

    /// For those who ask.
    pub fn pulse(&self) -> Pulse {
        self.pulse.clone()
    }

    /// Until a canary is due: none if one is.
    pub fn until_canary(&self, now: Instant) -> Duration {
        self.last_step.map_or(Duration::ZERO, |at| (at + CANARY_INTERVAL).saturating_duration_since(now))
    }

    /// Notes that a step was given to the ranks.
    pub fn sent(&mut self, plan: &StepPlan, now: Instant) {
        self.in_flight.push_back(InFlight { sent: now, num_tokens: plan.num_tokens(), is_canary: plan.is_canary() });
        self.beat(now);
    }

    /// Notes that the oldest step came back; says whether it was a canary.
    pub fn returned(&mut self, now: Instant) -> bool {
        let Some(step) = self.in_flight.pop_front() else { return false };
        let begin = self.last_step.map_or(step.sent, |last| last.max(step.sent));
        let seconds = now.saturating_duration_since(begin).as_secs_f64();
        match (step.is_canary, self.pace) {
            (false, pace) => {
                let pace = pace.unwrap_or_default() * FADING;
                self.pace = Some(pace.max(seconds / step.num_tokens.max(1) as f64));
            }
            (true, None) => self.pace = Some(seconds * self.canary_parts),
            (true, Some(_)) => {}
        }
        self.last_step = Some(now);
        self.beat(now);
        step.is_canary
    }

    /// Notes that the engine's thread is alive, and until when it, or the oldest step, must be heard of again.
    pub fn beat(&mut self, now: Instant) {
        let due = match self.in_flight.front() {
            None => now + CANARY_INTERVAL,
            Some(step) => {
                let begin = self.last_step.map_or(step.sent, |last| last.max(step.sent));
                let expected = SLOWDOWN * self.pace.unwrap_or_default() * step.num_tokens as f64;
                begin + Duration::try_from_secs_f64(expected).unwrap_or_default()
            }
        };
        *self.pulse.signs() = Signs { due: due + PATIENCE, last_step: self.last_step };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_executor::step::StepSequence;

    fn plan(num_tokens: usize, is_canary: bool) -> StepPlan {
        if is_canary {
            return StepPlan::canary(0, 0);
        }
        let sequence = StepSequence {
            sequence_id: 0,
            first_position: 0,
            token_ids: vec![0; num_tokens],
            block_table: vec![0],
            sample: None,
        };
        StepPlan { step_id: 0, sequences: vec![sequence], trace: None }
    }

    #[test]
    fn a_canary_that_does_not_come_back_is_a_stall_within_five_seconds() {
        let begin = Instant::now();
        let second = Duration::from_secs(1);
        let mut heart = Heart::new(30, 1, begin);
        let pulse = heart.pulse();
        assert_eq!((heart.until_canary(begin), pulse.age(begin)), (Duration::ZERO, None));
        heart.sent(&plan(1, true), begin);
        assert!(heart.returned(begin));
        let later = begin + second;
        assert_eq!((heart.until_canary(later), pulse.age(later)), (Duration::ZERO, Some(second)));
        heart.beat(later);
        heart.sent(&plan(1, true), later);
        assert_eq!(pulse.overdue(later + 2 * second), None);
        assert!(pulse.overdue(later + 3 * second).is_some(), "four seconds after the last step");
        // It comes back after all.
        assert!(heart.returned(later + 4 * second));
        assert_eq!(pulse.overdue(later + 4 * second), None);
        // A thread that hangs moves nothing on.
        assert!(pulse.overdue(later + 8 * second).is_some());
    }

    #[test]
    fn long_steps_may_take_long() {
        let begin = Instant::now();
        let second = Duration::from_secs(1);
        let mut heart = Heart::new(32, 2, begin);
        let pulse = heart.pulse();
        heart.sent(&plan(1, true), begin);
        // 0.16 s a token.
        heart.returned(begin + second / 100);
        let begin = begin + second;
        heart.sent(&plan(500, false), begin);
        assert_eq!(pulse.overdue(begin + 300 * second), None);
        assert!(!heart.returned(begin + second));
        let mut now = begin + second;
        for _ in 0..300 {
            heart.sent(&plan(10, false), now);
            now += second / 10;
            heart.returned(now);
        }
        heart.sent(&plan(10, false), now);
        assert_eq!(pulse.overdue(now + 2 * second), None);
        assert!(pulse.overdue(now + 3 * second).is_some());
    }
}
