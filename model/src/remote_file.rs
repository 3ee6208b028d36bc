//! A checkpoint's file that stays where it is: an object of a cloud or a file of an HTTP server, read by position.
//! For: [`PositionedFile`](crate::positioned_file::PositionedFile). Blocking, on any thread: a small runtime of its own
//! does the asking.
//! Invariants: what is read is of one version of the object; a break is gone on from where it happened, and a server that
//! breaks for ever is an error; each reading thread holds [`PIECE_BYTES`] at most.
//! Not here: copies on disk ([`crate::source::fetch`]).

use std::{
    fmt,
    future::Future,
    io,
    ops::Range,
    sync::{OnceLock, mpsc},
    time::Duration,
};

use object_store::{GetRange, ObjectMeta};
use reqwest::Url;
use tokio::runtime::Runtime;

use crate::{
    positioned_file::ReadAt,
    source::{
        FetchError, FetchOptions,
        object::{RemoteObject, is_passing},
    },
};

/// Most bytes of one request.
const PIECE_BYTES: usize = 16 << 20;

/// An object that is being read.
pub(crate) struct RemoteFile {
    object: RemoteObject,
    meta: ObjectMeta,
    options: FetchOptions,
}

impl fmt::Debug for RemoteFile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RemoteFile").field("object", &self.object).finish_non_exhaustive()
    }
}

impl RemoteFile {
    /// Asks for the object's size; `None` if the text is no address of one.
    ///
    /// # Errors
    /// If it cannot be reached.
    pub(crate) fn open(text: &str) -> Option<io::Result<Self>> {
        let url = Url::parse(text).ok()?;
        let is_remote = matches!(url.scheme(), "http" | "https") || RemoteObject::is_cloud(url.scheme());
        // A load that waits for a store holds a plan up: it fails after some seconds, and is tried again from outside.
        let options = FetchOptions { max_retries: 4, backoff: Duration::from_millis(250), ..FetchOptions::default() };
        (is_remote && text.contains("://")).then(|| Self::open_url(&url, options))
    }

    fn open_url(url: &Url, options: FetchOptions) -> io::Result<Self> {
        let object = RemoteObject::new(url, &options).map_err(io::Error::other)?;
        let (asked, patience) = (object.clone(), options.clone());
        let meta = wait(async move {
            let mut attempts = 0;
            loop {
                match asked.head().await {
                    Ok(meta) => return Ok(meta),
                    Err(error) => pause(error, &mut attempts, &patience).await?,
                }
            }
        })?;
        Ok(Self { object, meta, options })
    }

    fn fetch(&self, range: Range<u64>) -> io::Result<Vec<u8>> {
        let (object, meta, options) = (self.object.clone(), self.meta.clone(), self.options.clone());
        wait(async move { fetch(&object, &meta, range, &options).await })
    }
}

impl ReadAt for RemoteFile {
    fn num_bytes(&self) -> u64 {
        self.meta.size
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if offset.saturating_add(buffer.len() as u64) > self.meta.size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut start = offset;
        for piece in buffer.chunks_mut(PIECE_BYTES) {
            let end = start + piece.len() as u64;
            piece.copy_from_slice(&self.fetch(start..end)?);
            start = end;
        }
        Ok(())
    }
}

/// All bytes of a range, over as many requests as it takes.
async fn fetch(
    object: &RemoteObject,
    meta: &ObjectMeta,
    range: Range<u64>,
    options: &FetchOptions,
) -> Result<Vec<u8>, FetchError> {
    let length = (range.end - range.start) as usize;
    let mut bytes = Vec::with_capacity(length);
    let (mut furthest, mut attempts) = (0, 0);
    while bytes.len() < length {
        let rest = range.start + bytes.len() as u64..range.end;
        let outcome = async {
            let mut chunks = object.get(GetRange::Bounded(rest), meta).await?;
            while let Some(chunk) = object.next(&mut chunks).await? {
                // A server that sends more than it was asked for is not believed.
                bytes.extend_from_slice(&chunk[..chunk.len().min(length - bytes.len())]);
            }
            Ok(())
        };
        let outcome: Result<(), FetchError> = outcome.await;
        if bytes.len() > furthest {
            (furthest, attempts) = (bytes.len(), 0);
        }
        if bytes.len() < length {
            let error = outcome.err().unwrap_or_else(|| object.short(length, bytes.len()));
            pause(error, &mut attempts, options).await?;
        }
    }
    Ok(bytes)
}

/// Waits before the next attempt; gives the error back where there is none.
async fn pause(error: FetchError, attempts: &mut u32, options: &FetchOptions) -> Result<(), FetchError> {
    // What was read before is of a version that is gone.
    if !is_passing(&error) || matches!(error, FetchError::Changed { .. }) {
        return Err(error);
    }
    *attempts += 1;
    if *attempts > options.max_retries {
        return Err(FetchError::GaveUp { attempts: *attempts, last: Box::new(error) });
    }
    tracing::warn!(%error, attempts, "cannot read, trying again");
    tokio::time::sleep(options.backoff_after(*attempts)).await;
    Ok(())
}

/// Blocks until a future is done that runs elsewhere, so that this may be a thread of another runtime.
fn wait<T: Send + 'static>(future: impl Future<Output = Result<T, FetchError>> + Send + 'static) -> io::Result<T> {
    static RUNTIME: OnceLock<io::Result<Runtime>> = OnceLock::new();
    let build =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(2).thread_name("model-read").enable_all().build();
    let runtime =
        RUNTIME.get_or_init(build).as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
    let (done, outcome) = mpsc::sync_channel(1);
    runtime.spawn(async move {
        // Whoever waits may be gone with its thread.
        let _ = done.send(future.await);
    });
    let outcome = outcome.recv().map_err(|_| io::Error::other("reading was cut off"))?;
    outcome.map_err(io::Error::other)
}
