//! The tenants' file, read again when it changes.
//! Invariant: a file that cannot be used changes nothing: what was read last stays in force, the log says why, and
//! `lockstep_coordinator_tenants_file_valid` is 0 until the file is right.

use std::{path::PathBuf, sync::atomic::Ordering, time::Duration};

use super::{Tenants, file};

/// How often the file is read. It is compared by content: a mounted secret changes by its links, and a date says little.
const INTERVAL: Duration = Duration::from_secs(1);

impl Tenants {
    /// Follows the file for as long as this is polled.
    pub async fn follow(self, path: PathBuf) {
        // The same content may be taken over once more, which changes nothing.
        let mut seen = None;
        loop {
            let read = tokio::fs::read_to_string(&path).await.map_err(|error| error.to_string());
            if seen.as_ref() != Some(&read) {
                let parsed = read.clone().and_then(|text| file::parse(&text));
                self.is_file_valid.store(parsed.is_ok(), Ordering::Relaxed);
                match parsed {
                    Ok(specs) => {
                        tracing::info!(path = %path.display(), num_tenants = specs.len(), "the tenants' file is in force");
                        self.replace(specs);
                    }
                    Err(problem) => {
                        tracing::error!(path = %path.display(), problem, "the tenants' file cannot be used: what it said before stays in force");
                    }
                }
                seen = Some(read);
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }
}
