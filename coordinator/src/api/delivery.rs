//! Messages for a client that takes each of them in time.
//! For: gRPC and the OpenAI API. A request holds KV blocks and its tenant's tokens as long as it is not read to its end, so
//! a client that stops reading, but stays, must not hold them for ever.
//! Invariants: one message is made ahead of the client, no more; when the client leaves, or lets a message lie for longer
//! than the patience, the source is dropped at once, and the client that still reads then learns why.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use tokio::sync::mpsc;

use crate::error::RequestError;

/// Hands on what `source` yields.
pub fn deliver<T: Send + 'static>(
    source: impl Stream<Item = Result<T, RequestError>> + Send + 'static,
    patience: Duration,
) -> impl Stream<Item = Result<T, RequestError>> + Send {
    let (sender, receiver) = mpsc::channel(1);
    let is_given_up = Arc::new(AtomicBool::new(false));
    tokio::spawn(pump(source, sender, patience, Arc::clone(&is_given_up)));
    stream::unfold((receiver, is_given_up), move |(mut receiver, is_given_up)| async move {
        let message = match receiver.recv().await {
            Some(message) => message,
            None if is_given_up.swap(false, Ordering::AcqRel) => Err(RequestError::SlowReader { patience }),
            None => return None,
        };
        Some((message, (receiver, is_given_up)))
    })
}

async fn pump<T>(
    source: impl Stream<Item = T>,
    sender: mpsc::Sender<T>,
    patience: Duration,
    is_given_up: Arc<AtomicBool>,
) {
    let mut source = std::pin::pin!(source);
    loop {
        let message = tokio::select! {
            () = sender.closed() => return,
            message = source.next() => message,
        };
        let Some(message) = message else { return };
        match tokio::time::timeout(patience, sender.send(message)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return,
            Err(_) => {
                is_given_up.store(true, Ordering::Release);
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
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
}
