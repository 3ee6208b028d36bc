//! The children of `up`: a coordinator and its workers. The cluster ends with its coordinator; a worker that ends is
//! started again, later and later if it does not last.

use std::{path::Path, time::Duration};

use tokio::time::Instant;

use super::{super::coordinator::Addresses, POLL, START_TIMEOUT, child::ChildProcess};
use crate::logging::LogSettings;

/// Longest wait for children to drain.
const STOP_TIMEOUT: Duration = Duration::from_secs(35);
/// Wait before a worker is started again; doubles each time.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
/// Longest such wait; a worker that lived longer starts over with the first.
const LAST_BACKOFF: Duration = Duration::from_secs(30);

/// The children.
pub struct Cluster {
    coordinator: ChildProcess,
    workers: Vec<Worker>,
    log: LogSettings,
}

/// A worker process and what it takes to start it again.
struct Worker {
    process: ChildProcess,
    arguments: Vec<String>,
    started: Instant,
    backoff: Duration,
    /// It has ended and is to be started then.
    restart: Option<Instant>,
}

impl Cluster {
    /// Starts the coordinator.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(arguments: &[String], log: LogSettings) -> anyhow::Result<Self> {
        let coordinator = ChildProcess::start("coordinator", arguments, &log)?;
        Ok(Self { coordinator, workers: Vec::new(), log })
    }

    /// Starts one more worker.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start_worker(&mut self, name: &str, arguments: Vec<String>) -> anyhow::Result<()> {
        let process = ChildProcess::start(name, &arguments, &self.log)?;
        let started = Instant::now();
        self.workers.push(Worker { process, arguments, started, backoff: FIRST_BACKOFF, restart: None });
        Ok(())
    }

    /// Process ids of the coordinator and of the workers.
    pub fn pids(&self) -> (u32, Vec<u32>) {
        (self.coordinator.pid(), self.workers.iter().map(|worker| worker.process.pid()).collect())
    }

    /// Waits until the coordinator has written where it listens.
    ///
    /// # Errors
    /// If it ends or does not listen in time.
    pub async fn wait_for_addresses(&mut self, listening: &Path) -> anyhow::Result<Addresses> {
        let deadline = Instant::now() + START_TIMEOUT;
        while !listening.exists() {
            if let Some(reason) = self.coordinator.ended().await? {
                anyhow::bail!("the coordinator ended at start: {reason}");
            }
            anyhow::ensure!(Instant::now() < deadline, "the coordinator does not listen after {START_TIMEOUT:?}");
            tokio::time::sleep(POLL).await;
        }
        Ok(serde_json::from_slice(&std::fs::read(listening)?)?)
    }

    /// Resolves when any child has ended.
    pub async fn first_end(&mut self) -> anyhow::Error {
        loop {
            let workers = self.workers.iter_mut().map(|worker| &mut worker.process);
            for child in std::iter::once(&mut self.coordinator).chain(workers) {
                match child.ended().await {
                    Ok(None) => {}
                    Ok(Some(reason)) => return anyhow::anyhow!("{} ended: {reason}", child.name()),
                    Err(error) => return error.into(),
                }
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Starts workers again that end, and tells `restarted` of each; resolves when that or the coordinator fails.
    pub async fn keep_up(&mut self, restarted: impl Fn(&Self) -> anyhow::Result<()>) -> anyhow::Error {
        loop {
            let look = async {
                if let Some(reason) = self.coordinator.ended().await? {
                    anyhow::bail!("the coordinator ended: {reason}");
                }
                let mut any = false;
                for worker in &mut self.workers {
                    any |= worker.keep_up(&self.log).await?;
                }
                if any { restarted(self) } else { Ok(()) }
            };
            if let Err(error) = look.await {
                return error;
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// The coordinator first: it lets running requests finish, for which it needs the workers.
    pub async fn stop(self) {
        self.coordinator.stop(STOP_TIMEOUT).await;
        let workers = self.workers.into_iter().filter(|worker| worker.restart.is_none());
        futures::future::join_all(workers.map(|worker| worker.process.stop(STOP_TIMEOUT))).await;
    }
}

impl Worker {
    /// Starts it again once it has ended and waited; whether it did now.
    async fn keep_up(&mut self, log: &LogSettings) -> anyhow::Result<bool> {
        let now = Instant::now();
        match self.restart {
            Some(at) if now >= at => {
                let name = self.process.name().to_owned();
                match ChildProcess::start(&name, &self.arguments, log) {
                    Ok(process) => (self.process, self.started, self.restart) = (process, now, None),
                    Err(error) => {
                        // The others serve on.
                        tracing::error!(worker = name, error = format!("{error:#}"), "cannot start a worker again");
                        self.restart = Some(now + LAST_BACKOFF);
                    }
                }
                Ok(self.restart.is_none())
            }
            Some(_) => Ok(false),
            None => {
                let Some(reason) = self.process.ended().await? else { return Ok(false) };
                if now - self.started > LAST_BACKOFF {
                    self.backoff = FIRST_BACKOFF;
                }
                let (worker, backoff) = (self.process.name(), self.backoff);
                tracing::error!(worker, reason, ?backoff, "a worker ended; starting it again");
                self.restart = Some(now + backoff);
                self.backoff = (backoff * 2).min(LAST_BACKOFF);
                Ok(false)
            }
        }
    }
}
