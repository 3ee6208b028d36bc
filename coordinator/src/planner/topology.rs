//! The cluster as the planner may use it: devices of live workers, less what other models hold.
//! Invariants: the order of the devices depends only on worker ids, so equal clusters give equal plans; what devices are
//! promised of their host's memory, by this plan and by what replicas hold there, is never more than the host has.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_proto::v1;
use lockstep_sharding::{DeviceSpec, LinkSpec, Topology};

use crate::{
    cluster::{WorkerRecord, Workers},
    served::{Member, Replica},
};

/// Devices for a plan of `model`: those of usable workers on which it has no live replica yet. Others count for what
/// they hold of their host's memory.
pub fn topology(
    model: &str,
    workers: &Workers,
    is_usable: impl Fn(&String) -> bool,
    replicas: &[&Replica],
) -> Topology {
    let held = held_bytes(replicas);
    let mut taken = taken_devices(model, replicas);
    for (worker_id, record) in workers.iter().filter(|(worker_id, _)| !is_usable(worker_id)) {
        taken.extend((0..record.hello.devices.len()).map(|local_rank| (worker_id.clone(), local_rank)));
    }
    let mut hosts: BTreeMap<&str, HostMemory> = BTreeMap::new();
    for (worker_id, record) in workers.iter() {
        for (local_rank, device) in record.hello.devices.iter().enumerate() {
            let key = (worker_id.clone(), local_rank);
            let held_here = held.get(&key).copied().unwrap_or(0);
            hosts.entry(&record.hello.host).or_default().add(device, held_here, taken.contains(&key));
        }
    }
    let mut devices = Vec::new();
    for (worker_id, record) in workers.iter() {
        for (local_rank, device) in record.hello.devices.iter().enumerate() {
            let key = (worker_id.clone(), local_rank);
            if taken.contains(&key) {
                continue;
            }
            let own = device.memory_bytes.saturating_sub(held.get(&key).copied().unwrap_or(0));
            let host = hosts.get(record.hello.host.as_str()).filter(|_| device.host_memory_bytes > 0);
            devices.push(DeviceSpec {
                worker_id: worker_id.clone(),
                local_rank,
                host: record.hello.host.clone(),
                name: device.name.clone(),
                memory_bytes: host.map_or(own, |host| host.share(own)),
                memory_bytes_per_second: device.memory_bytes_per_second,
                operations_per_second: device.operations_per_second,
                // Registration refuses names that it does not know.
                dtype: device.dtype.parse().ok(),
                // A kind of link that is not known here is not counted on.
                peer_link: device.peer_link.parse().ok(),
            });
        }
    }
    equalize(&mut devices);
    // Ranks meet over TCP where their devices do not by themselves.
    Topology { devices, intra_host: Some(LinkSpec::TCP_LOOPBACK), inter_host: Some(LinkSpec::TCP_ETHERNET) }
}

/// Memory that several devices of a host claim; each of its workers may have measured all of it as its own.
#[derive(Debug, Default)]
struct HostMemory {
    bytes: u64,
    /// By live replicas.
    held_bytes: u64,
    /// By the devices of this plan, beyond what they hold.
    claimed_bytes: u64,
}

impl HostMemory {
    fn add(&mut self, device: &v1::WorkerDevice, held_bytes: u64, is_taken: bool) {
        if device.host_memory_bytes == 0 {
            return;
        }
        // A worker that started when others had loaded saw less.
        self.bytes = self.bytes.max(device.host_memory_bytes);
        self.held_bytes = self.held_bytes.saturating_add(held_bytes);
        let claimed_bytes = if is_taken { 0 } else { device.memory_bytes.saturating_sub(held_bytes) };
        self.claimed_bytes = self.claimed_bytes.saturating_add(claimed_bytes);
    }

    /// What a device that claims so much may have: all of it, or in proportion if the claims exceed what is free.
    fn share(&self, claimed_bytes: u64) -> u64 {
        let free_bytes = self.bytes.saturating_sub(self.held_bytes);
        if self.claimed_bytes <= free_bytes {
            return claimed_bytes;
        }
        let share = u128::from(claimed_bytes) * u128::from(free_bytes) / u128::from(self.claimed_bytes);
        u64::try_from(share).unwrap_or(free_bytes)
    }
}

/// The same without the devices of some workers.
pub fn without(topology: &Topology, worker_ids: &BTreeSet<String>) -> Topology {
    let devices = topology.devices.iter().filter(|device| !worker_ids.contains(&device.worker_id)).cloned().collect();
    Topology { devices, ..topology.clone() }
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
    use lockstep_sharding::PeerLink;

    use super::*;
    use crate::cluster::{MemoryRegistry, Registry};

    #[test]
    fn workers_of_a_host_share_its_memory() {
        let registry = MemoryRegistry::default();
        let enter = |worker_id: &str, host: &str, memory_bytes: u64, host_memory_bytes: u64| {
            let device = v1::WorkerDevice { memory_bytes, host_memory_bytes, ..Default::default() };
            let (worker_id, host) = (String::from(worker_id), String::from(host));
            registry.register(v1::WorkerHello { worker_id, host, devices: vec![device], ..Default::default() }).unwrap()
        };
        let _leases = [
            enter("w0", "a", 900, 900),
            enter("w1", "a", 600, 800),
            enter("w2", "a", 700, 0),
            enter("w3", "b", 900, 900),
            enter("w4", "c", 300, 900),
            enter("w5", "c", 600, 900),
        ];
        let workers = registry.watch().borrow().clone();
        let memory = |is_usable: &dyn Fn(&String) -> bool| -> Vec<u64> {
            topology("m", &workers, is_usable, &[]).devices.iter().map(|device| device.memory_bytes).collect()
        };
        assert_eq!(memory(&|_| true), [540, 360, 700, 900, 300, 600]);
        assert_eq!(memory(&|id| id != "w0" && id != "w3"), [600, 700, 300, 600]);
    }

    #[test]
    fn what_joins_devices_is_planned_with() {
        let registry = MemoryRegistry::default();
        let devices = ["nvlink", "pcie", "", "a link of tomorrow"];
        let devices = devices.map(|link| v1::WorkerDevice { peer_link: link.to_owned(), ..Default::default() });
        let hello = v1::WorkerHello { worker_id: "w".to_owned(), devices: devices.to_vec(), ..Default::default() };
        let _lease = registry.register(hello).unwrap();
        let workers = registry.watch().borrow().clone();
        let links: Vec<_> = topology("m", &workers, |_| true, &[]).devices.iter().map(|it| it.peer_link).collect();
        assert_eq!(links, [Some(PeerLink::Nvlink), Some(PeerLink::Pcie), None, None]);
    }

    #[test]
    fn what_other_models_hold_is_not_promised_again() {
        let device = v1::WorkerDevice { memory_bytes: 900, host_memory_bytes: 900, ..Default::default() };
        let mut host = HostMemory::default();
        // One holds 600 for another model, one holds 100 for this one, one is idle.
        host.add(&device, 600, false);
        host.add(&device, 100, true);
        host.add(&device, 0, false);
        assert_eq!((host.share(300), host.share(900)), (50, 150));
    }

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
            dtype: None,
            peer_link: None,
        };
        let mut devices =
            [device("a", "cpu", 1.0), device("a", "cpu", 9.0), device("a", "gpu", 50.0), device("b", "cpu", 3.0)];
        equalize(&mut devices);
        let rates: Vec<_> =
            devices.iter().map(|device| (device.memory_bytes_per_second, device.operations_per_second)).collect();
        assert_eq!(rates, [(9.0, 18.0), (9.0, 18.0), (50.0, 100.0), (3.0, 6.0)]);
    }
}
