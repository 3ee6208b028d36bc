//! `lockstep plan`: how a model would be cut over devices, which need not exist.

use std::path::PathBuf;

use anyhow::Context;
use lockstep_model::Checkpoint;
use lockstep_sharding::{ModelShape, PlanError, PlanOptions, Policy, Topology};

use super::synth::preset_shape;
use crate::{
    UsageError,
    output::{print, print_line},
};

/// Explain how a model would be cut: layers, heads, columns, bytes and estimated time of every rank.
#[derive(Debug, clap::Args)]
#[command(
    group(clap::ArgGroup::new("what").required(true).args(["model", "shape"])),
    group(clap::ArgGroup::new("where").required(true).args(["devices", "topology"])),
    after_help = after_help()
)]
pub struct Args {
    /// Model file or folder
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// A made-up model instead of a file (the shapes of `synth`)
    #[arg(long, value_name = "NAME")]
    shape: Option<String>,
    /// Element type of the made-up model
    #[arg(long, value_name = "TYPE", requires = "shape", default_value = "q4_k_m")]
    quantization: String,
    /// Devices, as COUNT*KIND@HOST: `2*cpu` or `8*h200@a,8*h200@b`
    #[arg(long, value_name = "DEVICES")]
    devices: Option<String>,
    /// TOML file that describes the cluster: hosts, devices, links
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,
    /// auto, tensor=N, pipeline=N or hybrid=TPxPP, each optionally with ,replicas=N; or replicas=N
    #[arg(long, default_value = "auto")]
    policy: String,
    /// Longest sequence [default: the model's]
    #[arg(long, value_name = "N")]
    max_sequence_tokens: Option<usize>,
    /// Most sequences in one step
    #[arg(long, value_name = "N", default_value_t = PlanOptions::default().max_num_sequences)]
    max_num_sequences: usize,
    /// Most tokens in one step [default: 2048 on GPUs alone, 512 where a processor takes part, fewer where they would keep the
    /// slowest device for more than two seconds]
    #[arg(long, value_name = "N")]
    max_step_tokens: Option<usize>,
    /// Tokens in a KV block
    #[arg(long, value_name = "N", default_value_t = PlanOptions::default().block_size)]
    block_size: usize,
    /// KV blocks of a replica [default: what memory has room for and the sequences can fill]
    #[arg(long, value_name = "N")]
    num_kv_blocks: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn after_help() -> String {
    let kinds = Topology::kinds().collect::<Vec<_>>().join(", ");
    format!(
        "\
A file over three processors on one host:
  lockstep plan --model model.gguf --devices '3*cpu'
A 70B model over two hosts of eight H200, four ways of tensor parallelism in two stages:
  lockstep plan --shape llama-70b --devices '8*h200@a,8*h200@b' --policy hybrid=4x2
Two replicas of two ranks each:
  lockstep plan --model model.gguf --devices '4*cpu' --policy tensor=2,replicas=2
A cluster described in a file, as JSON:
  lockstep plan --model model.gguf --topology cluster.toml --json

Kinds of devices: {kinds}.
A topology file holds, for two hosts:
  [[hosts]]
  name = \"a\"
  devices = [{{ kind = \"h200\", count = 8 }}]
  [[hosts]]
  name = \"b\"
  devices = [{{ kind = \"h200\", count = 8 }}]
  [inter_host]    # links are optional
  latency_seconds = 20e-6
  bytes_per_second = 25e9
docs/topology.md describes all of it."
    )
}

/// Plans and explains.
///
/// # Errors
/// If the model, the cluster or the policy is not understood, or no plan fits.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let policy = parse_policy(&args.policy)?;
    let topology = args.read_topology()?;
    let options = PlanOptions {
        max_sequence_tokens: args.max_sequence_tokens,
        max_num_sequences: args.max_num_sequences,
        max_step_tokens: args.max_step_tokens,
        block_size: args.block_size,
        num_kv_blocks: args.num_kv_blocks,
    };
    let plan = lockstep_sharding::plan(&args.read_shape()?, &topology, &policy, &options)?;
    let explanation = lockstep_sharding::Explanation::new(&plan, &topology);
    if args.json {
        print_line(&explanation.to_json()?.to_string())?;
    } else {
        print(&explanation.to_string())?;
    }
    Ok(())
}

/// A policy text as flags and settings files hold it.
///
/// # Errors
/// The forms that are understood.
pub fn parse_policy(text: &str) -> Result<Policy, UsageError> {
    text.parse().map_err(|error: PlanError| UsageError(error.to_string()))
}

impl Args {
    fn read_topology(&self) -> anyhow::Result<Topology> {
        match (&self.topology, &self.devices) {
            (Some(path), _) => {
                let text = std::fs::read_to_string(path).with_context(|| format!("topology {}", path.display()))?;
                Topology::from_toml(&text).with_context(|| format!("topology {}", path.display()))
            }
            (None, devices) => {
                let devices = devices.as_deref().unwrap_or_default();
                Topology::parse_devices(devices).map_err(|error| UsageError(format!("--devices: {error}")).into())
            }
        }
    }

    fn read_shape(&self) -> anyhow::Result<ModelShape> {
        match (&self.model, &self.shape) {
            (Some(path), _) => Ok(Checkpoint::open(path)?.shape().clone()),
            (None, shape) => preset_shape(shape.as_deref().unwrap_or_default(), &self.quantization),
        }
    }
}
