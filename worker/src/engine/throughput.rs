//! Tokens per second over a sliding window.
//! For: the engine's status. Invariant: memory is bounded by the number of buckets, however many steps are recorded.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Length of the window.
const WINDOW: Duration = Duration::from_secs(5);
/// Steps that end within one bucket are counted together.
const BUCKET: Duration = Duration::from_millis(100);
/// Shortest time that a rate is taken over, so that the first steps do not show as a peak.
const SHORTEST: Duration = Duration::from_millis(500);

#[derive(Debug)]
struct Bucket {
    start: Instant,
    prefill_tokens: usize,
    decode_tokens: usize,
}

/// Counts of the last seconds.
#[derive(Debug, Default)]
pub(super) struct Throughput {
    buckets: VecDeque<Bucket>,
}

impl Throughput {
    /// Adds the tokens of a step that was given out at `started` and ended at `now`.
    pub(super) fn record(&mut self, started: Instant, now: Instant, prefill_tokens: usize, decode_tokens: usize) {
        while self.buckets.front().is_some_and(|bucket| now.saturating_duration_since(bucket.start) > WINDOW) {
            self.buckets.pop_front();
        }
        match self.buckets.back_mut() {
            Some(bucket) if now.saturating_duration_since(bucket.start) < BUCKET => {
                bucket.prefill_tokens += prefill_tokens;
                bucket.decode_tokens += decode_tokens;
            }
            Some(_) => self.buckets.push_back(Bucket { start: now, prefill_tokens, decode_tokens }),
            None => self.buckets.push_back(Bucket { start: started, prefill_tokens, decode_tokens }),
        }
    }

    /// Prefill and decode tokens per second.
    pub(super) fn rates(&self, now: Instant) -> (f64, f64) {
        let recent = || self.buckets.iter().filter(|bucket| now.saturating_duration_since(bucket.start) <= WINDOW);
        let Some(first) = recent().next() else {
            return (0.0, 0.0);
        };
        let seconds = now.saturating_duration_since(first.start).max(SHORTEST).as_secs_f64();
        let prefill: usize = recent().map(|bucket| bucket.prefill_tokens).sum();
        let decode: usize = recent().map(|bucket| bucket.decode_tokens).sum();
        (prefill as f64 / seconds, decode as f64 / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_the_window() {
        let start = Instant::now();
        let mut throughput = Throughput::default();
        assert_eq!(throughput.rates(start), (0.0, 0.0));
        let mut now = start;
        for _ in 0..1000 {
            let started = now;
            now += Duration::from_millis(10);
            throughput.record(started, now, 2, 1);
        }
        let (prefill, decode) = throughput.rates(now);
        assert!((decode - 100.0).abs() < 5.0, "{decode}");
        assert!((prefill - 200.0).abs() < 10.0, "{prefill}");
        assert!(throughput.buckets.len() <= 52);
        assert_eq!(throughput.rates(now + Duration::from_secs(6)), (0.0, 0.0));
    }
}
