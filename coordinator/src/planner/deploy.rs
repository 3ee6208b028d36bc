//! Plans put into force: replicas made of a plan, and loaded once the plan is agreed.
//! Invariant: a replica is loaded when the agreed plan has it, and its parts are named by an epoch that was never used.

use std::sync::Arc;

use lockstep_proto::v1;
use lockstep_sharding::{Explanation, ShardPlan, Topology};
use rand::RngCore;
use tokio::time::Instant;

use super::{
    ledger::next_epoch,
    reconciler::{Event, Reconciler},
    topology, worker_calls,
};
use crate::served::{Replica, ReplicaState};

/// Bytes of a replica's shared secret.
const SECRET_BYTES: usize = 32;

/// A plan, and the cluster that it was made for.
pub struct Planned {
    /// The plan.
    pub plan: ShardPlan,
    /// The cluster.
    pub topology: Topology,
    /// The plan in words and numbers.
    pub explanation: Explanation,
}

impl Reconciler {
    /// Puts a plan into force under a new epoch: its replicas are loaded as soon as it is agreed.
    pub(super) fn deploy(&mut self, name: &str, planned: Planned, now: Instant) {
        let Planned { plan, topology, explanation } = planned;
        let live = Arc::clone(&self.registry.borrow());
        let encoded = lockstep_sharding::encode(&plan).map_err(|error| error.to_string());
        let described = serde_json::to_vec(&topology).map_err(|error| error.to_string());
        let (bytes, topology_json) = match (encoded, described) {
            (Ok(bytes), Ok(topology_json)) => (bytes, topology_json),
            (Err(error), _) | (_, Err(error)) => return self.note(name, |model| model.note_failure(error, now)),
        };
        let plan_epoch = next_epoch(self.last_epoch.max(self.ledger.last_epoch()));
        self.last_epoch = plan_epoch;
        let Some(model) = self.models.get_mut(name).filter(|model| model.removal.is_none()) else { return };
        // A worker may have gone while the plan was made: then the next round plans for those that are left.
        let Some(parts) = plan
            .replicas
            .iter()
            .map(|replica| {
                let members = topology::members(replica, &live)?;
                let clients = worker_calls::clients_of(&self.workers, &members)?;
                Some((replica, members, clients, topology::rank_addresses(replica, &live)?))
            })
            .collect::<Option<Vec<_>>>()
        else {
            return;
        };
        let mut indices = free_indices(&model.replicas, parts.len()).into_iter();
        for (position, (replica_plan, members, clients, rank_addresses)) in parts.into_iter().enumerate() {
            let Some(((_, leader), index)) = clients.first().cloned().zip(indices.next()) else { continue };
            let mut secret = vec![0; SECRET_BYTES];
            rand::rng().fill_bytes(&mut secret);
            let load = v1::LoadReplicaRequest {
                model: name.to_owned(),
                source: model.spec.source.clone(),
                plan_epoch,
                replica: position as u32,
                plan: bytes.clone().into(),
                secret,
                rank_addresses,
                leader_term: 0,
                index: index as u32,
            };
            let replica = Arc::new(Replica::new(load, replica_plan.clone(), members, leader, index));
            model.replicas.push(Arc::clone(&replica));
            self.to_load.push(replica);
        }
        tracing::info!(model = name, plan_epoch, num_replicas = plan.replicas.len(), plan.reason, "plan in force");
        model.wanted_replicas.get_or_insert(plan.replicas.len());
        model.plan = Some(Arc::new(explanation));
        model.plan_epoch = plan_epoch;
        (model.plan_bytes, model.topology_json) = (bytes, topology_json);
    }

    /// Loads what is to be loaded and agreed.
    pub(super) fn start_loads(&mut self) {
        let Some(leader_term) = self.ledger.term() else { return };
        let (agreed, waiting): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.to_load).into_iter().partition(|replica| self.ledger.has(replica));
        self.to_load = waiting.into_iter().filter(|replica| replica.is_live()).collect();
        for replica in agreed.into_iter().filter(|replica| replica.state() == ReplicaState::Loading) {
            // If a worker has gone, the next round breaks the replica.
            let Some(clients) = worker_calls::clients_of(&self.workers, &replica.members) else { continue };
            let loading = Arc::clone(&replica);
            let request = v1::LoadReplicaRequest { leader_term, ..replica.load.clone() };
            let load = async move {
                let outcome = worker_calls::load(Arc::clone(&loading), clients, request).await;
                Event::Loaded { replica: loading, outcome }
            };
            self.spawn(load, |problem| Event::Loaded { replica, outcome: Err(problem.into()) });
        }
    }
}

/// The lowest `count` numbers that no live replica has: one that goes on serving beside its successor keeps its own.
fn free_indices(replicas: &[Arc<Replica>], count: usize) -> Vec<usize> {
    let is_taken = |index: &usize| replicas.iter().any(|replica| replica.is_live() && replica.index == *index);
    (0..).filter(|index| !is_taken(index)).take(count).collect()
}
