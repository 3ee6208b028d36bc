//! `lockstep synth`: a random but valid checkpoint.

use std::path::PathBuf;

use lockstep_model::{
    ModelError,
    synth::{Quantization, SynthSpec},
};
use lockstep_sharding::{ModelShape, format_bytes};

use crate::{Interrupted, UsageError, output::print_line, progress};

/// Write a random but valid GGUF file of any shape and quantized type, for benchmarks and tests.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A file with the shape of Llama 3.1 8B in Q4_K_M:
  lockstep synth llama-8b --output llama-8b.gguf
A small one of a shape of its own:
  lockstep synth tiny --output odd.gguf --quantization q8_0 --num-attention-heads 6 --num-key-value-heads 3")]
pub struct Args {
    /// Shape to start from: tiny, smollm2-135m, llama-1b, llama-8b, llama-70b
    #[arg(value_name = "SHAPE")]
    shape: String,
    /// File to write
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Overwrite an existing file
    #[arg(long)]
    force: bool,
    /// Element type of the matrices: q4_k_m (a mix of Q4_K and Q6_K) or a GGML type: f32, f16, bf16, q4_0, q4_1, q5_0,
    /// q5_1, q8_0, q8_1, q2_k, q3_k, q4_k, q5_k, q6_k, q8_k. Rows that are no multiple of its block become F16
    #[arg(long, value_name = "TYPE", default_value = "q4_k_m")]
    quantization: String,
    /// Every seed gives other weights
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    dimensions: Dimensions,
}

/// Changes to the shape.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Changes to the shape")]
struct Dimensions {
    /// Width of the residual stream
    #[arg(long, value_name = "N")]
    hidden_size: Option<usize>,
    /// Columns of the feed-forward layers
    #[arg(long, value_name = "N")]
    intermediate_size: Option<usize>,
    /// Layers
    #[arg(long, value_name = "N")]
    num_hidden_layers: Option<usize>,
    /// Query heads of a layer
    #[arg(long, value_name = "N")]
    num_attention_heads: Option<usize>,
    /// Key/value heads of a layer; they divide the query heads
    #[arg(long, value_name = "N")]
    num_key_value_heads: Option<usize>,
    /// Elements of a head
    #[arg(long, value_name = "N")]
    head_dim: Option<usize>,
    /// Tokens of the vocabulary
    #[arg(long, value_name = "N")]
    vocab_size: Option<usize>,
    /// Longest sequence
    #[arg(long, value_name = "N")]
    max_position_embeddings: Option<usize>,
}

/// Writes the file.
///
/// # Errors
/// If the shape is unknown or impossible, or the file exists or cannot be written.
pub async fn run(args: Args) -> anyhow::Result<()> {
    if args.output.exists() && !args.force {
        return Err(UsageError(format!("{} exists; --force overwrites it", args.output.display())).into());
    }
    let mut spec = preset(&args.shape, &args.quantization)?;
    spec.seed = args.seed;
    args.dimensions.apply(&mut spec);
    let output = args.output.clone();
    let writing = tokio::task::spawn_blocking(move || {
        let bar = progress::bytes_bar("writing");
        lockstep_model::synth::synth(&spec, &output, |written, total| {
            bar.set_length(total);
            bar.set_position(written);
        })?;
        bar.finish_and_clear();
        anyhow::Ok(())
    });
    tokio::select! {
        written = writing => written??,
        signal = tokio::signal::ctrl_c() => {
            signal?;
            // The thread that writes ends with the process; what it wrote so far is of no use.
            let _ = std::fs::remove_file(lockstep_model::synth::partial_path(&args.output));
            return Err(Interrupted("interrupted; what was written is removed").into());
        }
    }
    print_line(&format!("{}: {}", args.output.display(), format_bytes(std::fs::metadata(&args.output)?.len())))
}

/// The shape of a preset, without writing anything.
///
/// # Errors
/// If the name or the type is unknown.
pub fn preset_shape(name: &str, quantization: &str) -> anyhow::Result<ModelShape> {
    preset(name, quantization)?.shape().map_err(|error: ModelError| error.into())
}

fn preset(name: &str, quantization: &str) -> Result<SynthSpec, UsageError> {
    let quantization: Quantization =
        quantization.parse().map_err(|error| UsageError(format!("quantization {quantization:?}: {error}")))?;
    SynthSpec::preset(name, quantization)
        .ok_or_else(|| UsageError(format!("shape {name:?} is none of {}", SynthSpec::PRESETS.join(", "))))
}

impl Dimensions {
    fn apply(&self, spec: &mut SynthSpec) {
        let changes = [
            (self.hidden_size, &mut spec.hidden_size),
            (self.intermediate_size, &mut spec.intermediate_size),
            (self.num_hidden_layers, &mut spec.num_hidden_layers),
            (self.num_attention_heads, &mut spec.num_attention_heads),
            (self.num_key_value_heads, &mut spec.num_key_value_heads),
            (self.head_dim, &mut spec.head_dim),
            (self.vocab_size, &mut spec.vocab_size),
            (self.max_position_embeddings, &mut spec.max_position_embeddings),
        ];
        for (change, field) in changes {
            if let Some(value) = change {
                *field = value;
            }
        }
    }
}
