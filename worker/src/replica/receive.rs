//! Waiting for a message that mostly comes sooner than a sleeping thread wakes.
//! For: the rank threads, which wait for plans, and the engine's thread, which waits for results.

use std::{
    sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError},
    time::{Duration, Instant},
};

/// The next message: looked for again and again for `spin`, then slept for, `timeout` at most.
///
/// # Errors
/// [`RecvTimeoutError`] if none came in time or none can come any more.
pub(super) fn receive<T>(messages: &Receiver<T>, spin: Duration, timeout: Duration) -> Result<T, RecvTimeoutError> {
    let start = Instant::now();
    while start.elapsed() < spin {
        match messages.try_recv() {
            Ok(message) => return Ok(message),
            Err(TryRecvError::Disconnected) => return Err(RecvTimeoutError::Disconnected),
            Err(TryRecvError::Empty) => std::hint::spin_loop(),
        }
    }
    messages.recv_timeout(timeout)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn a_message_comes_whether_it_is_spun_or_slept_for() {
        let (sender, messages) = sync_channel(2);
        for spin in [Duration::ZERO, Duration::from_millis(1)] {
            sender.send(7).unwrap();
            assert_eq!(receive(&messages, spin, Duration::MAX), Ok(7));
            assert_eq!(receive(&messages, spin, Duration::from_millis(1)), Err(RecvTimeoutError::Timeout));
        }
        drop(sender);
        for spin in [Duration::ZERO, Duration::from_secs(9)] {
            assert_eq!(receive(&messages, spin, Duration::MAX), Err(RecvTimeoutError::Disconnected));
        }
    }
}
