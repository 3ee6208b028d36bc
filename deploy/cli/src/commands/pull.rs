//! `lockstep pull`: a checkpoint from Hugging Face, a URL or a cloud to a local file.

use std::path::PathBuf;

use lockstep_model::source::{FetchOptions, Progress, fetch};
use lockstep_sharding::format_bytes;

use crate::{Interrupted, output::print_line, progress, signals};

/// Fetch a model file with resume and SHA-256 check; interrupted runs go on where they stopped.
#[derive(clap::Args)]
#[command(after_help = "\
From Hugging Face, into this folder:
  lockstep pull hf://bartowski/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct-Q4_K_M.gguf
From a URL, under another name, checked:
  lockstep pull https://example.org/m.gguf --output /models/m.gguf --sha256 9f86d081884c7d65…
From S3 (AWS_…), Google Cloud Storage (GOOGLE_…) or Azure (AZURE_…), as the environment says, on a volume that others share:
  lockstep pull s3://bucket/m.gguf --output /models --wait")]
pub struct Args {
    /// hf://org/repo/file[@revision], an http(s) URL, s3://bucket/key, gs://bucket/object or az://container/blob
    #[arg(value_name = "SOURCE")]
    source: String,
    /// File to write to, or a folder: one that exists, or any path that ends in /. What is missing on the way is made
    #[arg(long, short, value_name = "PATH", default_value = ".")]
    output: PathBuf,
    /// SHA-256 that the file must have, in hexadecimal [default: what Hugging Face declares]
    #[arg(long, value_name = "HEX")]
    sha256: Option<String>,
    /// Wait for another process that is fetching the same file, rather than fail
    #[arg(long)]
    wait: bool,
    /// Where hf:// leads
    #[arg(long, env = "HF_ENDPOINT", value_name = "URL")]
    hf_endpoint: Option<String>,
    /// Token for gated repositories
    #[arg(long, env = "HF_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    hf_token: Option<String>,
}

/// Fetches the file.
///
/// # Errors
/// If the source is not understood or cannot be fetched whole, or the run is interrupted.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let defaults = FetchOptions::default();
    let options = FetchOptions {
        hf_endpoint: args.hf_endpoint.unwrap_or_else(|| defaults.hf_endpoint.clone()),
        hf_token: args.hf_token,
        sha256: args.sha256,
        waits_for_others: args.wait,
        ..defaults
    };
    let bar = progress::bytes_bar("fetching");
    let mut show = |progress: Progress| {
        bar.set_length(progress.total_bytes.unwrap_or(progress.bytes));
        bar.set_position(progress.bytes);
    };
    let shutdown = signals::shutdown_token(false)?;
    let fetched = tokio::select! {
        fetched = fetch(&args.source, &args.output, &options, &mut show) => fetched?,
        () = shutdown.cancelled() => {
            return Err(Interrupted("interrupted; the same command goes on where this one stopped").into());
        }
    };
    bar.finish_and_clear();
    let note = if fetched.was_present { " (was there already)" } else { "" };
    print_line(&format!("{}: {}{note}", fetched.path.display(), format_bytes(fetched.num_bytes)))?;
    fetched.sha256.map_or(Ok(()), |sha256| print_line(&format!("sha256 {sha256}")))
}
