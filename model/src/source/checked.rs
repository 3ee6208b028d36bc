//! What a file was when its hash was last seen, kept in its lock file: a checkpoint of hundreds of gigabytes is not to be
//! read whole at every start of every process that shares it.
//! Invariant: a record counts only for a file of the size and the time of change that it names.

use std::{
    fs::{File, Metadata},
    io::Write,
    path::Path,
    time::SystemTime,
};

use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Checked {
    sha256: String,
    num_bytes: u64,
    modified: SystemTime,
}

/// The hash of the file with this metadata, if it is the one that was hashed.
pub(super) fn recall(lock_path: &Path, metadata: &Metadata) -> Option<String> {
    let checked: Checked = serde_json::from_slice(&std::fs::read(lock_path).ok()?).ok()?;
    let is_same = checked.num_bytes == metadata.len() && checked.modified == metadata.modified().ok()?;
    is_same.then_some(checked.sha256)
}

/// Records the hash of a file. Without the record it would only be computed again, so failures are none.
pub(super) fn remember(mut lock: &File, path: &Path, sha256: &str) {
    let Ok(metadata) = std::fs::metadata(path) else { return };
    let Ok(modified) = metadata.modified() else { return };
    let checked = Checked { sha256: sha256.to_owned(), num_bytes: metadata.len(), modified };
    let Ok(json) = serde_json::to_vec(&checked) else { return };
    let _ = lock.set_len(0).and_then(|()| lock.write_all(&json));
}
