//! The registry in etcd: for any number of coordinators.
//!
//! - [`session`]: connection, lease, election, list and watch, writes; on a thread of its own. [`view`]: what was read.
//!   [`uses`]: what tenants use through each coordinator.
//! - [`heartbeats`]: the workers that were found there, as each tells of itself.
//!
//! Invariants: etcd says which workers there are and where, their own heartbeats say whether they live; so nothing that
//! serves is given up because etcd is away, and a dead worker is noticed as soon as without etcd. What was last read stays
//! in force while etcd is away.

mod heartbeats;
mod session;
mod uses;
mod view;

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use lockstep_etcd::EtcdSettings;
use lockstep_proto::v1;
use lockstep_transport::Outbound;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use self::{
    heartbeats::{Heartbeats, Unreachable},
    session::{Ends, Session},
    uses::Uses,
    view::Entries,
};
use super::{
    Registry, Workers,
    store::{Link, PlanStore, StoreError, StoreState, Write},
};
use crate::{CoordinatorError, tenants::Tenants};

/// Writes that wait for the session.
const WRITE_QUEUE: usize = 16;

type Reply = oneshot::Sender<Result<(), StoreError>>;

/// A coordinator's side of etcd.
pub struct EtcdRegistry {
    id: String,
    workers: watch::Receiver<Workers>,
    unreachable: Unreachable,
    state: watch::Receiver<StoreState>,
    writes: mpsc::Sender<(Write, Reply)>,
}

/// Who joins the others, and how.
pub struct Joining {
    /// Id of this coordinator.
    pub id: String,
    /// Where etcd answers.
    pub settings: EtcdSettings,
    /// A worker whose heartbeats fail for so long is lost.
    pub silence: Duration,
    /// How workers are reached.
    pub outbound: Outbound,
    /// Whose limits the coordinators hold together.
    pub tenants: Tenants,
}

impl EtcdRegistry {
    /// Starts to read etcd and to follow the workers there; ends when `closing` fires, and what is returned beside it fails
    /// when that is done. Needs the async runtime.
    ///
    /// # Errors
    /// [`CoordinatorError::Server`] if no thread can be started.
    pub fn start(
        joining: Joining,
        closing: CancellationToken,
    ) -> Result<(Arc<Self>, oneshot::Receiver<()>), CoordinatorError> {
        let Joining { id, settings, silence, outbound, tenants } = joining;
        let state = watch::Sender::new(StoreState::new());
        let entries = watch::Sender::new(Entries::default());
        let workers = watch::Sender::new(Workers::default());
        let (sender, writes) = mpsc::channel(WRITE_QUEUE);
        let unreachable = Unreachable::default();
        let registry = Self {
            id: id.clone(),
            workers: workers.subscribe(),
            unreachable: unreachable.clone(),
            state: state.subscribe(),
            writes: sender,
        };
        let heartbeats = Heartbeats::new(entries.subscribe(), workers, unreachable, silence, outbound);
        tokio::spawn(heartbeats.follow(closing.clone()));
        let ended = Session::new(id, settings, Uses::new(tenants), Ends { state, entries, writes }).start(closing)?;
        Ok((Arc::new(registry), ended))
    }
}

impl Registry for EtcdRegistry {
    fn watch(&self) -> watch::Receiver<Workers> {
        self.workers.clone()
    }
}

impl PlanStore for EtcdRegistry {
    fn id(&self) -> &str {
        &self.id
    }

    fn watch(&self) -> watch::Receiver<StoreState> {
        self.state.clone()
    }

    fn unreachable(&self) -> Vec<(Arc<v1::WorkerHello>, String)> {
        self.unreachable.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    fn write(&self, write: Write) -> BoxFuture<'static, Result<(), StoreError>> {
        if let Link::Away { reason, .. } = &self.state.borrow().link {
            return std::future::ready(Err(StoreError::Away(reason.clone()))).boxed();
        }
        let (reply, answer) = oneshot::channel();
        let writes = self.writes.clone();
        let away = |what: &str| StoreError::Away(what.to_owned());
        async move {
            writes.try_send((write, reply)).map_err(|_| away("it takes no more writes"))?;
            answer.await.map_err(|_| away("its session ended"))?
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use lockstep_tests::Etcd;
    use lockstep_transport::TlsFiles;
    use tokio::time::Instant;

    use super::*;

    fn start(etcd: &Etcd, id: &str, closing: &CancellationToken) -> Arc<EtcdRegistry> {
        let settings = EtcdSettings::new(&etcd.endpoints(), "/test", TlsFiles::default()).unwrap();
        let joining = Joining {
            id: id.to_owned(),
            settings,
            silence: Duration::from_secs(2),
            outbound: Outbound::ClearText,
            tenants: Tenants::open(None).unwrap(),
        };
        EtcdRegistry::start(joining, closing.clone()).unwrap().0
    }

    async fn until(registry: &EtcdRegistry, condition: impl Fn(&StoreState) -> bool) -> StoreState {
        let mut state = PlanStore::watch(registry);
        let reached = tokio::time::timeout(Duration::from_secs(10), state.wait_for(|state| condition(state))).await;
        reached.expect("it was not reached in time").unwrap().clone()
    }

    fn plan(registry: &EtcdRegistry, wanted_replicas: u32) -> Write {
        let models = vec![v1::PlannedModel { wanted_replicas, ..Default::default() }];
        let value = v1::PlanState { models, leader_term: 0 };
        Write::Plan { expected: PlanStore::watch(registry).borrow().plan.revision, value }
    }

    fn wanted(state: &StoreState) -> Option<u32> {
        state.plan.value.models.first().map(|model| model.wanted_replicas)
    }

    #[tokio::test]
    async fn who_has_lost_the_lead_writes_no_plan() {
        let etcd = Etcd::start(1).unwrap();
        let closing = CancellationToken::new();
        let _end = closing.clone().drop_guard();
        let first = start(&etcd, "first", &closing);
        until(&first, |state| state.leads(Instant::now())).await;
        let second = start(&etcd, "second", &closing);
        let follower = until(&second, StoreState::is_connected).await;
        assert_eq!((follower.leader.as_deref(), follower.leads_until), (Some("first"), None));
        assert_eq!(second.write(plan(&second, 1)).await, Err(StoreError::Conflict));
        assert_eq!(first.write(plan(&first, 2)).await, Ok(()));
        until(&second, |state| wanted(state) == Some(2)).await;

        // As if the leader had been stopped for so long that its lease ended: it learns of it last.
        let found: serde_json::Value =
            serde_json::from_str(&etcd.control(&["get", "/test/leader", "--write-out=json"]).unwrap()).unwrap();
        let lease = format!("{:x}", found["kvs"][0]["lease"].as_i64().unwrap());
        let stale = plan(&first, 3);
        etcd.control(&["lease", "revoke", &lease]).unwrap();
        // Its revision is right, its lease is not; whether it noticed before decides how it is told.
        let refused = first.write(stale.clone()).await;
        assert!(matches!(refused, Err(StoreError::Conflict | StoreError::Away(_))), "{refused:?}");
        let leader =
            until(&second, |state| state.leads(Instant::now()) || state.leader.as_deref() == Some("first")).await;
        let winner = if leader.leader.as_deref() == Some("second") { &second } else { &first };
        assert_eq!(winner.write(plan(winner, 4)).await, Ok(()));
        assert_eq!(winner.write(stale).await, Err(StoreError::Conflict), "the revision is older");
        assert_eq!(wanted(&until(&first, |state| wanted(state) != Some(2)).await), Some(4));
    }

    #[tokio::test]
    async fn anyone_changes_what_is_desired_but_only_what_he_has_seen() {
        let etcd = Etcd::start(1).unwrap();
        let closing = CancellationToken::new();
        let _end = closing.clone().drop_guard();
        let (first, second) = (start(&etcd, "first", &closing), start(&etcd, "second", &closing));
        let expected = until(&first, StoreState::is_connected).await.desired.revision;
        until(&second, StoreState::is_connected).await;
        let desired = |name: &str| {
            let value = v1::DesiredState { models: vec![v1::DesiredModel { name: name.into(), ..Default::default() }] };
            Write::Desired { expected, value }
        };
        let both = tokio::join!(first.write(desired("a")), second.write(desired("b")));
        assert!(matches!(both, (Ok(()), Err(StoreError::Conflict)) | (Err(StoreError::Conflict), Ok(()))), "{both:?}");
    }

    #[tokio::test]
    async fn a_member_of_three_may_die() {
        let mut etcd = Etcd::start(3).unwrap();
        let closing = CancellationToken::new();
        let _end = closing.clone().drop_guard();
        let registry = start(&etcd, "first", &closing);
        let Link::Connected(endpoint) = until(&registry, |state| state.leads(Instant::now())).await.link else {
            panic!("it leads but is away");
        };
        let index = etcd.endpoints().iter().position(|other| *other == endpoint).unwrap();
        etcd.kill(index).unwrap();
        let elsewhere = |state: &StoreState| {
            matches!(&state.link, Link::Connected(other) if *other != endpoint) && state.leads(Instant::now())
        };
        until(&registry, elsewhere).await;
        assert_eq!(registry.write(plan(&registry, 1)).await, Ok(()));
    }
}
