//! A file that is read by position and never mapped into memory: of this machine, an object under a URL, or whatever else
//! can be read so.
//! For: the checkpoint readers; many threads may read one file at the same time.
//! Invariant: every byte that is read is counted; a file that became shorter is an error that names what was being read.
//! Not here: what the bytes mean.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::ModelError;

/// Bytes that are read by position, on any thread.
pub trait ReadAt: fmt::Debug + Send + Sync {
    /// How many there were when it was opened.
    fn num_bytes(&self) -> u64;

    /// Fills `buffer` from `offset` on.
    ///
    /// # Errors
    /// If it ends earlier or cannot be read.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Whether every read is a round trip, so that few large ones are better than many small ones.
    fn is_remote(&self) -> bool {
        true
    }
}

/// An open file with its size at opening.
#[derive(Debug)]
pub struct PositionedFile {
    path: PathBuf,
    bytes: Box<dyn ReadAt>,
    bytes_read: AtomicU64,
}

impl PositionedFile {
    /// Opens a regular file, or an object under a URL (`https://`, `s3://`, `gs://`, `az://`), for reading.
    ///
    /// # Errors
    /// [`ModelError::Io`] if it cannot be opened or is no regular file.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let failed = |source| ModelError::Io { path: shown_path(path), what: "cannot open the file".into(), source };
        Ok(Self::new(path, open(path).map_err(failed)?))
    }

    /// Takes bytes from elsewhere under the name of `path`.
    pub fn new(path: &Path, bytes: Box<dyn ReadAt>) -> Self {
        Self { path: shown_path(path), bytes, bytes_read: AtomicU64::new(0) }
    }

    /// Path that it was opened with, or its URL as it may be shown.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether every read asks another machine.
    pub fn is_remote(&self) -> bool {
        self.bytes.is_remote()
    }

    /// Size when it was opened.
    pub fn num_bytes(&self) -> u64 {
        self.bytes.num_bytes()
    }

    /// Bytes read since it was opened.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Fills `buffer` from `offset` on; `what` names the field or tensor in errors.
    ///
    /// # Errors
    /// [`ModelError::Io`] if reading fails or the file ends earlier than it did when it was opened.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64, what: &str) -> Result<(), ModelError> {
        let io = |source| ModelError::Io { path: self.path.clone(), what: what.to_owned(), source };
        self.bytes.read_exact_at(buffer, offset).map_err(io)?;
        self.bytes_read.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// A model's path or URL as it may be shown and logged: without what may be a secret, which are the query of a URL (it may
/// hold a signature) and its user and password.
pub fn shown(source: &str) -> String {
    let Some((scheme, rest)) = source.split_once("://") else { return source.to_owned() };
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!("{scheme}://{host}{path}")
}

/// Whether a model's path is a URL under which workers read it where it lies.
pub fn is_remote(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.contains("://"))
}

fn shown_path(path: &Path) -> PathBuf {
    path.to_str().map_or_else(|| path.to_owned(), |text| shown(text).into())
}

#[cfg(not(target_family = "wasm"))]
fn open(path: &Path) -> io::Result<Box<dyn ReadAt>> {
    if let Some(opened) = path.to_str().and_then(crate::remote_file::RemoteFile::open) {
        return Ok(Box::new(opened?));
    }
    Ok(Box::new(local::LocalFile::open(path)?))
}

/// A page has no files by name.
#[cfg(target_family = "wasm")]
fn open(_: &Path) -> io::Result<Box<dyn ReadAt>> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_family = "wasm"))]
mod local {
    use std::{fs::File, io, path::Path};

    use super::ReadAt;

    /// A regular file of this machine.
    #[derive(Debug)]
    pub(super) struct LocalFile {
        file: File,
        num_bytes: u64,
    }

    impl LocalFile {
        pub(super) fn open(path: &Path) -> io::Result<Self> {
            let file = File::open(path)?;
            let metadata = file.metadata()?;
            if !metadata.is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
            }
            Ok(Self { file, num_bytes: metadata.len() })
        }

        fn shrank(&self, offset: u64, expected: usize, got: usize) -> io::Error {
            let problem = format!(
                "file shrank while it was read: expected {expected} bytes at offset {offset}, got {got}; it had {} bytes when opened",
                self.num_bytes
            );
            io::Error::new(io::ErrorKind::UnexpectedEof, problem)
        }
    }

    impl ReadAt for LocalFile {
        fn num_bytes(&self) -> u64 {
            self.num_bytes
        }

        fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            let mut filled = 0;
            while filled < buffer.len() {
                match read_at(&self.file, &mut buffer[filled..], offset + filled as u64) {
                    Ok(0) => return Err(self.shrank(offset, buffer.len(), filled)),
                    Ok(count) => filled += count,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        }

        fn is_remote(&self) -> bool {
            false
        }
    }

    #[cfg(unix)]
    fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(file, buffer, offset)
    }

    #[cfg(windows)]
    fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        std::os::windows::fs::FileExt::seek_read(file, buffer, offset)
    }
}
