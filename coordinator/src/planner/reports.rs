//! What workers report of their parts, against what the models' replicas need.
//! Invariant: a part is judged by heartbeats alone; a worker without one is not.

use std::{collections::BTreeMap, time::Duration};

use lockstep_proto::v1;

use super::{model_state::ModelState, unloads::Part};
use crate::{
    cluster::Workers,
    served::{BreakCause, Member, ReplicaState},
};

/// After a replica became ready, so long a heartbeat that does not list it may be older than its load.
const REPORT_GRACE: Duration = Duration::from_secs(1);

/// Breaks replicas that one of their workers calls broken or does not hold; notes which ones are stalled.
pub fn break_reported(models: &BTreeMap<String, ModelState>, live: &Workers) {
    for replica in models.values().flat_map(|model| &model.replicas) {
        for (index, Member { worker_id, session }) in replica.members.iter().enumerate() {
            let Some(record) = live.get(worker_id).filter(|record| record.session == *session) else { continue };
            let is_overdue = replica.ready_at().is_some_and(|ready| record.last_heartbeat > ready + REPORT_GRACE);
            let problem = match record.replicas.iter().find(|report| replica.is_meant_by(report)) {
                Some(report) if !report.problem.is_empty() => report.problem.as_str(),
                // The leader comes first.
                Some(report) if index == 0 => {
                    replica.set_stalled(!report.stall.is_empty());
                    continue;
                }
                None if is_overdue => "it does not hold its part any more",
                _ => continue,
            };
            let detail = format!("worker {worker_id}: {problem}");
            replica.advance(ReplicaState::broken(BreakCause::WorkerFailed, detail));
        }
    }
}

/// The workers that could not reach each other, as one of both says.
pub fn estranged(live: &Workers) -> impl Iterator<Item = [Member; 2]> {
    let member = |worker_id: &str| {
        let record = live.get(worker_id)?;
        Some(Member { worker_id: worker_id.to_owned(), session: record.session })
    };
    let reports = live.iter().flat_map(|(id, record)| record.replicas.iter().map(move |report| (id, report)));
    reports
        .filter(|(_, report)| !report.unreachable_worker.is_empty())
        .filter_map(move |(id, report)| Some([member(id)?, member(&report.unreachable_worker)?]))
}

/// Parts that no replica needs: another coordinator, or an unload that failed, left them there.
pub fn unwanted_parts(models: &BTreeMap<String, ModelState>, live: &Workers) -> Vec<Part> {
    let mut unwanted = Vec::new();
    for (worker_id, record) in live.iter() {
        let is_unwanted = |report: &&v1::ReplicaReport| {
            let replicas = models.get(&report.model).map(|model| model.replicas.as_slice()).unwrap_or_default();
            !replicas.iter().any(|replica| replica.is_meant_by(report) && replica.uses(worker_id, record.session))
        };
        unwanted.extend(record.replicas.iter().filter(is_unwanted).map(|report| Part {
            worker_id: worker_id.clone(),
            session: record.session,
            model: report.model.clone(),
            plan_epoch: report.plan_epoch,
            replica: report.replica,
        }));
    }
    unwanted
}
