//! Reads what the leaders of all replicas report of their prefixes.
//! Invariant: every replica of the table has one follower, which ends with the replica; what a lost stream leaves out is
//! made up for by the list with which the next one begins.

use std::{sync::Arc, time::Duration};

use lockstep_proto::{
    status::Class,
    v1::{self, PrefixChanges},
};
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use crate::served::{ModelTable, Replica, ReplicaState};

/// Wait before a leader is asked again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Follows the replicas that the planner publishes, until `closing` fires.
pub async fn follow(mut models: watch::Receiver<ModelTable>, closing: CancellationToken) {
    let mut followers = JoinSet::new();
    let mut followed: Vec<Arc<Replica>> = Vec::new();
    loop {
        followed.retain(|replica| replica.is_live());
        let table = Arc::clone(&models.borrow_and_update());
        for replica in table.values().flat_map(|model| &model.replicas) {
            if replica.is_live() && !followed.iter().any(|other| Arc::ptr_eq(other, replica)) {
                followed.push(Arc::clone(replica));
                followers.spawn(follow_replica(Arc::clone(replica)));
            }
        }
        while followers.try_join_next().is_some() {}
        match closing.run_until_cancelled(models.changed()).await {
            Some(Ok(())) => {}
            _ => return,
        }
    }
}

async fn follow_replica(replica: Arc<Replica>) {
    let (mut ready, mut broken) = (replica.watch(), replica.watch());
    let reading = async {
        // It is not dropped as long as we hold it: both waits end with the state.
        let _ = ready.wait_for(|state| *state != ReplicaState::Loading).await;
        while let Err(status) = read(&replica).await {
            replica.prefixes.forget();
            let class = Class::of(&status);
            if matches!(class, Class::NotFound | Class::InvalidRequest | Class::Internal) {
                tracing::debug!(model = replica.model, replica = replica.index, %status, "its prefixes are not known");
                break;
            }
            tokio::time::sleep(RETRY_AFTER).await;
        }
    };
    tokio::select! {
        () = reading => {}
        _ = broken.wait_for(|state| matches!(state, ReplicaState::Broken(_))) => {}
    }
    replica.prefixes.forget();
}

/// Reads one stream to its end, which is an error in any case.
async fn read(replica: &Replica) -> Result<(), Status> {
    let request = v1::FollowPrefixesRequest {
        model: replica.model.clone(),
        plan_epoch: replica.plan_epoch,
        replica: replica.load.replica,
    };
    let mut reports: Streaming<PrefixChanges> = replica.leader.clone().follow_prefixes(request).await?.into_inner();
    let first = reports.message().await?.unwrap_or_default();
    replica.prefixes.begin(replica.plan.num_kv_blocks, &first.added);
    while let Some(PrefixChanges { added, evicted }) = reports.message().await? {
        replica.prefixes.update(&added, &evicted);
    }
    Err(Class::WorkerLost.status("the stream of prefixes ended"))
}
