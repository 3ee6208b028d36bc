//! The state of the cluster as operators see it: for `Admin.GetCluster`, `lockstep status` and the status page.

use lockstep_model::source::shown;
use lockstep_proto::v1;
use lockstep_sharding::RankPlan;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    cluster::{PlanStore, WorkerRecord, Workers, store},
    served::{ModelTable, Replica, ReplicaState, ServedModel},
};

/// Live workers and desired models, and the store if there may be other coordinators.
pub fn cluster(live: &Workers, models: &ModelTable, store: Option<&dyn PlanStore>) -> v1::GetClusterResponse {
    let workers = live.values().map(|record| v1::WorkerStatus {
        worker_id: record.hello.worker_id.clone(),
        address: record.hello.address.clone(),
        host: record.hello.host.clone(),
        devices: record.hello.devices.iter().map(device_status).collect(),
        draining: record.draining,
        heartbeat_age_ms: record.last_heartbeat.elapsed().as_secs_f64() * 1e3,
        drain_left_ms: record
            .drain_deadline()
            .map_or(0.0, |deadline| deadline.saturating_duration_since(Instant::now()).as_secs_f64() * 1e3),
        num_requests: num_requests(record, models),
        problem: String::new(),
    });
    let unreachable = store.map(PlanStore::unreachable).unwrap_or_default();
    let unreachable = unreachable.iter().filter(|(hello, _)| !live.contains_key(&hello.worker_id));
    let workers = workers.chain(unreachable.map(|(hello, problem)| v1::WorkerStatus {
        worker_id: hello.worker_id.clone(),
        address: hello.address.clone(),
        host: hello.host.clone(),
        devices: hello.devices.iter().map(device_status).collect(),
        problem: problem.clone(),
        ..Default::default()
    }));
    let models = models.values().map(|model| model_status(model, live));
    v1::GetClusterResponse { workers: workers.collect(), models: models.collect(), registry: store.map(store::status) }
}

/// Requests that run on replicas with a part on a worker.
fn num_requests(record: &WorkerRecord, models: &ModelTable) -> u64 {
    let replicas = models.values().flat_map(|model| &model.replicas);
    let on_it = replicas.filter(|replica| replica.uses(&record.hello.worker_id, record.session));
    on_it.map(|replica| replica.num_requests()).sum()
}

fn device_status(device: &v1::WorkerDevice) -> v1::DeviceStatus {
    let v1::WorkerDevice { name, reason, memory_bytes, features, limits, .. } = device.clone();
    v1::DeviceStatus { name, reason, memory_bytes, features, limits }
}

fn model_status(model: &ServedModel, live: &Workers) -> v1::ModelStatus {
    v1::ModelStatus {
        name: model.spec.name.clone(),
        source: shown(&model.spec.source),
        plan_epoch: model.plan_epoch,
        replicas: model.replicas.iter().map(|replica| replica_status(replica, live)).collect(),
        problem: model.problem.as_ref().map_or_else(String::new, |problem| problem.detail.clone()),
    }
}

fn replica_status(replica: &Replica, live: &Workers) -> v1::ReplicaStatus {
    let (state, problem) = match replica.state() {
        ReplicaState::Loading => (v1::ReplicaState::Loading, String::new()),
        ReplicaState::Ready if replica.is_stalled() => {
            let stall = replica.report(live).map_or_else(String::new, |report| report.stall.clone());
            (v1::ReplicaState::Stalled, stall)
        }
        ReplicaState::Ready => (v1::ReplicaState::Ready, String::new()),
        ReplicaState::Draining => (v1::ReplicaState::Draining, String::new()),
        ReplicaState::Broken(breakage) => (v1::ReplicaState::Broken, breakage.detail),
    };
    let ranks = replica.plan.stages.iter().enumerate().flat_map(|(stage_index, stage)| {
        stage.ranks.iter().map(move |rank| {
            let scratch = rank_report(replica, rank, live).unwrap_or_default();
            v1::RankStatus {
                rank: rank.rank as u32,
                worker_id: rank.worker_id.clone(),
                local_rank: rank.local_rank as u32,
                pipeline_stage: stage_index as u32,
                first_layer: stage.layers.start as u32,
                end_layer: stage.layers.end as u32,
                num_query_heads: rank.query_heads.len() as u32,
                num_key_value_heads: rank.key_value_heads.len() as u32,
                intermediate_columns: rank.intermediate.len() as u32,
                weight_bytes: rank.weight_bytes,
                kv_bytes: rank.kv_bytes,
                dtype: rank.dtype.to_string(),
                dtype_reason: rank.dtype_reason.clone(),
                scratch_high_water_bytes: scratch.scratch_high_water_bytes,
                scratch_requests: scratch.scratch_requests,
                scratch_hits: scratch.scratch_hits,
            }
        })
    });
    v1::ReplicaStatus {
        replica: replica.index as u32,
        state: state.into(),
        ranks: ranks.collect(),
        engine: replica.engine(live),
        problem,
    }
}

/// What a rank's worker last reported of it.
fn rank_report(replica: &Replica, rank: &RankPlan, live: &Workers) -> Option<v1::RankReport> {
    let member = replica.members.iter().find(|member| member.worker_id == rank.worker_id)?;
    replica.report_of(member, live)?.ranks.iter().find(|report| report.rank as usize == rank.rank).copied()
}

/// The same as JSON, with the names of the wire contract.
pub fn to_json(cluster: &v1::GetClusterResponse) -> Value {
    let workers = cluster.workers.iter().map(|worker| {
        let devices = worker.devices.iter().map(|device| {
            let limits: serde_json::Map<_, _> =
                device.limits.iter().map(|limit| (limit.name.clone(), limit.value.into())).collect();
            json!({
                "name": device.name, "memory_bytes": device.memory_bytes, "reason": device.reason,
                "features": device.features, "limits": limits,
            })
        });
        json!({
            "worker_id": worker.worker_id, "address": worker.address, "host": worker.host,
            "devices": devices.collect::<Vec<_>>(), "draining": worker.draining,
            "heartbeat_age_ms": worker.heartbeat_age_ms, "drain_left_ms": worker.drain_left_ms,
            "num_requests": worker.num_requests, "problem": worker.problem,
        })
    });
    let models = cluster.models.iter().map(|model| {
        json!({
            "name": model.name, "source": model.source, "plan_epoch": model.plan_epoch, "problem": model.problem,
            "replicas": model.replicas.iter().map(replica_json).collect::<Vec<_>>(),
        })
    });
    let registry = cluster.registry.as_ref().map(|registry| {
        json!({
            "coordinator_id": registry.coordinator_id, "leader_id": registry.leader_id, "endpoint": registry.endpoint,
            "problem": registry.problem, "away_ms": registry.away_ms,
        })
    });
    json!({"workers": workers.collect::<Vec<_>>(), "models": models.collect::<Vec<_>>(), "registry": registry})
}

fn replica_json(replica: &v1::ReplicaStatus) -> Value {
    let ranks = replica.ranks.iter().map(|rank| {
        json!({
            "rank": rank.rank, "worker_id": rank.worker_id, "local_rank": rank.local_rank,
            "pipeline_stage": rank.pipeline_stage, "first_layer": rank.first_layer, "end_layer": rank.end_layer,
            "num_query_heads": rank.num_query_heads, "num_key_value_heads": rank.num_key_value_heads,
            "intermediate_columns": rank.intermediate_columns, "weight_bytes": rank.weight_bytes,
            "kv_bytes": rank.kv_bytes, "dtype": rank.dtype, "dtype_reason": rank.dtype_reason,
            "scratch_high_water_bytes": rank.scratch_high_water_bytes, "scratch_requests": rank.scratch_requests,
            "scratch_hits": rank.scratch_hits,
        })
    });
    let engine = replica.engine.map(|engine| {
        json!({
            "num_running_sequences": engine.num_running_sequences,
            "num_waiting_sequences": engine.num_waiting_sequences,
            "num_kv_blocks": engine.num_kv_blocks, "num_free_kv_blocks": engine.num_free_kv_blocks,
            "prefill_tokens_per_second": engine.prefill_tokens_per_second,
            "decode_tokens_per_second": engine.decode_tokens_per_second,
            "num_preemptions": engine.num_preemptions,
            "prefix_query_tokens": engine.prefix_query_tokens, "prefix_hit_tokens": engine.prefix_hit_tokens,
            "last_step_age_ms": engine.last_step_age_ms,
        })
    });
    json!({
        "replica": replica.replica, "state": state_name(replica), "problem": replica.problem,
        "ranks": ranks.collect::<Vec<_>>(), "engine": engine,
    })
}

/// A replica's state in one word.
pub fn state_name(replica: &v1::ReplicaStatus) -> String {
    replica.state().as_str_name().trim_start_matches("REPLICA_STATE_").to_lowercase()
}
