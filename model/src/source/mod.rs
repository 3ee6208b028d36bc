//! Fetching a checkpoint: `hf://org/repo/file[@revision]`, plain http(s) URLs and objects of clouds to a local file.
//!
//! For: `lockstep pull`. [`fetch`] resumes what an earlier run left, retries broken connections, checks the SHA-256 and
//! puts the file in place at once, so that a file under its final name is always whole.
//! Invariants: memory does not depend on the file's size; no wait but that for another process is without a time-out; a token is sent to the
//! endpoint that it belongs to and to no host that this one redirects to.
//! Not here: the environment (its values come in [`FetchOptions`]), the progress bar, what is in the file.

mod checked;
mod error;
mod location;
pub(crate) mod object;
mod partial;
mod transfer;

use std::{
    fs::File,
    path::{Path, PathBuf},
    time::Duration,
};

pub use self::error::FetchError;
use self::{location::Location, partial::Partial, transfer::Transfer};
pub use crate::positioned_file::{is_remote, shown};

/// Between two looks at a lock that another process holds.
const LOCK_POLL: Duration = Duration::from_millis(200);
/// Of the file beside a file whose lock keeps others out, and which says what was fetched.
const LOCK_SUFFIX: &str = ".lock";
/// Longest wait between two attempts.
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// How to fetch.
#[derive(Clone)]
pub struct FetchOptions {
    /// Where `hf://` leads; the value of `HF_ENDPOINT` if that is set.
    pub hf_endpoint: String,
    /// Bearer token for `hf_endpoint`; the value of `HF_TOKEN`.
    pub hf_token: Option<String>,
    /// SHA-256 that the file must have, in hexadecimal. Without it the one that Hugging Face declares is checked.
    pub sha256: Option<String>,
    /// Longest wait for a connection.
    pub connect_timeout: Duration,
    /// Longest wait for the next bytes.
    pub stall_timeout: Duration,
    /// Failures in a row, without a byte won, after which it gives up.
    pub max_retries: u32,
    /// Wait before the first retry; doubles with each, up to 30 s.
    pub backoff: Duration,
    /// Wait, however long, for another process that is fetching the same file, rather than refuse.
    pub waits_for_others: bool,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self {
            hf_endpoint: "https://huggingface.co".to_owned(),
            hf_token: None,
            sha256: None,
            connect_timeout: Duration::from_secs(15),
            stall_timeout: Duration::from_secs(30),
            max_retries: 6,
            backoff: Duration::from_millis(500),
            waits_for_others: false,
        }
    }
}

impl FetchOptions {
    /// The wait after so many failures in a row.
    pub(crate) fn backoff_after(&self, attempts: u32) -> Duration {
        self.backoff.saturating_mul(1 << attempts.saturating_sub(1).min(16)).min(MAX_BACKOFF)
    }
}

/// How far a fetch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes on disk, those of earlier runs included.
    pub bytes: u64,
    /// Bytes of the whole file, where the server says.
    pub total_bytes: Option<u64>,
}

/// A file that is whole and in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Where.
    pub path: PathBuf,
    /// Size.
    pub num_bytes: u64,
    /// SHA-256 in hexadecimal; none where the file was there before and nobody asked.
    pub sha256: Option<String>,
    /// Whether it was there before and nothing was fetched.
    pub was_present: bool,
}

/// Fetches `source` to `destination`: a file, or a folder (then under the source's own file name), which is a path that
/// ends in a slash or leads to one. Folders that are missing are made. A file that is there already is kept, if it has the
/// SHA-256 that was asked for; nothing is written then, so it may lie where nothing can be. With another it stays until the
/// right one has come whole, and is replaced at once. A file that was fetched here and is of the same size and time of
/// change is not hashed again.
///
/// What has come so far lies in `<file>.partial` beside it, also after an error.
///
/// # Errors
/// [`FetchError`], which names the source or the file.
pub async fn fetch(
    source: &str,
    destination: &Path,
    options: &FetchOptions,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Fetched, FetchError> {
    let location = Location::parse(source, &options.hf_endpoint)?;
    let wanted = options.sha256.as_deref().map(|hash| location::parse_sha256(source, hash)).transpose()?;
    let is_folder = destination.is_dir() || destination.as_os_str().as_encoded_bytes().ends_with(b"/");
    let path = if is_folder { destination.join(&location.file_name) } else { destination.to_owned() };
    if let Some(present) = check_present(&path, wanted.as_deref()).await? {
        return Ok(present);
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(FetchError::io(folder, "create the folder"))?;
    }
    let lock = lock(&path, options.waits_for_others).await?;
    // Another process may have been faster.
    if let Some(present) = check_present(&path, wanted.as_deref()).await? {
        return Ok(present);
    }

    // Where the hash is known the file is the same under whatever signature.
    let url = if wanted.is_some() { location.shown() } else { location.url.to_string() };
    let partial = Partial::open(&path, &url).await?;
    let mut transfer = Transfer::new(&location, options, partial, wanted)?;
    let ran = transfer.run(progress).await;
    let (partial, wanted) = transfer.into_parts();
    if let Err(error) = ran {
        partial.close();
        return Err(error);
    }
    let (num_bytes, sha256) = partial.finish(wanted.as_deref()).await?;
    checked::remember(&lock, &path, &sha256);
    Ok(Fetched { path, num_bytes, sha256: Some(sha256), was_present: false })
}

/// Keeps a second fetch of the same file out. The lock is the system's and ends with the process; the file stays, since
/// removing it would let two processes hold locks on two files of that name.
async fn lock(path: &Path, waits: bool) -> Result<File, FetchError> {
    let lock_path = with_suffix(path, LOCK_SUFFIX);
    let file = File::options().create(true).truncate(false).write(true).open(&lock_path);
    let file = file.map_err(FetchError::io(&lock_path, "create the lock file"))?;
    let mut is_known = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(std::fs::TryLockError::WouldBlock) if waits => {
                if !is_known {
                    tracing::info!(path = %lock_path.display(), "another process is fetching this file, waiting for it");
                }
                is_known = true;
                tokio::time::sleep(LOCK_POLL).await;
            }
            Err(std::fs::TryLockError::WouldBlock) => return Err(FetchError::Locked { path: lock_path }),
            Err(std::fs::TryLockError::Error(error)) => return Err(FetchError::io(&lock_path, "lock")(error)),
        }
    }
}

async fn check_present(path: &Path, wanted: Option<&str>) -> Result<Option<Fetched>, FetchError> {
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => metadata,
        Ok(_) => return Err(FetchError::io(path, "replace")(std::io::ErrorKind::IsADirectory.into())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(FetchError::io(path, "look for the file")(error)),
    };
    let mut sha256 = None;
    if let Some(wanted) = wanted {
        let got = match checked::recall(&with_suffix(path, LOCK_SUFFIX), &metadata) {
            Some(known) => known,
            None => partial::hexadecimal(partial::hash_file(path).await?.0),
        };
        if got != wanted {
            tracing::warn!(path = %path.display(), got, wanted, "the file that is there has another sha256, fetching it anew");
            return Ok(None);
        }
        sha256 = Some(got);
    }
    Ok(Some(Fetched { path: path.to_owned(), num_bytes: metadata.len(), sha256, was_present: true }))
}

/// The path with something after its file name.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
