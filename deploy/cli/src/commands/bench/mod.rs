//! `lockstep bench`: prefill and decode rates, against a running cluster or in process.
//! Both targets are measured by the same code: the times at which the tokens of a request arrive.

mod cluster;
mod in_process;
mod measure;

use std::time::Instant;

use lockstep_sharding::format_bytes;
use serde_json::json;

use self::{
    cluster::ClusterTarget,
    in_process::InProcessTarget,
    measure::{Startup, Target},
};
use crate::{
    client::ServerArgs,
    devices::DeviceArgs,
    output::{print, print_line},
    table::Table,
};

/// Measure prefill and decode tokens per second: medians of repetitions after a warm-up.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Against a running cluster:
  lockstep bench
One process, no network, two threads:
  lockstep bench --model model.gguf --threads 2
Two tensor-parallel ranks of one thread each in one process, 16 sequences at once, as JSON:
  lockstep bench --model model.gguf --threads 1 --tensor-parallel 2 --concurrent 1,16 --json")]
pub struct Args {
    #[command(flatten)]
    server: ServerArgs,
    /// Model file: run it in this process, on the devices below, instead of asking a server
    #[arg(long, value_name = "PATH")]
    model: Option<std::path::PathBuf>,
    #[command(flatten)]
    devices: DeviceArgs,
    /// Threads of each rank on the processor, in process [default: all cores divided by the ranks]
    #[arg(long, value_name = "N", requires = "model", default_value_t = 0, hide_default_value = true)]
    threads: usize,
    /// Ranks that share each layer, in process
    #[arg(long, value_name = "N", requires = "model", default_value_t = 1)]
    tensor_parallel: usize,
    /// Stages of layers, in process
    #[arg(long, value_name = "N", requires = "model", default_value_t = 1)]
    pipeline_parallel: usize,
    /// Most tokens in one step, in process [default: 2048 on GPUs, 512 on the processor, fewer on slow ones]
    #[arg(long, value_name = "N", requires = "model")]
    max_step_tokens: Option<usize>,
    /// Share the KV blocks of equal beginnings, in process: on or off
    #[arg(long, value_name = "ON|OFF", requires = "model", default_value = "on")]
    prefix_caching: String,
    /// Name of the model on the server; may be left out if one is served
    #[arg(long, default_value = "", hide_default_value = true, value_name = "NAME")]
    model_name: String,
    /// Prompt lengths to measure prefill with
    #[arg(long, value_name = "TOKENS,…", value_delimiter = ',', default_values_t = [512])]
    prefill: Vec<usize>,
    /// Tokens with which all prompts of the prefill measurements begin, and which are computed before
    #[arg(long, value_name = "TOKENS", default_value_t = 0, hide_default_value = true)]
    shared_prefix: usize,
    /// Tokens to generate when decode is measured
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    decode: usize,
    /// Prompt lengths after which decode is measured
    #[arg(long, value_name = "TOKENS,…", value_delimiter = ',', default_values_t = [16])]
    depth: Vec<usize>,
    /// Numbers of sequences that decode at once
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1])]
    concurrent: Vec<usize>,
    /// Measurements of each; their median is reported
    #[arg(long, value_name = "N", default_value_t = 5)]
    repetitions: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Measures and prints.
///
/// # Errors
/// If a number is 0 or a request fails.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let zero = [
        args.decode < 2,
        args.max_step_tokens == Some(0),
        args.repetitions == 0,
        args.prefill.contains(&0),
        args.concurrent.contains(&0),
        args.depth.contains(&0),
    ];
    if zero.contains(&true) {
        let problem = "--decode needs at least 2; --max-step-tokens, --repetitions, --prefill, --depth and --concurrent at least 1";
        return Err(crate::UsageError(String::from(problem)).into());
    }
    let start = Instant::now();
    let (target, startup) = match &args.model {
        Some(model) => {
            let target = InProcessTarget::load(model, &args)?;
            let startup = Startup::measure(&target, start, start.elapsed()).await?;
            (Target::InProcess(target), Some(startup))
        }
        None => (Target::Cluster(ClusterTarget::connect(&args.server, &args.model_name).await?), None),
    };
    let results = measure::measure(&target, &args).await?;
    if args.json {
        let tests: Vec<_> = results
            .iter()
            .map(|result| {
                json!({
                    "test": result.name, "tokens_per_second": result.median,
                    "min": result.least, "max": result.most, "repetitions": args.repetitions,
                })
            })
            .collect();
        let startup = startup.map(|startup| {
            json!({
                "bytes": startup.num_bytes, "load_seconds": startup.load.as_secs_f64(),
                "first_token_seconds": startup.first_token.as_secs_f64(),
            })
        });
        let report = json!({"target": target.describe(), "startup": startup, "tests": tests});
        return print_line(&report.to_string());
    }
    let startup = startup.map_or_else(String::new, |startup| {
        format!(
            "{} loaded in {:.2} s, first token after {:.2} s\n",
            format_bytes(startup.num_bytes),
            startup.load.as_secs_f64(),
            startup.first_token.as_secs_f64()
        )
    });
    let mut table = Table::new(&["TEST", "TOKENS/S", "MIN", "MAX"]);
    for result in &results {
        let number = |value: f64| format!("{value:.1}");
        table.row(vec![result.name.clone(), number(result.median), number(result.least), number(result.most)]);
    }
    print(&format!("{}, median of {}\n{startup}{}", target.describe(), args.repetitions, table.render()))
}
