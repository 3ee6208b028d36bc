//! The engine's thread over ranks that the test plays.

use std::{path::PathBuf, sync::mpsc};

use lockstep_sharding::{RankPlan, ReplicaPlan, StagePlan};

use super::*;
use crate::{
    devices::{DeviceSelection, DeviceSettings, LocalDevices},
    metrics::Metrics,
};

/// Says on its end whether the replica had broken by then.
struct Witness(Health, std::sync::mpsc::Sender<String>);

impl Drop for Witness {
    fn drop(&mut self) {
        let reason = if self.0.is_broken() { self.0.reason() } else { "none".to_owned() };
        self.1.send(reason).unwrap();
    }
}

#[test]
fn what_a_thread_holds_ends_after_the_reason_is_known() {
    let fails = |_: &mut Witness| Err(WorkerError::Server("on purpose".to_owned()));
    let panics = |_: &mut Witness| panic!("on purpose");
    let reason_after = |run: fn(&mut Witness) -> Result<(), WorkerError>| {
        let (sender, reasons) = std::sync::mpsc::channel();
        let health = Health::new(|| ());
        let thread = spawn("engine".to_owned(), health.clone(), Witness(health, sender), run).unwrap();
        let reason = reasons.recv().unwrap();
        drop(thread.join());
        reason
    };
    assert_eq!(reason_after(fails), "worker: on purpose");
    assert_eq!(reason_after(panics), "the thread engine panicked");
}
fn spec() -> ReplicaSpec {
    let cpu = DeviceSettings { selection: DeviceSelection::Cpu, num_cpu_devices: 1, ..DeviceSettings::default() };
    let rank = RankPlan { worker_id: String::from("w"), ..RankPlan::default() };
    ReplicaSpec {
        worker_id: String::from("w"),
        model: String::from("m"),
        source: PathBuf::new(),
        plan_epoch: 1,
        replica: 0,
        index: 0,
        plan: ReplicaPlan { stages: vec![StagePlan { layers: 0..4, ranks: vec![rank] }], num_kv_blocks: 8 },
        block_size: 4,
        max_sequence_tokens: 32,
        max_num_sequences: 4,
        max_step_tokens: 16,
        max_waiting_sequences: 4,
        is_prefix_caching: true,
        secret: Vec::new(),
        rank_addresses: Vec::new(),
        devices: LocalDevices::choose(cpu, 1).unwrap(),
        collective_timeout: Duration::from_secs(30),
        metrics: Arc::new(Metrics::new().unwrap()),
        cancel: Default::default(),
    }
}

#[test]
fn a_hung_device_is_noticed_while_nothing_runs() {
    let (plans, orders) = mpsc::sync_channel(2);
    let (results, events) = inbox(&spec());
    let health = Health::new(|| ());
    let (engine, leader) = EngineThread::new(&spec(), health.clone(), vec![plans], (results.clone(), events));
    let mut threads = Vec::new();
    engine.start(Vec::new(), &mut threads).unwrap();
    let answer = |plan: &StepPlan| {
        assert!(plan.is_canary() && plan.sequences[0].block_table.len() == 1, "{plan:?}");
        let result = RankResult { step_id: plan.step_id, candidates: Vec::new() };
        assert!(results.send(Event::Result { rank: 0, result }).is_ok());
    };
    // The first comes at once, the next after a second of idleness; each has an id of its own.
    let first = orders.recv_timeout(Duration::from_secs(20)).unwrap();
    answer(&first);
    let begin = Instant::now();
    let second = orders.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(second.step_id > first.step_id && begin.elapsed() > Duration::from_millis(900));
    assert_eq!(leader.stall(), None);
    assert!(leader.last_step_age().unwrap() > Duration::from_millis(900));
    assert_eq!(leader.status().prefill_tokens_per_second, 0.0);

    // The device hangs in it.
    while leader.stall().is_none() {
        assert!(begin.elapsed() < Duration::from_secs(5), "it is not noticed");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!health.is_broken());
    // It goes on after all.
    answer(&second);
    while leader.stall().is_some() {
        assert!(begin.elapsed() < Duration::from_secs(6), "it does not recover");
        std::thread::sleep(Duration::from_millis(5));
    }
    health.end("the test is over");
    assert!(results.try_send(Event::Wake).is_ok());
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
