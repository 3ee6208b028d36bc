//! Messages for a client that takes each of them in time.
//! For: gRPC and the OpenAI API. A request holds KV blocks and its tenant's tokens as long as it is not read to its end, so
//! a client that stops reading, but stays, must not hold them for ever.
//! Invariants: one message is made ahead of the client, no more; when the client leaves, or lets a message lie for longer
//! than the patience, the source is dropped at once, and the client that still reads then learns why; a source that panics
//! ends with an error, never as if it were whole.

use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use tokio::sync::mpsc;

use crate::error::RequestError;

/// Why no more messages come.
enum End {
    /// The source ended, or the client left.
    Done,
    /// The client let a message lie.
    GivenUp,
}

/// Hands on what `source` yields.
pub fn deliver<T: Send + 'static>(
    source: impl Stream<Item = Result<T, RequestError>> + Send + 'static,
    patience: Duration,
) -> impl Stream<Item = Result<T, RequestError>> + Send {
    let (sender, receiver) = mpsc::channel(1);
    let pump = tokio::spawn(pump(source, sender, patience));
    stream::unfold(Some((receiver, pump)), move |state| async move {
        let (mut receiver, pump) = state?;
        if let Some(message) = receiver.recv().await {
            return Some((message, Some((receiver, pump))));
        }
        let error = match pump.await {
            Ok(End::Done) => return None,
            Ok(End::GivenUp) => RequestError::SlowReader { patience },
            // The panic hook has said more.
            Err(_) => RequestError::Internal("the request's task panicked".into()),
        };
        Some((Err(error), None))
    })
}

async fn pump<T>(source: impl Stream<Item = T>, sender: mpsc::Sender<T>, patience: Duration) -> End {
    let mut source = std::pin::pin!(source);
    loop {
        let message = tokio::select! {
            () = sender.closed() => return End::Done,
            message = source.next() => message,
        };
        let Some(message) = message else { return End::Done };
        match tokio::time::timeout(patience, sender.send(message)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return End::Done,
            Err(_) => return End::GivenUp,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn numbers(count: usize) -> (impl Stream<Item = Result<usize, RequestError>> + Send, Arc<()>) {
        let held = Arc::new(());
        let source = stream::unfold((0, Arc::clone(&held)), move |(index, held)| async move {
            (index < count).then_some((Ok(index), (index + 1, held)))
        });
        (source, held)
    }

    async fn until_dropped(held: &Arc<()>) {
        for _ in 0..500 {
            if Arc::strong_count(held) == 1 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the source is still held");
    }

    #[tokio::test]
    async fn a_reader_in_time_gets_everything() {
        let (source, held) = numbers(100);
        let read: Vec<_> = deliver(source, Duration::from_secs(60)).map(Result::unwrap).collect().await;
        assert_eq!(read, (0..100).collect::<Vec<_>>());
        until_dropped(&held).await;
    }

    #[tokio::test]
    async fn whoever_stops_reading_is_given_up_and_told() {
        let (source, held) = numbers(100);
        let mut messages = Box::pin(deliver(source, Duration::from_millis(50)));
        assert_eq!(messages.next().await.unwrap().unwrap(), 0);
        until_dropped(&held).await;
        assert_eq!(messages.next().await.unwrap().unwrap(), 1);
        assert!(matches!(messages.next().await, Some(Err(RequestError::SlowReader { .. }))));
        assert!(messages.next().await.is_none());
    }

    #[tokio::test]
    async fn whoever_leaves_frees_the_source_at_once() {
        let held = Arc::new(());
        let source = stream::unfold(Arc::clone(&held), |held| async move {
            std::future::pending::<()>().await;
            Some((Ok(0), held))
        });
        drop(deliver(source, Duration::from_secs(60)));
        until_dropped(&held).await;
    }

    #[tokio::test]
    async fn a_panic_is_an_error_and_no_end() {
        let source = stream::iter(0..3).map(|index| if index < 2 { Ok(index) } else { panic!("a bug") });
        let read: Vec<_> = deliver(source, Duration::from_secs(60)).collect().await;
        assert_eq!(read.len(), 3);
        assert!(matches!(read[2], Err(RequestError::Internal(_))), "{:?}", read[2]);
    }
}
