//! Ranks as threads on the loopback interface.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use super::*;

const SECRET: &[u8] = b"a secret of the replica";

fn key() -> LinkKey {
    LinkKey { model: "model".to_owned(), replica: 0, plan_epoch: 7 }
}

fn any_port() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn config(rank: usize, addresses: Vec<SocketAddr>) -> RankLinksConfig {
    RankLinksConfig {
        key: key(),
        secret: SECRET.to_vec(),
        rank,
        addresses,
        connect_timeout: Duration::from_secs(5),
        timeout: Duration::from_secs(5),
        spin: Duration::ZERO,
        abort: AbortHandle::default(),
    }
}

/// Runs `body` as each of `world_size` ranks.
fn run_ranks<T: Send>(world_size: usize, body: impl Fn(usize, RankLinks) -> T + Sync) -> Vec<T> {
    let listeners: Vec<_> = (0..world_size).map(|_| Arc::new(LinkListener::bind(any_port()).unwrap())).collect();
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr()).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = listeners
            .iter()
            .enumerate()
            .map(|(rank, listener)| {
                let links = RankLinks::new(Arc::clone(listener), config(rank, addresses.clone())).unwrap();
                let body = &body;
                scope.spawn(move || body(rank, links))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A value of rank and index whose sums depend on the order of addition.
fn value(rank: usize, index: usize) -> f32 {
    let bits = (rank as u32 + 1).wrapping_mul(2_654_435_761).wrapping_add((index as u32).wrapping_mul(40_503));
    (bits % 20_011) as f32 * 1.000_1e-3 - 10.0
}

#[test]
fn all_ranks_get_the_same_sum_of_any_length() {
    for world_size in 1..=5 {
        let group: Vec<_> = (0..world_size).collect();
        let lengths = [1, 2, 7, 576, 8191, 16_385, 100_003, 300_001];
        let results = run_ranks(world_size, |rank, links| {
            let mut collective = links.collective(&group, Purpose::TensorParallel).unwrap();
            lengths.map(|length| {
                let mut data: Vec<_> = (0..length).map(|index| value(rank, index)).collect();
                collective.all_reduce_sum(&mut data).unwrap();
                data
            })
        });
        for (index, length) in lengths.into_iter().enumerate() {
            for element in 0..length {
                let exact: f64 = (0..world_size).map(|rank| f64::from(value(rank, element))).sum();
                assert!(
                    (f64::from(results[0][index][element]) - exact).abs() < 1e-4,
                    "{world_size} {length} {element}"
                );
            }
            for other in &results[1..] {
                let same = results[0][index].iter().zip(&other[index]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{world_size} ranks, {length} values");
            }
        }
    }
}

#[test]
fn messages_pass_both_ways() {
    run_ranks(2, |rank, links| {
        let link = links.message_link(1 - rank).unwrap();
        for round in 0..100u32 {
            link.send(&vec![round; 1000]).unwrap();
            let got: Vec<u32> = link.receive(None).unwrap();
            assert_eq!(got, vec![round; 1000]);
        }
    });
}
