//! Coordinators that share their state through a real etcd, with stub workers registered there.

use std::time::{Duration, Instant};

use lockstep_coordinator::CoordinatorConfig;
use lockstep_etcd::{Endpoints, EtcdSettings, Lease, etcd_client::PutOptions};
use lockstep_proto::{Message, status::Class, v1};
use lockstep_tests::{
    Etcd,
    certificates::{Authority, Folder},
};
use lockstep_transport::TlsFiles;
use tokio::task::JoinHandle;

use crate::stub::{Coordinator, StubWorker, collect, config, eventually, request};

/// Time to live of the stubs' leases: the least that etcd grants.
const TTL: Duration = Duration::from_secs(2);

fn settings(etcd: &Etcd) -> EtcdSettings {
    EtcdSettings::new(&etcd.endpoints(), "/test", TlsFiles::default()).unwrap()
}

pub fn shared(etcd: &Etcd, name: &str, policy: &str, min_workers: usize) -> CoordinatorConfig {
    CoordinatorConfig { coordinator_id: name.to_owned(), etcd: Some(settings(etcd)), ..config(policy, min_workers) }
}

/// A stub worker whose key is in etcd as long as this lives, and is written again when its lease was lost.
pub struct Registered {
    /// The stub.
    pub stub: StubWorker,
    registration: JoinHandle<()>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.registration.abort();
    }
}

impl Registered {
    pub async fn start(worker_id: &str, etcd: &Etcd) -> Self {
        let (stub, hello) = StubWorker::serve(worker_id, None).await;
        let settings = settings(etcd);
        let entry = v1::WorkerEntry { hello: Some(hello), session: stub.state.session };
        let key = settings.keys().worker(worker_id);
        let registration = tokio::spawn(async move {
            let mut endpoints = Endpoints::new(&settings, 0);
            loop {
                let held = async {
                    let connection = endpoints.connect().await?;
                    let mut lease = Lease::hold(&connection, None, TTL).await?;
                    let options = PutOptions::new().with_lease(lease.id());
                    let mut kv = connection.client.kv_client();
                    connection.within(kv.put(key.as_str(), entry.encode_to_vec(), Some(options))).await?;
                    loop {
                        tokio::time::sleep(TTL / 4).await;
                        lease.renew(&connection, TTL).await?;
                    }
                };
                let ended: Result<(), lockstep_etcd::EtcdError> = held.await;
                println!("the stub's lease: {}", ended.unwrap_err());
                tokio::time::sleep(TTL / 8).await;
            }
        });
        Self { stub, registration }
    }

    pub fn num_loads(&self) -> usize {
        self.stub.state.loads.lock().unwrap().len()
    }

    fn num_unloads(&self) -> usize {
        self.stub.state.unloads.lock().unwrap().len()
    }

    pub fn slow_down(&self) {
        *self.stub.state.token_delay.lock().unwrap() = Duration::from_millis(20);
    }
}

pub async fn hello(coordinator: &Coordinator) -> String {
    let stream = coordinator.inference().await.generate(request(5)).await.unwrap();
    collect(stream.into_inner()).await.unwrap().text
}

pub async fn model(coordinator: &Coordinator) -> Option<v1::ModelStatus> {
    let cluster = coordinator.admin().await.get_cluster(v1::GetClusterRequest {}).await.unwrap();
    cluster.into_inner().models.pop()
}

#[tokio::test]
async fn a_worker_is_found_and_lost_and_replaced() {
    let etcd = Etcd::start(1).unwrap();
    let coordinator = Coordinator::start(shared(&etcd, "a", "tensor=1", 1)).await;
    let first = Registered::start("w0", &etcd).await;
    coordinator.wait_ready(true).await;
    assert_eq!(hello(&coordinator).await, "hello");
    first.slow_down();
    let mut stream = coordinator.inference().await.generate(request(300)).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    let begin = Instant::now();
    drop(first);
    coordinator.wait_ready(false).await;
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    let _second = Registered::start("w1", &etcd).await;
    // It waits for the new plan, and goes on from there.
    let got = collect(stream).await.unwrap();
    let script = "hello world ".repeat(25);
    assert!(script.ends_with(&got.text) && got.text.len() >= 299, "{got:?}");
    // Who ends leads no more at once: the next one need not wait for the lease.
    coordinator.shutdown.cancel();
    coordinator.ended.await.unwrap().unwrap();
    assert_eq!(etcd.control(&["get", "/test/leader", "--keys-only"]).unwrap(), "");
}

#[tokio::test]
async fn any_coordinator_serves_and_obeys_and_the_next_leads_on() {
    let etcd = Etcd::start(1).unwrap();
    let first = Coordinator::start(shared(&etcd, "a", "tensor=2", 2)).await;
    let workers = [Registered::start("w0", &etcd).await, Registered::start("w1", &etcd).await];
    first.wait_ready(true).await;
    let second = Coordinator::start(CoordinatorConfig { model: None, ..shared(&etcd, "b", "auto", 1) }).await;
    second.wait_ready(true).await;
    assert_eq!((hello(&first).await, hello(&second).await), ("hello".into(), "hello".into()));
    let plans = (model(&first).await.unwrap().plan_epoch, model(&second).await.unwrap().plan_epoch);
    assert_eq!(plans.0, plans.1);

    // Orders at one that does not lead.
    let mut admin = second.admin().await;
    let order = v1::LoadModelRequest { name: "other".into(), source: "/models/o.gguf".into(), ..Default::default() };
    let mut progress = admin.load_model(order.clone()).await.unwrap().into_inner();
    while let Some(message) = progress.message().await.unwrap() {
        if message.ready {
            break;
        }
    }
    let changed = v1::LoadModelRequest { policy: "replicas=2".into(), ..order };
    let status = admin.load_model(changed).await.unwrap_err();
    assert_eq!(Class::of(&status), Class::AlreadyExists, "{status:?}");
    let bad = v1::LoadModelRequest { source: crate::stub::BAD_SOURCE.into(), ..Default::default() };
    let mut progress = admin.load_model(bad).await.unwrap().into_inner();
    let failed = loop {
        match progress.message().await {
            Ok(message) => assert!(message.is_some_and(|message| !message.ready)),
            Err(status) => break status,
        }
    };
    assert!(failed.message().contains("no such file"), "{failed:?}");
    admin.unload_model(v1::UnloadModelRequest { name: "other".into() }).await.unwrap();
    assert_eq!(
        first.inference().await.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models.len(),
        1
    );

    // The leader leaves under a stream of the other.
    let num_loads = workers.each_ref().map(Registered::num_loads);
    workers.iter().for_each(Registered::slow_down);
    let mut stream = second.inference().await.generate(request(100)).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    first.shutdown.cancel();
    first.ended.await.unwrap().unwrap();
    assert_eq!(collect(stream).await.unwrap().token_ids.len(), 99);
    assert_eq!(workers.each_ref().map(Registered::num_loads), num_loads);
    let [kept, lost] = workers;
    let num_unloads = kept.num_unloads();
    drop(lost);
    let _third = Registered::start("w2", &etcd).await;
    eventually("a new plan", || kept.num_loads() == num_loads[0] + 1).await;
    second.wait_ready(true).await;
    assert_eq!(kept.num_unloads(), num_unloads + 1);
    let terms = kept.stub.state.loads.lock().unwrap().iter().map(|load| load.leader_term).collect::<Vec<_>>();
    assert!(
        terms[0] > 0 && terms.is_sorted() && terms.last() > terms.first(),
        "each leader has a later term: {terms:?}"
    );
    assert!(model(&second).await.unwrap().plan_epoch > plans.0);
}

#[tokio::test]
async fn who_takes_over_plans_for_survivors_however_few() {
    let etcd = Etcd::start(1).unwrap();
    let first = Coordinator::start(shared(&etcd, "a", "replicas=1", 2)).await;
    let workers = [Registered::start("w0", &etcd).await, Registered::start("w1", &etcd).await];
    first.wait_ready(true).await;
    let used = model(&first).await.unwrap().replicas[0].ranks[0].worker_id.clone();
    first.shutdown.cancel();
    first.ended.await.unwrap().unwrap();
    let [w0, w1] = workers;
    let left = if used == "w0" { (drop(w0), w1).1 } else { (drop(w1), w0).1 };
    let num_loads = left.num_loads();
    // One that has never seen it serve.
    let second = Coordinator::start(shared(&etcd, "b", "replicas=1", 2)).await;
    eventually("a plan on the worker that is left", || left.num_loads() == num_loads + 1).await;
    second.wait_ready(true).await;
}

#[tokio::test]
async fn a_worker_that_cannot_be_reached_is_shown_with_the_reason() {
    let etcd = Etcd::start(1).unwrap();
    let (folder, authority) = (Folder::new().unwrap(), Authority::new().unwrap());
    let cluster_tls = Some(folder.member("us", &authority).unwrap());
    let coordinator = Coordinator::start(CoordinatorConfig { cluster_tls, ..shared(&etcd, "a", "tensor=1", 1) }).await;
    // It has no certificates of the cluster.
    let worker = Registered::start("w0", &etcd).await;
    let end = Instant::now() + Duration::from_secs(10);
    let workers = async || {
        let cluster = coordinator.admin().await.get_cluster(v1::GetClusterRequest {}).await.unwrap();
        cluster.into_inner().workers
    };
    let problem = loop {
        if let Some(worker) = workers().await.pop() {
            break worker.problem;
        }
        assert!(Instant::now() < end, "nothing is said of the worker");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    println!("{problem}");
    assert!(!problem.is_empty());
    drop(worker);
    while !workers().await.is_empty() {
        assert!(Instant::now() < end, "its key is gone");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn what_serves_goes_on_while_etcd_is_away() {
    let mut etcd = Etcd::start(1).unwrap();
    let coordinator = Coordinator::start(shared(&etcd, "a", "tensor=1", 1)).await;
    let worker = Registered::start("w0", &etcd).await;
    coordinator.wait_ready(true).await;
    worker.slow_down();
    let mut stream = coordinator.inference().await.generate(request(400)).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    // Long enough for every lease to end.
    let pid = etcd.pid(0).unwrap().to_string();
    let signal = |name: &str| {
        assert!(std::process::Command::new("kill").args([name, &pid]).status().unwrap().success());
    };
    signal("-STOP");
    tokio::time::sleep(Duration::from_millis(3500)).await;
    assert_eq!(hello(&coordinator).await, "hello");
    let order = v1::LoadModelRequest { name: "n".into(), source: "/models/n.gguf".into(), ..Default::default() };
    let refused = coordinator.admin().await.load_model(order).await.unwrap_err();
    assert!(refused.message().contains("etcd is away"), "{refused:?}");
    signal("-CONT");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    etcd.kill(0).unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    etcd.restart(0).unwrap();
    etcd.compact().unwrap();
    assert_eq!(collect(stream).await.unwrap().token_ids.len(), 399);
    assert_eq!((worker.num_loads(), worker.num_unloads()), (1, 0));
    // It plans again, without a restart.
    let second = Registered::start("w1", &etcd).await;
    drop(worker);
    eventually("a new plan", || second.num_loads() == 1).await;
    coordinator.wait_ready(true).await;
    assert_eq!(hello(&coordinator).await, "hello");
}

#[tokio::test]
async fn a_drain_while_etcd_is_away_waits_for_a_successor() {
    let etcd = Etcd::start(1).unwrap();
    let coordinator = Coordinator::start(shared(&etcd, "a", "tensor=1,replicas=1", 1)).await;
    let workers = [Registered::start("w0", &etcd).await, Registered::start("w1", &etcd).await];
    coordinator.wait_ready(true).await;
    let (leaves, spare) =
        if workers[0].num_loads() == 1 { (&workers[0], &workers[1]) } else { (&workers[1], &workers[0]) };
    *spare.stub.state.load_delay.lock().unwrap() = Duration::from_millis(500);
    let pid = etcd.pid(0).unwrap().to_string();
    let signal = |name: &str| {
        assert!(std::process::Command::new("kill").args([name, &pid]).status().unwrap().success());
    };
    signal("-STOP");
    let problem = async || {
        let cluster = coordinator.admin().await.get_cluster(v1::GetClusterRequest {}).await.unwrap();
        cluster.into_inner().registry.unwrap().problem
    };
    let begin = Instant::now();
    while problem().await.is_empty() {
        assert!(begin.elapsed() < Duration::from_secs(10), "nobody noticed that etcd is away");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // Its time is over before anybody could plan.
    *leaves.stub.state.drain_left.lock().unwrap() = Some(Duration::ZERO);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(hello(&coordinator).await, "hello");
    signal("-CONT");
    while spare.num_loads() == 0 || !leaves.stub.state.held.lock().unwrap().is_empty() {
        assert_eq!(hello(&coordinator).await, "hello");
        assert!(begin.elapsed() < Duration::from_secs(25), "no successor");
    }
    assert_eq!(hello(&coordinator).await, "hello");
}
