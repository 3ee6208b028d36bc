//! `lockstep status`: the cluster as tables or as JSON.

use std::time::Duration;

use lockstep_coordinator::api::status;
use lockstep_proto::v1::{
    DeviceStatus, EngineStatus, GetClusterResponse, RankStatus, RegistryStatus, ReplicaStatus, WorkerStatus,
};
use lockstep_sharding::format_bytes;

use crate::{client::ServerArgs, output::print, table::Table};

/// Longest reason that stands in the table itself.
const MAX_REASON_CHARS: usize = 32;

/// Show workers, devices, replicas, ranks, KV use and tokens per second.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
  lockstep status
  lockstep status --watch
  lockstep status --json | jq '.models[].replicas[].state'")]
pub struct Args {
    #[command(flatten)]
    server: ServerArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Show it again every second until Ctrl-C
    #[arg(long)]
    watch: bool,
}

/// Prints the state of the cluster.
///
/// # Errors
/// If no coordinator answers.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let mut admin = args.server.admin().await?;
    loop {
        let cluster = args.server.cluster(&mut admin).await?;
        let text = if args.json { format!("{}\n", status::to_json(&cluster)) } else { render(&cluster) };
        if args.watch && !args.json {
            print("\x1b[H\x1b[2J")?;
        }
        print(&text)?;
        if !args.watch {
            return Ok(());
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
            signal = tokio::signal::ctrl_c() => return Ok(signal?),
        }
    }
}

fn render(cluster: &GetClusterResponse) -> String {
    let mut workers = Table::new(&["WORKER", "ADDRESS", "HOST", "STATE", "HEARTBEAT", "DEVICE", "CHOSEN", "MEMORY"]);
    let mut notes = Vec::new();
    let none = DeviceStatus { name: String::from("-"), ..DeviceStatus::default() };
    for worker in &cluster.workers {
        let devices = if worker.devices.is_empty() { std::slice::from_ref(&none) } else { &worker.devices };
        for device in devices {
            workers.row(vec![
                worker.worker_id.clone(),
                worker.address.clone(),
                worker.host.clone(),
                worker_state(worker, num_parts(cluster, &worker.worker_id)),
                format!("{:.0} ms", worker.heartbeat_age_ms),
                device.name.clone(),
                chosen(&device.reason, &mut notes),
                format_bytes(device.memory_bytes),
            ]);
        }
    }
    let mut text = cluster.registry.as_ref().map_or_else(String::new, render_registry) + &workers.render();
    for (index, note) in notes.iter().enumerate() {
        text += &format!("[{}] {note}\n", index + 1);
    }
    text += &render_abilities(&cluster.workers);
    for model in &cluster.models {
        text += &format!("\nmodel {} (plan {}, {})\n", model.name, model.plan_epoch, model.source);
        if !model.problem.is_empty() {
            text += &format!("problem: {}\n", model.problem);
        }
        text += &render_replicas(&model.replicas);
    }
    text
}

/// What devices can do, each kind once: a line for all of the same name.
fn render_abilities(workers: &[WorkerStatus]) -> String {
    let mut known = Vec::new();
    let mut text = String::new();
    for device in workers.iter().flat_map(|worker| &worker.devices) {
        if device.features.is_empty() && device.limits.is_empty() || known.contains(&&device.name) {
            continue;
        }
        known.push(&device.name);
        let limits = device.limits.iter().map(|limit| format!("{} {}", limit.name, limit.value));
        let all: Vec<String> = device.features.iter().cloned().chain(limits).collect();
        text += &format!("{}: {}\n", device.name, all.join(", "));
    }
    text
}

/// Why a device was chosen, or the number of the note below the table that says it.
fn chosen<'a>(reason: &'a str, notes: &mut Vec<&'a str>) -> String {
    if reason.chars().count() <= MAX_REASON_CHARS {
        return reason.to_owned();
    }
    let known = notes.iter().position(|note| *note == reason);
    let index = known.unwrap_or_else(|| {
        notes.push(reason);
        notes.len() - 1
    });
    format!("[{}]", index + 1)
}

fn render_registry(registry: &RegistryStatus) -> String {
    let RegistryStatus { coordinator_id, leader_id, endpoint, problem, away_ms } = registry;
    let leader = match leader_id.as_str() {
        "" => "nobody plans",
        id if id == coordinator_id => "this one plans",
        id => &format!("{id} plans"),
    };
    if problem.is_empty() {
        format!("coordinator {coordinator_id}, {leader}, etcd at {endpoint}\n\n")
    } else {
        let away = away_ms / 1e3;
        format!("coordinator {coordinator_id}\netcd is away for {away:.0} s, nothing is planned: {problem}\n\n")
    }
}

/// Replicas that a worker has a part of.
pub fn num_parts(cluster: &GetClusterResponse, worker_id: &str) -> usize {
    let replicas = cluster.models.iter().flat_map(|model| &model.replicas);
    replicas.filter(|replica| replica.ranks.iter().any(|rank| rank.worker_id == worker_id)).count()
}

/// What a worker does, and while it drains what is left.
fn worker_state(worker: &WorkerStatus, num_parts: usize) -> String {
    let WorkerStatus { draining, num_requests, drain_left_ms, problem, .. } = worker;
    if !problem.is_empty() {
        return format!("unreachable: {problem}");
    }
    match (draining, num_parts, num_requests) {
        (false, ..) => String::from("ready"),
        (true, 0, 0) => String::from("drained: holds nothing"),
        (true, _, 0) => format!("draining: {num_parts} replica parts"),
        (true, ..) => {
            let seconds_left = drain_left_ms / 1e3;
            format!("draining: {num_parts} replica parts, {num_requests} requests, {seconds_left:.0} s left")
        }
    }
}

fn render_replicas(replicas: &[ReplicaStatus]) -> String {
    let mut engines = Table::new(&[
        "REPLICA",
        "STATE",
        "RUNNING",
        "WAITING",
        "KV BLOCKS",
        "CACHED",
        "PREFILL/S",
        "DECODE/S",
        "PREEMPTED",
    ]);
    let mut ranks = Table::new(&[
        "REPLICA", "RANK", "STAGE", "WORKER", "LAYERS", "HEADS", "KV HEADS", "COLUMNS", "WEIGHTS", "KV", "DTYPE",
        "SCRATCH",
    ]);
    let mut problems = String::new();
    for replica in replicas {
        let engine = replica.engine.unwrap_or_default();
        engines.row(engine_cells(replica, &engine));
        replica.ranks.iter().for_each(|rank| ranks.row(rank_cells(replica, rank)));
        if !replica.problem.is_empty() {
            problems += &format!("replica {}: {}\n", replica.replica, replica.problem);
        }
    }
    format!("{}{}{problems}", engines.render(), ranks.render())
}

fn engine_cells(replica: &ReplicaStatus, engine: &EngineStatus) -> Vec<String> {
    let used = engine.num_kv_blocks.saturating_sub(engine.num_free_kv_blocks);
    vec![
        replica.replica.to_string(),
        status::state_name(replica),
        engine.num_running_sequences.to_string(),
        engine.num_waiting_sequences.to_string(),
        // The first heartbeat after the start brings the number.
        if engine.num_kv_blocks == 0 { String::from("-") } else { format!("{used}/{}", engine.num_kv_blocks) },
        hit_rate(engine),
        format!("{:.1}", engine.prefill_tokens_per_second),
        format!("{:.1}", engine.decode_tokens_per_second),
        engine.num_preemptions.to_string(),
    ]
}

/// Part of the tokens of sequences that was already computed when they began.
fn hit_rate(engine: &EngineStatus) -> String {
    match engine.prefix_query_tokens {
        0 => String::from("-"),
        queries => format!("{:.1} %", engine.prefix_hit_tokens as f64 / queries as f64 * 100.0),
    }
}

fn rank_cells(replica: &ReplicaStatus, rank: &RankStatus) -> Vec<String> {
    vec![
        replica.replica.to_string(),
        rank.rank.to_string(),
        rank.pipeline_stage.to_string(),
        format!("{}/{}", rank.worker_id, rank.local_rank),
        format!("{}..{}", rank.first_layer, rank.end_layer),
        rank.num_query_heads.to_string(),
        rank.num_key_value_heads.to_string(),
        rank.intermediate_columns.to_string(),
        format_bytes(rank.weight_bytes),
        format_bytes(rank.kv_bytes),
        format!("{} ({})", rank.dtype, rank.dtype_reason),
        scratch(rank),
    ]
}

/// Most scratch memory of a GPU's operations, and for which part of them it was there already.
fn scratch(rank: &RankStatus) -> String {
    match rank.scratch_requests {
        0 => String::from("-"),
        requests => {
            let reused = rank.scratch_hits as f64 / requests as f64 * 100.0;
            format!("{}, {reused:.1} % reused", format_bytes(rank.scratch_high_water_bytes))
        }
    }
}

#[cfg(test)]
mod tests {
    use lockstep_proto::v1::{DeviceLimit, ModelStatus};

    use super::*;

    #[test]
    fn what_devices_can_do_is_said_once() {
        let limit = DeviceLimit { name: "bytes of a binding".to_owned(), value: 77 };
        let device = DeviceStatus {
            name: "vulkan:0 test".to_owned(),
            features: vec!["subgroups".to_owned()],
            limits: vec![limit],
            ..DeviceStatus::default()
        };
        let worker = WorkerStatus { devices: vec![device; 2], ..WorkerStatus::default() };
        let text = render(&GetClusterResponse { workers: vec![worker; 2], ..GetClusterResponse::default() });
        assert_eq!(text.matches("vulkan:0 test: subgroups, bytes of a binding 77\n").count(), 1, "{text}");
    }

    #[test]
    fn a_worker_that_drains_says_what_it_holds() {
        let rank = RankStatus { worker_id: "w".to_owned(), ..RankStatus::default() };
        let replica = ReplicaStatus { ranks: vec![rank.clone(), rank], ..ReplicaStatus::default() };
        let model = ModelStatus { replicas: vec![replica], ..ModelStatus::default() };
        let worker = WorkerStatus { worker_id: "w".to_owned(), draining: true, ..WorkerStatus::default() };
        let state = |models: &[ModelStatus], num_requests| {
            let worker = WorkerStatus { num_requests, ..worker.clone() };
            let cluster = GetClusterResponse { models: models.to_vec(), ..GetClusterResponse::default() };
            worker_state(&worker, num_parts(&cluster, "w"))
        };
        assert_eq!(state(std::slice::from_ref(&model), 2), "draining: 1 replica parts, 2 requests, 0 s left");
        assert_eq!(state(&[model], 0), "draining: 1 replica parts");
        assert_eq!(state(&[], 0), "drained: holds nothing");
    }

    #[test]
    fn a_long_reason_is_said_once() {
        let long = "no GPU: ".to_owned() + &"libcuda.so.1 was not found; ".repeat(8);
        let worker = |id: &str, reason: &str| WorkerStatus {
            worker_id: id.to_owned(),
            devices: vec![DeviceStatus { reason: reason.to_owned(), ..DeviceStatus::default() }],
            ..WorkerStatus::default()
        };
        let workers = vec![
            worker("a", &long),
            worker("b", "asked for"),
            worker("c", &long),
            worker("d", "no; ".repeat(9).as_str()),
        ];
        let text = render(&GetClusterResponse { workers, ..GetClusterResponse::default() });
        assert_eq!(text.matches(&long).count(), 1, "{text}");
        assert_eq!((text.matches("[1]").count(), text.matches("[2]").count()), (3, 2), "{text}");
        assert!(text.lines().take(5).all(|line| line.len() < 100) && text.contains("asked for"), "{text}");
    }
}
