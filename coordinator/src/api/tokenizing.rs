//! Prompts become tokens: short ones at once, long ones on threads of their own.
//! Invariant: a thread that works keeps its place until it is done, whether or not its client waits; so clients that
//! send much and leave start no more work than there are places.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::validate::PromptText;
use crate::{error::RequestError, served::ModelDescription};

/// Prompts up to so many bytes are tokenized in place, which is faster than a hop to another thread.
const INLINE_PROMPT_BYTES: usize = 4096;

/// Places for long prompts; cheap to clone.
#[derive(Clone)]
pub struct Tokenizing(Arc<Semaphore>);

impl Default for Tokenizing {
    /// A place for each processor.
    fn default() -> Self {
        Self::new(std::thread::available_parallelism().map_or(1, usize::from))
    }
}

impl Tokenizing {
    /// So many places.
    pub fn new(num_places: usize) -> Self {
        Self(Arc::new(Semaphore::new(num_places.max(1))))
    }

    /// Tokenizes a text and does `finish` with it.
    ///
    /// # Errors
    /// [`RequestError::Invalid`] as [`PromptText::encode`].
    pub async fn encode<T: Send + 'static>(
        &self,
        text: PromptText,
        model: &Arc<ModelDescription>,
        finish: impl FnOnce(Vec<u32>, &ModelDescription) -> T + Send + 'static,
    ) -> Result<T, RequestError> {
        let is_short = text.num_bytes() <= INLINE_PROMPT_BYTES;
        let model = Arc::clone(model);
        let work = move || text.encode(&model).map(|token_ids| finish(token_ids, &model));
        if is_short { work() } else { self.on_a_thread(work).await? }
    }

    async fn on_a_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, RequestError> {
        let place = Arc::clone(&self.0).acquire_owned().await.map_err(|_| RequestError::ShuttingDown)?;
        let work = move || {
            let _place = place;
            work()
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|error| RequestError::Internal(format!("tokenizing failed: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            atomic::{AtomicUsize, Ordering},
            mpsc,
        },
        time::Duration,
    };

    use super::*;

    #[tokio::test]
    async fn whoever_leaves_frees_no_place_before_the_work_is_done() {
        let tokenizing = Tokenizing::new(1);
        let num_started = Arc::new(AtomicUsize::new(0));
        let (release, released) = mpsc::channel::<()>();
        let work = |released: Option<mpsc::Receiver<()>>| {
            let num_started = Arc::clone(&num_started);
            move || {
                num_started.fetch_add(1, Ordering::SeqCst);
                // The other end says when.
                let _ = released.map(|released| released.recv());
            }
        };
        let left = tokenizing.on_a_thread(work(Some(released)));
        assert!(tokio::time::timeout(Duration::from_millis(50), left).await.is_err());
        let next = tokenizing.on_a_thread(work(None));
        assert!(tokio::time::timeout(Duration::from_millis(50), next).await.is_err());
        assert_eq!(num_started.load(Ordering::SeqCst), 1);
        release.send(()).unwrap();
        tokenizing.on_a_thread(work(None)).await.unwrap();
        assert_eq!(num_started.load(Ordering::SeqCst), 2);
    }
}
