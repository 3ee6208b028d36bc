//! Compiled kernels on disk, so that a second start compiles nothing.
//! Invariant: an entry is written to a file of its own and renamed into place, and carries a digest of its content:
//! concurrent starts and interrupted writes can leave neither a torn entry nor a wrong one. An entry that is removed
//! under a reader costs it a compilation.
//! For: cubins of CUDA, and what Vulkan's drivers have made of shaders.
//! Not here: what makes the key (whoever compiles).

use std::{
    ffi::OsStr,
    io::Write,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use sha2::{Digest, Sha256};

const DIGEST_BYTES: usize = 32;
/// A write takes milliseconds: what is so old belongs to nobody.
const LEFT_OVER_AFTER: Duration = DAY;
/// Entries that nobody loaded for so long are those of sources, compilers or GPUs that are gone.
const UNUSED_AFTER: Duration = Duration::from_secs(30 * DAY.as_secs());
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Key of an entry: a digest of everything that decides its content.
pub type Key = [u8; DIGEST_BYTES];

/// What entries are, by the ends of their files' names.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// A kernel of CUDA.
    #[cfg_attr(
        not(feature = "cuda"),
        allow(dead_code, reason = "the names of all kinds are known, so that old ones go")
    )]
    Cubin,
    /// A driver's pipelines.
    #[cfg_attr(
        not(feature = "webgpu"),
        allow(dead_code, reason = "the names of all kinds are known, so that old ones go")
    )]
    Pipelines,
}

impl Kind {
    const ALL: [Self; 2] = [Self::Cubin, Self::Pipelines];

    fn extension(self) -> &'static str {
        match self {
            Self::Cubin => "cubin",
            Self::Pipelines => "pipelines",
        }
    }
}

/// A folder of compiled kernels, or none: then every start compiles.
#[derive(Clone, Debug, Default)]
pub struct KernelCache {
    folder: Option<PathBuf>,
}

impl KernelCache {
    /// Keeps them in `folder`, which is made when the first is written; `None`: nowhere.
    pub fn new(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    /// The entry of `key`, if it was stored whole.
    pub(crate) fn load(&self, kind: Kind, key: &Key) -> Option<Vec<u8>> {
        let path = self.path(kind, key)?;
        let mut content = std::fs::read(&path).ok()?;
        note_use(&path, SystemTime::now());
        let digest: Vec<u8> = content.split_off(content.len().saturating_sub(DIGEST_BYTES));
        if Sha256::digest(&content)[..] != digest[..] {
            tracing::warn!(path = %path.display(), "a compiled kernel is damaged, and is compiled again");
            return None;
        }
        Some(content)
    }

    /// Stores an entry. A cache that cannot be written costs time at the next start and nothing else, so it is reported
    /// and not an error.
    pub(crate) fn store(&self, kind: Kind, key: &Key, content: &[u8]) {
        if let Some(path) = self.path(kind, key)
            && let Err(error) = write_renamed(&path, content)
        {
            tracing::warn!(path = %path.display(), %error, "a compiled kernel could not be kept");
        }
    }

    fn path(&self, kind: Kind, key: &Key) -> Option<PathBuf> {
        let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        Some(self.folder.as_ref()?.join(name).with_extension(kind.extension()))
    }
}

fn write_renamed(path: &Path, content: &[u8]) -> std::io::Result<()> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
        remove_old(folder, SystemTime::now());
    }
    let unique = COUNTER.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("{}-{unique}.tmp", std::process::id()));
    let written = std::fs::File::create_new(&temporary).and_then(|mut file| {
        file.write_all(content)?;
        file.write_all(&Sha256::digest(content))
    });
    let renamed = written.and_then(|()| std::fs::rename(&temporary, path));
    if renamed.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    renamed
}

/// Keeps an entry from being taken for unused: its time of change is that of its last use, to the day.
fn note_use(path: &Path, now: SystemTime) {
    let changed = std::fs::metadata(path).and_then(|metadata| metadata.modified());
    if changed.is_ok_and(|changed| changed + DAY < now) {
        // Where we may read alone, whoever writes there decides what is old.
        let _ = std::fs::File::options().append(true).open(path).and_then(|file| file.set_modified(now));
    }
}

/// Removes what processes that ended in the middle of a write have left, and entries that are not used any more. What
/// cannot be removed harms nobody.
fn remove_old(folder: &Path, now: SystemTime) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let kept_for = match path.extension().and_then(OsStr::to_str) {
            Some("tmp") => LEFT_OVER_AFTER,
            Some(extension) if Kind::ALL.iter().any(|kind| kind.extension() == extension) => UNUSED_AFTER,
            _ => continue,
        };
        let changed = entry.metadata().and_then(|metadata| metadata.modified());
        if changed.is_ok_and(|changed| changed + kept_for < now) {
            let _ = std::fs::remove_file(path);
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
        assert_eq!(cache.load(Kind::Cubin, &key), None);
        cache.store(Kind::Cubin, &key, b"cubin");
        assert_eq!(cache.load(Kind::Cubin, &key).as_deref(), Some(&b"cubin"[..]));
        let path = cache.path(Kind::Cubin, &key).unwrap();
        let mut torn = std::fs::read(&path).unwrap();
        torn.remove(2);
        std::fs::write(&path, torn).unwrap();
        assert_eq!(cache.load(Kind::Cubin, &key), None);
        std::fs::write(&path, b"short").unwrap();
        assert_eq!(cache.load(Kind::Cubin, &key), None);
        assert_eq!(KernelCache::default().load(Kind::Cubin, &key), None);
    }

    #[test]
    fn what_is_old_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        let write = |name: &str, age: Duration| {
            let path = folder.path().join(name);
            std::fs::write(&path, b"x").unwrap();
            std::fs::File::options().append(true).open(&path).unwrap().set_modified(now - age).unwrap();
            path
        };
        // What a killed process left, what others write now, entries of today and of old kernels, what is not ours.
        let left_over = write("a.1-0.tmp", DAY * 2);
        let others = write("a.2-0.tmp", DAY / 2);
        let entry = write("a.cubin", DAY * 29);
        let unused = write("b.cubin", DAY * 31);
        let used = write("c.cubin", DAY * 31);
        let foreign = write("d.txt", DAY * 99);
        note_use(&used, now);
        remove_old(folder.path(), now);
        assert!(!left_over.exists() && !unused.exists());
        assert!([others, entry, used, foreign].iter().all(|path| path.exists()));
    }

    #[test]
    fn an_entry_that_is_loaded_counts_as_used() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(Some(folder.path().to_owned()));
        let (old, new) = ([1; DIGEST_BYTES], [2; DIGEST_BYTES]);
        cache.store(Kind::Cubin, &old, b"cubin");
        let file = std::fs::File::options().append(true).open(cache.path(Kind::Cubin, &old).unwrap()).unwrap();
        file.set_modified(SystemTime::now() - UNUSED_AFTER * 2).unwrap();
        assert!(cache.load(Kind::Cubin, &old).is_some());
        cache.store(Kind::Cubin, &new, b"cubin");
        assert!(cache.load(Kind::Cubin, &old).is_some());
        file.set_modified(SystemTime::now() - UNUSED_AFTER * 2).unwrap();
        cache.store(Kind::Cubin, &new, b"cubin");
        assert_eq!(cache.load(Kind::Cubin, &old), None);
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
                        cache.store(Kind::Cubin, &key, &cubin);
                        assert_eq!(cache.load(Kind::Cubin, &key).as_ref(), Some(&cubin));
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
