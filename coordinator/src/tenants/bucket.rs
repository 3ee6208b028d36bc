//! Tokens by the minute: a bucket that holds a minute's worth and fills evenly.
//! Invariant: over any time not more is used than what flowed in and a full bucket, but for requests that take longer than
//! a minute's worth; these leave a debt, which is paid before the next one.

use std::time::Duration;

use tokio::time::Instant;

/// What is there now.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    per_minute: u64,
    /// Below zero in debt.
    level: f64,
    at: Instant,
}

impl Bucket {
    /// A full one.
    pub fn new(per_minute: u64, now: Instant) -> Self {
        Self { per_minute, level: per_minute as f64, at: now }
    }

    /// Takes the tokens of a request; of one that is too large for the bucket all that it holds when full.
    ///
    /// # Errors
    /// When there will be enough, if not more is taken meanwhile.
    pub fn take(&mut self, num_tokens: u64, now: Instant) -> Result<u64, Duration> {
        self.fill(now);
        let num_tokens = num_tokens.min(self.per_minute);
        let missing = num_tokens as f64 - self.level;
        if missing > 0.0 {
            let millis = missing / self.per_minute as f64 * 60_000.0;
            return Err(Duration::from_millis(millis.ceil() as u64));
        }
        self.level -= num_tokens as f64;
        Ok(num_tokens)
    }

    /// Puts right what was taken for a request when it is known what it used.
    pub fn settle(&mut self, num_taken: u64, num_used: u64, now: Instant) {
        self.fill(now);
        self.level = (self.level + num_taken as f64 - num_used as f64).min(self.per_minute as f64);
    }

    /// Takes what other coordinators took, whether it is there or not, but not more at once than a minute's worth: of a time
    /// in which they could not be heard no longer debt is left.
    pub fn take_elsewhere(&mut self, num_tokens: i64, now: Instant) {
        self.fill(now);
        let most = self.per_minute as f64;
        self.level = (self.level - (num_tokens as f64).clamp(-most, most)).min(most);
    }

    /// Changes the rate; what was used stays used.
    pub fn set_rate(&mut self, per_minute: u64, now: Instant) {
        self.fill(now);
        self.level += per_minute as f64 - self.per_minute as f64;
        self.per_minute = per_minute;
    }

    fn fill(&mut self, now: Instant) {
        let minutes = now.saturating_duration_since(self.at).as_secs_f64() / 60.0;
        self.level = (self.level + minutes * self.per_minute as f64).min(self.per_minute as f64);
        self.at = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_is_the_time_until_there_are_tokens() {
        let now = Instant::now();
        let mut bucket = Bucket::new(600, now);
        assert_eq!(bucket.take(500, now), Ok(500));
        let wait = bucket.take(200, now).unwrap_err();
        assert_eq!(wait, Duration::from_secs(10));
        assert!(bucket.take(200, now + wait - Duration::from_millis(1)).is_err());
        assert_eq!(bucket.take(200, now + wait), Ok(200));
    }

    #[test]
    fn what_was_not_used_comes_back_and_what_was_too_much_is_paid() {
        let now = Instant::now();
        let mut bucket = Bucket::new(600, now);
        let taken = bucket.take(600, now).unwrap();
        bucket.settle(taken, 100, now);
        assert_eq!(bucket.take(500, now), Ok(500));
        let later = now + Duration::from_secs(3600);
        // More than a full bucket: all of it is taken, and the rest is a debt.
        let taken = bucket.take(1500, later).unwrap();
        bucket.settle(taken, 1500, later);
        assert_eq!(bucket.take(1, later), Err(Duration::from_millis(90_100)));
    }

    #[test]
    fn what_others_take_is_gone_and_may_be_owed() {
        let now = Instant::now();
        let mut bucket = Bucket::new(600, now);
        bucket.take_elsewhere(400, now);
        assert_eq!(bucket.take(200, now), Ok(200));
        bucket.take_elsewhere(60, now);
        assert_eq!(bucket.take(60, now), Err(Duration::from_secs(12)));
        bucket.take_elsewhere(-90, now);
        assert_eq!(bucket.take(30, now), Ok(30));
        bucket.take_elsewhere(1_000_000, now);
        assert_eq!(bucket.take(1, now), Err(Duration::from_millis(60_100)));
    }

    #[test]
    fn a_new_rate_forgets_no_use() {
        let now = Instant::now();
        let mut bucket = Bucket::new(600, now);
        bucket.take(500, now).unwrap();
        bucket.set_rate(6000, now);
        assert_eq!(bucket.take(5500, now), Ok(5500));
        bucket.set_rate(60, now);
        assert!(bucket.take(1, now).is_err());
    }
}
