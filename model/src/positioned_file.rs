//! A file that is read by position and never mapped into memory: of this machine, or an object under a URL.
//! For: the checkpoint readers; many threads may read one file at the same time.
//! Invariant: every byte that is read is counted; a file that became shorter is an error that names what was being read.
//! Not here: what the bytes mean.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{ModelError, remote_file::RemoteFile};

/// An open file with its size at opening.
#[derive(Debug)]
pub struct PositionedFile {
    path: PathBuf,
    bytes: Bytes,
    num_bytes: u64,
    bytes_read: AtomicU64,
}

/// Where the bytes are.
#[derive(Debug)]
enum Bytes {
    Here(File),
    Elsewhere(Box<RemoteFile>),
}

impl PositionedFile {
    /// Opens a regular file, or an object under a URL (`https://`, `s3://`, `gs://`, `az://`), for reading.
    ///
    /// # Errors
    /// [`ModelError::Io`] if it cannot be opened or is no regular file.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let failed = |source| ModelError::Io { path: path.to_owned(), what: "cannot open the file".into(), source };
        if let Some(opened) = path.to_str().and_then(RemoteFile::open) {
            let file = opened.map_err(failed)?;
            let (num_bytes, bytes) = (file.num_bytes(), Bytes::Elsewhere(Box::new(file)));
            return Ok(Self { path: path.to_owned(), bytes, num_bytes, bytes_read: AtomicU64::new(0) });
        }
        let file = File::open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
        }
        let bytes = Bytes::Here(file);
        Ok(Self { path: path.to_owned(), bytes, num_bytes: metadata.len(), bytes_read: AtomicU64::new(0) })
    }

    /// Path that it was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether every read asks another machine.
    pub fn is_remote(&self) -> bool {
        matches!(self.bytes, Bytes::Elsewhere(_))
    }

    /// Size when it was opened.
    pub fn num_bytes(&self) -> u64 {
        self.num_bytes
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
        let file = match &self.bytes {
            Bytes::Here(file) => file,
            Bytes::Elsewhere(object) => {
                object.read_exact_at(buffer, offset).map_err(io)?;
                self.bytes_read.fetch_add(buffer.len() as u64, Ordering::Relaxed);
                return Ok(());
            }
        };
        let mut filled = 0;
        while filled < buffer.len() {
            match read_at(file, &mut buffer[filled..], offset + filled as u64) {
                Ok(0) => return Err(self.shrank(offset, buffer.len(), filled, what)),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(io(source)),
            }
        }
        self.bytes_read.fetch_add(filled as u64, Ordering::Relaxed);
        Ok(())
    }

    fn shrank(&self, offset: u64, expected: usize, got: usize, what: &str) -> ModelError {
        let problem = format!(
            "file shrank while it was read: expected {expected} bytes at offset {offset}, got {got}; it had {} bytes when opened",
            self.num_bytes
        );
        let source = io::Error::new(io::ErrorKind::UnexpectedEof, problem);
        ModelError::Io { path: self.path.clone(), what: what.to_owned(), source }
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
