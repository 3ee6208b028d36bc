//! Says what goes on and on once, and then again only now and then.
//! For: loops that try for ever, whose every attempt fails for the same reason.

use std::time::{Duration, Instant};

/// Between two words of the same problem.
const PERIOD: Duration = Duration::from_secs(60);

/// What was last said, and when.
#[derive(Debug, Default)]
pub struct Rarely(Option<(String, Instant)>);

impl Rarely {
    /// Whether `problem` is to be said now: it is another one than the last, or that was said long ago.
    pub fn is_due(&mut self, problem: &str) -> bool {
        let is_due = self.0.as_ref().is_none_or(|(last, at)| last != problem || at.elapsed() >= PERIOD);
        if is_due {
            self.0 = Some((problem.to_owned(), Instant::now()));
        }
        is_due
    }

    /// It is over: the next one is said at once.
    pub fn clear(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_said_once_until_it_is_over() {
        let mut rarely = Rarely::default();
        let said = ["a", "a", "b", "b"].map(|problem| rarely.is_due(problem));
        assert_eq!(said, [true, false, true, false]);
        rarely.clear();
        assert!(rarely.is_due("b"));
        rarely.0 = Some(("b".to_owned(), Instant::now() - PERIOD));
        assert!(rarely.is_due("b"), "it goes on for long");
    }
}
