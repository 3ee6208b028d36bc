//! Whether a replica's part works, and the one way to say that it does not.
//! Invariant: the first reason stays; whoever gives it, every link of the part is shut down and the engine is woken.

use std::sync::Arc;

use tokio::sync::watch;

use crate::collective::AbortHandle;

/// Cloneable; all clones are one.
#[derive(Clone)]
pub(super) struct Health {
    abort: AbortHandle,
    problem: Arc<watch::Sender<Option<String>>>,
}

impl Health {
    /// A working part; `wake` is called when it breaks.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Self {
        let problem = Arc::new(watch::Sender::new(None));
        let on_abort = {
            let problem = problem.clone();
            move |reason: &str, is_wanted: bool| {
                if is_wanted {
                    tracing::info!(reason, "replica ended");
                } else {
                    tracing::warn!(reason, "replica ended");
                }
                problem.send_replace(Some(reason.to_owned()));
                wake();
            }
        };
        Self { abort: AbortHandle::with_callback(on_abort), problem }
    }

    /// Breaks the part.
    pub fn fail(&self, reason: &str) {
        self.abort.abort(reason);
    }

    /// Ends the part because that is wanted here; its peers are told so.
    pub fn end(&self, reason: &str) {
        self.abort.end(reason);
    }

    /// Whether it broke.
    pub fn is_broken(&self) -> bool {
        self.problem.borrow().is_some()
    }

    /// Why it broke.
    pub fn reason(&self) -> String {
        self.problem.borrow().clone().unwrap_or_else(|| "a thread ended".to_owned())
    }

    /// The rank that could not be reached, if that is why it broke.
    pub fn unreachable(&self) -> Option<usize> {
        self.abort.unreachable()
    }

    /// Follows it.
    pub fn problem(&self) -> watch::Receiver<Option<String>> {
        self.problem.subscribe()
    }

    /// What links register with.
    pub fn abort_handle(&self) -> AbortHandle {
        self.abort.clone()
    }

    /// Breaks the part if the thread that holds the guard panics.
    pub fn guard(&self, thread: String) -> PanicGuard {
        PanicGuard { health: self.clone(), thread }
    }
}

/// See [`Health::guard`].
pub(super) struct PanicGuard {
    health: Health,
    thread: String,
}

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.health.fail(&format!("{} panicked", self.thread));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn a_panic_breaks_the_part_and_the_first_reason_stays() {
        let wakes = Arc::new(AtomicU64::new(0));
        let health = Health::new({
            let wakes = wakes.clone();
            move || {
                wakes.fetch_add(1, Ordering::Relaxed);
            }
        });
        let guard = health.guard("the thread of rank 3".to_owned());
        let panicking = std::thread::spawn(move || {
            let _guard = guard;
            panic!("on purpose");
        });
        assert!(panicking.join().is_err());
        health.fail("too late");
        assert!(health.is_broken());
        assert_eq!(health.reason(), "the thread of rank 3 panicked");
        assert_eq!(wakes.load(Ordering::Relaxed), 1);
    }
}
