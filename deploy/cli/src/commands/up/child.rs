//! One child process of `up`: this binary again, its log prefixed, stopped through its standard input.
//! Invariant: a child ends with its parent however that ends: it exits when the pipe to its standard input closes.

use std::{process::Stdio, time::Duration};

use anyhow::Context;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    process::{Child, Command},
    task::JoinHandle,
};

use crate::logging::{LogFormat, LogSettings};

/// How a command of this binary says why it failed.
const REASON: &str = "error: ";

/// A running child.
pub struct ChildProcess {
    name: String,
    pid: u32,
    child: Child,
    /// Copies the log; yields the reason that the child gave for its end.
    log: Option<JoinHandle<Option<String>>>,
}

impl ChildProcess {
    /// Starts this binary with `arguments`, in a process group of its own so that a terminal's Ctrl-C reaches only `up`.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(name: &str, arguments: &[String], log: &LogSettings) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("path of this program")?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .arg("--exit-on-stdin-close")
            .args(log.arguments())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        #[cfg(unix)]
        command.process_group(0);
        let mut child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let log = child.stderr.take().map(|output| tokio::spawn(copy_log(name.to_owned(), log.format, output)));
        let pid = child.id().with_context(|| format!("{name} ended at once"))?;
        Ok(Self { name: name.to_owned(), pid, child, log })
    }

    /// Its name, such as `worker-0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// How it ended, if it did: the reason that it gave, or its exit status.
    ///
    /// # Errors
    /// If the operating system does not say.
    pub async fn ended(&mut self) -> std::io::Result<Option<String>> {
        let Some(status) = self.child.try_wait()? else { return Ok(None) };
        Ok(Some(self.reason().await.unwrap_or_else(|| status.to_string())))
    }

    async fn reason(&mut self) -> Option<String> {
        self.log.take()?.await.ok().flatten()
    }

    /// Asks it to drain and waits; kills it when `limit` has passed.
    pub async fn stop(mut self, limit: Duration) {
        drop(self.child.stdin.take());
        match tokio::time::timeout(limit, self.child.wait()).await {
            Ok(Ok(status)) if !status.success() => {
                let reason = self.reason().await;
                tracing::warn!(child = self.name, %status, reason, "ended");
            }
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

/// Copies a child's log under its name and keeps back the reason for its end, which `up` reports itself.
async fn copy_log(name: String, format: LogFormat, output: impl AsyncRead + Unpin) -> Option<String> {
    let mut reason = None;
    let mut lines = BufReader::new(output).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match (line.strip_prefix(REASON), format) {
            (Some(text), _) => reason = Some(text.to_owned()),
            (None, LogFormat::Text) => eprintln!("[{name}] {line}"),
            (None, LogFormat::Json) => eprintln!("{}", named(&name, &line)),
        }
    }
    reason
}

/// A JSON log line with the name of the process that wrote it.
fn named(name: &str, line: &str) -> String {
    let object = serde_json::from_str(line).ok().filter(serde_json::Value::is_object);
    let mut value = object.unwrap_or_else(|| serde_json::json!({ "message": line }));
    value["process"] = name.into();
    value.to_string()
}
