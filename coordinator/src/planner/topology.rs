//! The cluster as the planner may use it: devices of live workers, less what other models hold.
//! Invariant: the order of the devices depends only on worker ids, so equal clusters give equal plans.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_sharding::{DeviceSpec, LinkSpec, Topology};

use crate::{
    cluster::WorkerRecord,
    served::{Member, Replica},
};

/// Loopback TCP between two processes, measured with a bare exchange of small and of 16 MiB messages.
const INTRA_HOST: LinkSpec = LinkSpec { latency_seconds: 15e-6, bytes_per_second: 3e9 };
/// A 10 Gbit/s network: the least that a cluster is expected to have.
const INTER_HOST: LinkSpec = LinkSpec { latency_seconds: 50e-6, bytes_per_second: 1.25e9 };

/// Devices for a plan of `model`: those of `workers` on which it has no live replica yet.
pub fn topology<'a>(
    model: &str,
    workers: impl Iterator<Item = (&'a String, &'a WorkerRecord)>,
    replicas: &[&Replica],
) -> Topology {
    let held = held_bytes(replicas);
    let taken = taken_devices(model, replicas);
    let mut devices = Vec::new();
    for (worker_id, record) in workers {
        for (local_rank, device) in record.hello.devices.iter().enumerate() {
            let key = (worker_id.clone(), local_rank);
            if taken.contains(&key) {
                continue;
            }
            let held_here = held.get(&key).copied().unwrap_or(0);
            devices.push(DeviceSpec {
                worker_id: worker_id.clone(),
                local_rank,
                host: record.hello.host.clone(),
                name: device.name.clone(),
                memory_bytes: device.memory_bytes.saturating_sub(held_here),
                memory_bytes_per_second: device.memory_bytes_per_second,
                operations_per_second: device.operations_per_second,
            });
        }
    }
    equalize(&mut devices);
    Topology { devices, intra_host: INTRA_HOST, inter_host: INTER_HOST }
}

/// Gives devices of one kind on one host the best rates that any of them measured. Workers of a host measure while the
/// others start, so their differences are noise; a plan that followed it would give one of two equal devices most heads.
fn equalize(devices: &mut [DeviceSpec]) {
    let mut best: BTreeMap<(String, String), (f64, f64)> = BTreeMap::new();
    for device in devices.iter() {
        let rates = best.entry((device.host.clone(), device.name.clone())).or_insert((0.0, 0.0));
        rates.0 = rates.0.max(device.memory_bytes_per_second);
        rates.1 = rates.1.max(device.operations_per_second);
    }
    for device in devices {
        if let Some(rates) = best.get(&(device.host.clone(), device.name.clone())) {
            (device.memory_bytes_per_second, device.operations_per_second) = *rates;
        }
    }
}

fn held_bytes(replicas: &[&Replica]) -> BTreeMap<(String, usize), u64> {
    let mut held = BTreeMap::new();
    for rank in replicas
        .iter()
        .filter(|replica| replica.is_live())
        .flat_map(|replica| &replica.plan.stages)
        .flat_map(|s| &s.ranks)
    {
        *held.entry((rank.worker_id.clone(), rank.local_rank)).or_insert(0) +=
            rank.weight_bytes + rank.kv_bytes + rank.activation_bytes;
    }
    held
}

fn taken_devices(model: &str, replicas: &[&Replica]) -> BTreeSet<(String, usize)> {
    replicas
        .iter()
        .filter(|replica| replica.model == model && replica.is_live())
        .flat_map(|replica| &replica.plan.stages)
        .flat_map(|stage| &stage.ranks)
        .map(|rank| (rank.worker_id.clone(), rank.local_rank))
        .collect()
}

/// The workers of a replica, each once, the leader's first; `None` if one is not registered.
pub fn members(
    plan: &lockstep_sharding::ReplicaPlan,
    workers: &BTreeMap<String, std::sync::Arc<WorkerRecord>>,
) -> Option<Vec<Member>> {
    let mut members: Vec<Member> = Vec::new();
    let mut ranks: Vec<_> = plan.stages.iter().flat_map(|stage| &stage.ranks).collect();
    ranks.sort_by_key(|rank| rank.rank);
    for rank in ranks {
        let session = workers.get(&rank.worker_id)?.session;
        if members.iter().all(|member| member.worker_id != rank.worker_id) {
            members.push(Member { worker_id: rank.worker_id.clone(), session });
        }
    }
    (!members.is_empty()).then_some(members)
}

/// `rank_address` of every rank of a replica, by rank; `None` if a worker is not registered.
pub fn rank_addresses(
    plan: &lockstep_sharding::ReplicaPlan,
    workers: &BTreeMap<String, std::sync::Arc<WorkerRecord>>,
) -> Option<Vec<String>> {
    let mut ranks: Vec<_> = plan.stages.iter().flat_map(|stage| &stage.ranks).collect();
    ranks.sort_by_key(|rank| rank.rank);
    ranks.iter().map(|rank| workers.get(&rank.worker_id).map(|record| record.hello.rank_address.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_devices_of_a_host_get_equal_rates() {
        let device = |host: &str, name: &str, rate: f64| DeviceSpec {
            worker_id: String::from("w"),
            local_rank: 0,
            host: String::from(host),
            name: String::from(name),
            memory_bytes: 1,
            memory_bytes_per_second: rate,
            operations_per_second: rate * 2.0,
        };
        let mut devices =
            [device("a", "cpu", 1.0), device("a", "cpu", 9.0), device("a", "gpu", 50.0), device("b", "cpu", 3.0)];
        equalize(&mut devices);
        let rates: Vec<_> =
            devices.iter().map(|device| (device.memory_bytes_per_second, device.operations_per_second)).collect();
        assert_eq!(rates, [(9.0, 18.0), (9.0, 18.0), (50.0, 100.0), (3.0, 6.0)]);
    }
}
