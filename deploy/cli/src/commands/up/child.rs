//! One child process of `up`: this binary again, its log prefixed, stopped through its standard input.
//! Invariant: a child ends with its parent however that ends: it exits when the pipe to its standard input closes.

use std::{process::Stdio, time::Duration};

use anyhow::Context;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    process::{Child, Command},
};

/// A running child.
pub struct ChildProcess {
    name: String,
    pid: u32,
    child: Child,
}

impl ChildProcess {
    /// Starts this binary with `arguments`, in a process group of its own so that a terminal's Ctrl-C reaches only `up`.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(name: &str, arguments: &[String]) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("path of this program")?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .arg("--exit-on-stdin-close")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        #[cfg(unix)]
        command.process_group(0);
        let mut child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        if let Some(output) = child.stdout.take() {
            tokio::spawn(copy_lines(name.to_owned(), output));
        }
        if let Some(output) = child.stderr.take() {
            tokio::spawn(copy_lines(name.to_owned(), output));
        }
        let pid = child.id().with_context(|| format!("{name} ended at once"))?;
        Ok(Self { name: name.to_owned(), pid, child })
    }

    /// Its name, such as `worker-0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// How it ended, if it did.
    ///
    /// # Errors
    /// If the operating system does not say.
    pub fn ended(&mut self) -> std::io::Result<Option<String>> {
        Ok(self.child.try_wait()?.map(|status| status.to_string()))
    }

    /// Asks it to drain and waits; kills it when `limit` has passed.
    pub async fn stop(mut self, limit: Duration) {
        drop(self.child.stdin.take());
        match tokio::time::timeout(limit, self.child.wait()).await {
            Ok(Ok(status)) if !status.success() => tracing::warn!(child = self.name, %status, "ended"),
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(child = self.name, %error, "cannot wait for it"),
            Err(_) => {
                tracing::warn!(child = self.name, pid = self.pid, "did not stop in time, killing it");
                if let Err(error) = self.child.kill().await {
                    tracing::warn!(child = self.name, %error, "cannot kill it");
                }
            }
        }
    }
}

async fn copy_lines(name: String, output: impl AsyncRead + Unpin) {
    let mut lines = BufReader::new(output).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        eprintln!("[{name}] {line}");
    }
}
