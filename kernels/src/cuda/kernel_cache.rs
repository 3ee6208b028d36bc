//! Compiled kernels on disk, so that a second start compiles nothing.
//! Invariant: an entry is written to a file of its own and renamed into place, and carries a digest of its content:
//! concurrent starts and interrupted writes can leave neither a torn entry nor a wrong one.
//! Not here: what makes the key (the [`compiler`](super::compiler)).

use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use sha2::{Digest, Sha256};

const DIGEST_BYTES: usize = 32;
/// A write takes milliseconds: what is so old belongs to nobody.
const LEFT_OVER_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

/// Key of an entry: a digest of everything that decides the cubin.
pub type Key = [u8; DIGEST_BYTES];

/// A folder of cubins, or none: then every start compiles.
#[derive(Clone, Debug, Default)]
pub struct KernelCache {
    folder: Option<PathBuf>,
}

impl KernelCache {
    /// Keeps cubins in `folder`, which is made when the first is written; `None`: nowhere.
    pub fn new(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    /// The cubin of `key`, if it was stored whole.
    pub(super) fn load(&self, key: &Key) -> Option<Vec<u8>> {
        let mut content = std::fs::read(self.path(key)?).ok()?;
        let digest: [u8; DIGEST_BYTES] = *content.last_chunk()?;
        content.truncate(content.len() - DIGEST_BYTES);
        (Sha256::digest(&content)[..] == digest).then_some(content)
    }

    /// Stores a cubin. A cache that cannot be written costs time at the next start and nothing else, so it is reported
    /// and not an error.
    pub(super) fn store(&self, key: &Key, cubin: &[u8]) {
        if let Some(path) = self.path(key)
            && let Err(error) = write_renamed(&path, cubin)
        {
            tracing::warn!(path = %path.display(), %error, "a compiled kernel could not be kept");
        }
    }

    fn path(&self, key: &Key) -> Option<PathBuf> {
        let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        Some(self.folder.as_ref()?.join(name + ".cubin"))
    }
}

fn write_renamed(path: &Path, cubin: &[u8]) -> std::io::Result<()> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
        remove_left_over(folder, SystemTime::now() - LEFT_OVER_AFTER);
    }
    let unique = COUNTER.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("{}-{unique}.tmp", std::process::id()));
    let written = std::fs::File::create_new(&temporary).and_then(|mut file| {
        file.write_all(cubin)?;
        file.write_all(&Sha256::digest(cubin))
    });
    let renamed = written.and_then(|()| std::fs::rename(&temporary, path));
    if renamed.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    renamed
}

/// Removes what processes that ended in the middle of a write have left, last changed before `border`. What cannot be
/// removed harms nobody.
fn remove_left_over(folder: &Path, border: SystemTime) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.path().extension().is_some_and(|extension| extension == "tmp")) {
        let changed = entry.metadata().and_then(|metadata| metadata.modified());
        if changed.is_ok_and(|changed| changed < border) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_back_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(Some(folder.path().join("new")));
        let key = [7; DIGEST_BYTES];
        assert_eq!(cache.load(&key), None);
        cache.store(&key, b"cubin");
        assert_eq!(cache.load(&key).as_deref(), Some(&b"cubin"[..]));
        let path = cache.path(&key).unwrap();
        let mut torn = std::fs::read(&path).unwrap();
        torn.remove(2);
        std::fs::write(&path, torn).unwrap();
        assert_eq!(cache.load(&key), None);
        std::fs::write(&path, b"short").unwrap();
        assert_eq!(cache.load(&key), None);
        assert_eq!(KernelCache::default().load(&key), None);
    }

    #[test]
    fn what_a_killed_process_left_is_removed_when_it_is_old() {
        let folder = tempfile::tempdir().unwrap();
        let [left_over, entry] = ["a.1-0.tmp", "b.cubin"].map(|name| folder.path().join(name));
        for path in [&left_over, &entry] {
            std::fs::write(path, b"x").unwrap();
        }
        remove_left_over(folder.path(), SystemTime::now() - LEFT_OVER_AFTER);
        assert!(left_over.exists());
        remove_left_over(folder.path(), SystemTime::now() + LEFT_OVER_AFTER);
        assert!(!left_over.exists() && entry.exists());
    }

    #[test]
    fn writers_at_the_same_time_leave_one_whole_entry() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(Some(folder.path().to_owned()));
        let (key, cubin) = ([9; DIGEST_BYTES], vec![42; 1 << 18]);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..8 {
                        cache.store(&key, &cubin);
                        assert_eq!(cache.load(&key).as_ref(), Some(&cubin));
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
