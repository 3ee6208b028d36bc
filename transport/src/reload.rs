//! What was made of files, made again when they change.
//! Invariant: files that cannot be used change nothing: what was made last stays in force. Connections that exist keep
//! what they began with.

use std::{
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, SystemTime},
};

use crate::{
    TlsError, TlsFiles,
    files::{Credentials, Pem},
};

/// How often files are read. They are compared by content: a mounted secret changes by its links, and a date says little.
const INTERVAL: Duration = Duration::from_secs(2);

/// A `T` made of files.
pub(crate) struct Reloading<T> {
    /// Whom the certificates are for, in the log.
    name: &'static str,
    files: TlsFiles,
    build: fn(&Credentials) -> Result<T, TlsError>,
    current: RwLock<Current<T>>,
    /// What was read last, usable or not.
    seen: Mutex<Option<Pem>>,
}

struct Current<T> {
    made: Arc<T>,
    not_after: SystemTime,
}

impl<T: Send + Sync + 'static> Reloading<T> {
    /// Reads `files` for the first time.
    pub fn open(
        name: &'static str,
        files: TlsFiles,
        build: fn(&Credentials) -> Result<T, TlsError>,
    ) -> Result<Self, TlsError> {
        let pem = files.read()?;
        let current = RwLock::new(make(&files, &pem, build)?);
        Ok(Self { name, files, build, current, seen: Mutex::new(Some(pem)) })
    }

    /// What was made last.
    pub fn current(&self) -> Arc<T> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner).made)
    }

    /// When the certificate in force expires.
    pub fn not_after(&self) -> SystemTime {
        self.current.read().unwrap_or_else(PoisonError::into_inner).not_after
    }

    /// Looks at the files again and again, for ever.
    pub async fn watch(self: Arc<Self>) {
        loop {
            tokio::time::sleep(INTERVAL).await;
            let this = Arc::clone(&self);
            // A folder may lie on a network. A panic there was reported by the panic hook.
            let _ = tokio::task::spawn_blocking(move || this.reload()).await;
        }
    }

    /// Reads the files; takes over what they hold if that is new and can be used.
    fn reload(&self) {
        let read = self.files.read();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if *seen == read.as_ref().ok().cloned() {
            return;
        }
        let name = self.name;
        let made = read.and_then(|pem| {
            *seen = Some(pem.clone());
            make(&self.files, &pem, self.build)
        });
        match made {
            Ok(current) => {
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = current;
                tracing::info!(certificates = name, "certificates changed: new connections use the new ones");
            }
            Err(error) => {
                if matches!(error, TlsError::Read { .. }) {
                    *seen = None;
                }
                tracing::error!(certificates = name, %error, "certificates changed and cannot be used: the old ones stay in force");
            }
        }
    }
}

fn make<T>(
    files: &TlsFiles,
    pem: &Pem,
    build: fn(&Credentials) -> Result<T, TlsError>,
) -> Result<Current<T>, TlsError> {
    let credentials = files.parse(pem)?;
    Ok(Current { made: Arc::new(build(&credentials)?), not_after: credentials.not_after })
}
