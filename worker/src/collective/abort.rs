//! Breaks every link of a replica's part at once, from any thread.
//! Invariant: after `abort`, every pending and later call on a registered link fails with the first reason given.

use std::{
    net::{Shutdown, TcpStream},
    sync::{Arc, Mutex, PoisonError, Weak},
};

type Callback = Box<dyn Fn(&str) + Send + Sync>;

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
    streams: Vec<Weak<TcpStream>>,
}

impl AbortHandle {
    /// A handle that calls `on_abort` once, with the reason, on the thread that aborts.
    pub fn with_callback(on_abort: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(Inner { state: Mutex::default(), on_abort: Some(Box::new(on_abort)) }))
    }

    /// Shuts every link down. The first reason stays.
    pub fn abort(&self, reason: &str) {
        let streams = {
            let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
            if state.reason.is_some() {
                return;
            }
            state.reason = Some(reason.to_owned());
            std::mem::take(&mut state.streams)
        };
        for stream in streams.iter().filter_map(Weak::upgrade) {
            // A socket that is closed already is what we want.
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(on_abort) = &self.0.on_abort {
            on_abort(reason);
        }
    }

    /// Why it was aborted.
    pub fn reason(&self) -> Option<String> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).reason.clone()
    }

    /// Makes `abort` shut `stream` down; if aborted already, does so now.
    pub(super) fn register(&self, stream: &Arc<TcpStream>) {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.reason.is_some() {
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
        state.streams.retain(|known| known.strong_count() > 0);
        state.streams.push(Arc::downgrade(stream));
    }
}

impl std::fmt::Debug for AbortHandle {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("AbortHandle").field("reason", &self.reason()).finish()
    }
}
