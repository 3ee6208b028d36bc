//! Programs that a test runs to their end, which never takes longer than [`PATIENCE`].

use std::{
    path::{Path, PathBuf},
    pin::pin,
    process::{Output, Stdio},
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use tokio::{io::AsyncWriteExt, process::Command, time::timeout};

use crate::environment;

/// Longest that a program may take; one that hangs is interrupted, so that it ends what it has started.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Longest that it may take for that; then it is killed.
const FAREWELL: Duration = Duration::from_secs(20);

/// Runs a program with `input` on its standard input.
///
/// # Errors
/// If it cannot be started or does not end in time.
pub async fn finish(command: std::process::Command, input: &[u8]) -> anyhow::Result<Output> {
    finish_within(PATIENCE, command, input).await
}

async fn finish_within(patience: Duration, command: std::process::Command, input: &[u8]) -> anyhow::Result<Output> {
    let name = format!("{command:?}");
    let mut command = Command::from(command);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().with_context(|| name.clone())?;
    let mut standard_input = child.stdin.take().context("no standard input")?;
    let pid = child.id().context("it has ended")?.to_string();
    let ended = async {
        standard_input.write_all(input).await?;
        drop(standard_input);
        child.wait_with_output().await
    };
    let mut ended = pin!(ended);
    if let Ok(output) = timeout(patience, &mut ended).await {
        return Ok(output?);
    }
    Command::new("kill").args(["-INT", &pid]).status().await?;
    let said = timeout(FAREWELL, ended)
        .await
        .map(|output| output.map(|it| String::from_utf8_lossy(&[it.stdout, it.stderr].concat()).into_owned()));
    bail!("{name} does not end; until it was interrupted it said {said:?}")
}

/// Runs the binary of this workspace.
///
/// # Errors
/// As [`finish`].
pub async fn lockstep(arguments: &[&str]) -> anyhow::Result<Output> {
    let mut command = std::process::Command::new(environment::binary()?);
    command.args(arguments);
    finish(command, &[]).await
}

/// Writes a made-up model of some 27 MB a layer into `folder`.
///
/// # Errors
/// If it cannot be written.
pub async fn synthesize(folder: &Path, num_layers: usize) -> anyhow::Result<PathBuf> {
    let model = folder.join("larger.gguf");
    let layers = format!("--num-hidden-layers={num_layers}");
    let shape = ["--hidden-size=2048", "--intermediate-size=5632", "--num-attention-heads=16", "--head-dim=128"];
    let output = model.to_str().context("a path that is no text")?;
    let rest = ["--num-key-value-heads=4", "--vocab-size=4096", &layers, "--output", output];
    let written = lockstep(&[&["synth", "tiny"], &shape[..], &rest].concat()).await?;
    ensure!(written.status.success(), "synth failed: {written:?}");
    Ok(model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_hangs_may_end_what_it_has_started() {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "trap 'kill $!; echo ended all; exit 1' INT; sleep 100 & wait"]);
        let error = finish_within(Duration::from_millis(500), command, &[]).await.unwrap_err().to_string();
        assert!(error.contains("does not end") && error.contains("ended all"), "{error}");
    }
}
