//! The part of a file that has come so far, with its hash and what it is a part of.
//!
//! `<file>.partial` holds the bytes, `<file>.partial.json` the URL's hash and the server's ETag: bytes of another source or
//! of a changed file are never continued.
//! Invariants: `hasher` has seen exactly the `len` bytes of the file; no URL is written down, as it may hold a signature.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::{fs::File, io::AsyncWriteExt};

use super::{FetchError, with_suffix};

/// What the bytes are a part of.
#[derive(Default, PartialEq, Eq, Serialize, Deserialize)]
struct Origin {
    url_sha256: String,
    etag: Option<String>,
}

/// A file being written.
pub(super) struct Partial {
    destination: PathBuf,
    path: PathBuf,
    origin_path: PathBuf,
    origin: Origin,
    file: File,
    len: u64,
    hasher: Sha256,
}

impl Partial {
    /// Opens or creates the part; what an earlier run left of another URL is dropped.
    ///
    /// # Errors
    /// [`FetchError::Io`].
    pub(super) async fn open(destination: &Path, url: &str) -> Result<Self, FetchError> {
        let url_sha256 = hexadecimal(Sha256::new_with_prefix(url));
        let path = with_suffix(destination, ".partial");
        let origin_path = with_suffix(destination, ".partial.json");
        let earlier = std::fs::read(&origin_path).ok().and_then(|json| serde_json::from_slice::<Origin>(&json).ok());
        let earlier = earlier.filter(|origin| origin.url_sha256 == url_sha256);
        let file = std::fs::File::options()
            .create(true)
            .append(true)
            .truncate(false)
            .open(&path)
            .map_err(FetchError::io(&path, "create the file"))?;
        let is_continued = earlier.is_some();
        let (hasher, len) = if is_continued { hash_file(&path).await? } else { (Sha256::new(), 0) };
        let origin = earlier.unwrap_or(Origin { url_sha256, etag: None });
        let file = File::from_std(file);
        let mut partial = Self { destination: destination.to_owned(), path, origin_path, origin, file, len, hasher };
        if !is_continued {
            partial.restart(None).await?;
        }
        Ok(partial)
    }

    /// Bytes so far.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The ETag under which the bytes came.
    pub(super) fn etag(&self) -> Option<&str> {
        self.origin.etag.as_deref()
    }

    /// Drops all bytes; those that follow come under this ETag.
    ///
    /// # Errors
    /// [`FetchError::Io`].
    pub(super) async fn restart(&mut self, etag: Option<String>) -> Result<(), FetchError> {
        self.flush().await?;
        self.file.set_len(0).await.map_err(FetchError::io(&self.path, "truncate"))?;
        (self.len, self.hasher) = (0, Sha256::new());
        self.origin.etag = etag;
        let json = serde_json::to_vec(&self.origin).map_err(std::io::Error::from);
        let written = json.and_then(|json| std::fs::write(&self.origin_path, json));
        written.map_err(FetchError::io(&self.origin_path, "write"))
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// [`FetchError::Io`], also for bytes given before.
    pub(super) async fn write(&mut self, bytes: &[u8]) -> Result<(), FetchError> {
        self.file.write_all(bytes).await.map_err(FetchError::io(&self.path, "write"))?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Waits until all bytes are with the system.
    ///
    /// # Errors
    /// [`FetchError::Io`].
    pub(super) async fn flush(&mut self) -> Result<(), FetchError> {
        self.file.flush().await.map_err(FetchError::io(&self.path, "write"))
    }

    /// Leaves what has come to a later run; nothing, if nothing has.
    pub(super) fn close(&self) {
        if self.len == 0 {
            // Empty files that stay would only be ignored.
            let _ = std::fs::remove_file(&self.path);
            let _ = std::fs::remove_file(&self.origin_path);
        }
    }

    /// Checks the hash, makes the bytes durable and gives the file its name. Returns size and SHA-256.
    ///
    /// # Errors
    /// [`FetchError::Hash`], and then the bytes are dropped; [`FetchError::Io`].
    pub(super) async fn finish(mut self, wanted: Option<&str>) -> Result<(u64, String), FetchError> {
        self.flush().await?;
        let got = hexadecimal(std::mem::take(&mut self.hasher));
        if let Some(wanted) = wanted.filter(|&wanted| wanted != got) {
            self.restart(None).await?;
            self.close();
            return Err(FetchError::Hash { path: self.path.clone(), expected: wanted.to_owned(), got });
        }
        self.file.sync_all().await.map_err(FetchError::io(&self.path, "write"))?;
        std::fs::rename(&self.path, &self.destination).map_err(FetchError::io(&self.destination, "rename to"))?;
        // The file is in place; what is left of its origin would only be ignored.
        let _ = std::fs::remove_file(&self.origin_path);
        Ok((self.len, got))
    }
}

/// Hashes a whole file, on a thread where that may take its time. Returns its length too.
///
/// # Errors
/// [`FetchError::Io`].
pub(super) async fn hash_file(path: &Path) -> Result<(Sha256, u64), FetchError> {
    let owned = path.to_owned();
    let hashed = tokio::task::spawn_blocking(move || -> std::io::Result<(Sha256, u64)> {
        let mut file = std::fs::File::open(owned)?;
        let (mut hasher, mut len) = (Sha256::new(), 0);
        let mut buffer = vec![0; 1 << 20];
        loop {
            let count = file.read(&mut buffer)?;
            if count == 0 {
                return Ok((hasher, len));
            }
            hasher.update(&buffer[..count]);
            len += count as u64;
        }
    });
    hashed.await.map_err(std::io::Error::other).flatten().map_err(FetchError::io(path, "read"))
}

/// Lower-case digits of a finished hash.
pub(super) fn hexadecimal(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
