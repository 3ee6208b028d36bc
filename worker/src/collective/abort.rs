//! Breaks every link of a replica's part at once, from any thread.
//! Invariant: after `abort`, every pending and later call on a registered link fails with the first reason given.
//! An end that is wanted here is told to the peers first, so that nobody takes it for a failure.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use lockstep_transport::LinkStream;

type Callback = Box<dyn Fn(&str, bool) + Send + Sync>;

/// A link that can tell its peer that the end is wanted.
pub(super) trait Farewell: Send + Sync {
    /// Tells it if that can be done at once.
    fn say_goodbye(&self);
}

/// Cloneable; all clones are one handle.
#[derive(Clone, Default)]
pub struct AbortHandle(Arc<Inner>);

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    on_abort: Option<Callback>,
}

#[derive(Default)]
struct State {
    reason: Option<String>,
    is_wanted: bool,
    unreachable: Option<usize>,
    streams: Vec<Weak<LinkStream>>,
    farewells: Vec<Weak<dyn Farewell>>,
}

impl AbortHandle {
    /// A handle that calls `on_abort(reason, is_wanted)` once, on the thread that aborts.
    pub fn with_callback(on_abort: impl Fn(&str, bool) + Send + Sync + 'static) -> Self {
        Self(Arc::new(Inner { state: Mutex::default(), on_abort: Some(Box::new(on_abort)) }))
    }

    /// Shuts every link down after telling the peers that it is no failure. The first reason stays.
    pub fn end(&self, reason: &str) {
        self.expect_end();
        let farewells = std::mem::take(&mut self.lock().farewells);
        farewells.iter().filter_map(Weak::upgrade).for_each(|link| link.say_goodbye());
        self.abort(reason);
    }

    /// Shuts every link down. The first reason stays.
    pub fn abort(&self, reason: &str) {
        let (streams, is_wanted) = {
            let mut state = self.lock();
            if state.reason.is_some() {
                return;
            }
            state.reason = Some(reason.to_owned());
            (std::mem::take(&mut state.streams), state.is_wanted)
        };
        streams.iter().filter_map(Weak::upgrade).for_each(|stream| stream.shutdown());
        if let Some(on_abort) = &self.0.on_abort {
            on_abort(reason, is_wanted);
        }
    }

    /// Why it was aborted.
    pub fn reason(&self) -> Option<String> {
        self.lock().reason.clone()
    }

    /// Notes that a peer cannot be reached, if nothing else was wrong before.
    pub(super) fn note_unreachable(&self, peer: usize) {
        let mut state = self.lock();
        if state.reason.is_none() {
            state.unreachable.get_or_insert(peer);
        }
    }

    /// The peer that could not be reached, if that was what went wrong first.
    pub fn unreachable(&self) -> Option<usize> {
        self.lock().unreachable
    }

    /// Notes that the end that comes is wanted, here or by a peer that said so.
    pub(super) fn expect_end(&self) {
        self.lock().is_wanted = true;
    }

    /// Makes `end` say goodbye on `link`.
    pub(super) fn register_farewell(&self, link: Weak<dyn Farewell>) {
        self.lock().farewells.push(link);
    }

    /// Makes `abort` shut `stream` down; if aborted already, does so now.
    pub(super) fn register(&self, stream: &Arc<LinkStream>) {
        let mut state = self.lock();
        if state.reason.is_some() {
            stream.shutdown();
            return;
        }
        state.streams.retain(|known| known.strong_count() > 0);
        state.streams.push(Arc::downgrade(stream));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for AbortHandle {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("AbortHandle").field("reason", &self.reason()).finish()
    }
}
