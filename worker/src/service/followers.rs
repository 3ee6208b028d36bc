//! The coordinators that follow this worker's heartbeats, which they do where workers are found in etcd.
//! For: readiness, since a key in etcd says nothing about whether anybody can reach the worker; and the drain, which waits
//! for nobody who is not there.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How many follow, and since when nobody does.
#[derive(Default)]
pub struct Followers(Mutex<State>);

#[derive(Clone, Copy, Default)]
struct State {
    count: usize,
    left_at: Option<Instant>,
}

/// One that follows until this is dropped.
pub struct Follower(Arc<Followers>);

impl Drop for Follower {
    fn drop(&mut self) {
        let mut state = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.count -= 1;
        state.left_at = Some(Instant::now());
    }
}

impl Followers {
    /// One more follows.
    pub fn join(self: &Arc<Self>) -> Follower {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).count += 1;
        Follower(Arc::clone(self))
    }

    /// Whether somebody follows, or did so less than `grace` ago: a connection that breaks is soon made again.
    pub fn are_there(&self, grace: Duration) -> bool {
        let state = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.count > 0 || state.left_at.is_some_and(|at| at.elapsed() < grace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_left_is_waited_for_briefly() {
        let followers = Arc::new(Followers::default());
        assert!(!followers.are_there(Duration::from_secs(60)), "nobody ever came");
        let both = (followers.join(), followers.join());
        drop(both.0);
        assert!(followers.are_there(Duration::ZERO));
        drop(both.1);
        assert!(!followers.are_there(Duration::ZERO) && followers.are_there(Duration::from_secs(60)));
    }
}
