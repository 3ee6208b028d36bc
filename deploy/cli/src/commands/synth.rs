//! `lockstep synth`: a random but valid checkpoint.

use std::path::PathBuf;

use lockstep_model::{
    ModelError,
    synth::{Quantization, SynthSpec},
};
use lockstep_sharding::ModelShape;

use crate::{UsageError, progress, units::format_bytes};

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
    /// Element type of the matrices: q4_k_m or a GGML type
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
    #[arg(long, value_name = "N")]
    hidden_size: Option<usize>,
    #[arg(long, value_name = "N")]
    intermediate_size: Option<usize>,
    #[arg(long, value_name = "N")]
    num_hidden_layers: Option<usize>,
    #[arg(long, value_name = "N")]
    num_attention_heads: Option<usize>,
    #[arg(long, value_name = "N")]
    num_key_value_heads: Option<usize>,
    #[arg(long, value_name = "N")]
    head_dim: Option<usize>,
    #[arg(long, value_name = "N")]
    vocab_size: Option<usize>,
    #[arg(long, value_name = "N")]
    max_position_embeddings: Option<usize>,
}

/// Writes the file.
///
/// # Errors
/// If the shape is unknown or impossible, or the file exists or cannot be written.
pub fn run(args: &Args) -> anyhow::Result<()> {
    if args.output.exists() && !args.force {
        return Err(UsageError(format!("{} exists; --force overwrites it", args.output.display())).into());
    }
    let mut spec = preset(&args.shape, &args.quantization)?;
    spec.seed = args.seed;
    args.dimensions.apply(&mut spec);
    let bar = progress::bytes_bar("writing");
    lockstep_model::synth::synth(&spec, &args.output, |written, total| {
        bar.set_length(total);
        bar.set_position(written);
    })?;
    bar.finish_and_clear();
    println!("{}: {}", args.output.display(), format_bytes(std::fs::metadata(&args.output)?.len()));
    Ok(())
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
