//! Ranks as threads on the loopback interface.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Barrier, Condvar, Mutex},
    time::Duration,
};

use lockstep_tests::certificates::{Authority, Folder};
use lockstep_transport::ClusterTls;

use super::{message::SILENCE, *};
use crate::WorkerError;

const SECRET: &[u8] = b"a secret of the replica";

fn key() -> LinkKey {
    LinkKey { model: "model".to_owned(), replica: 0, plan_epoch: 7 }
}

fn any_port() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

/// A member of a cluster of its own authority.
fn member() -> Option<ClusterTls> {
    let files = Folder::new().unwrap();
    let files = files.member("member", &Authority::new().unwrap()).map(|paths| (files, paths)).unwrap();
    Some(ClusterTls::open(files.1).unwrap())
}

fn listener(tls: &Option<ClusterTls>) -> Arc<LinkListener> {
    Arc::new(LinkListener::bind(any_port(), tls.clone()).unwrap())
}

fn config(rank: usize, addresses: Vec<SocketAddr>) -> RankLinksConfig {
    RankLinksConfig {
        key: key(),
        secret: SECRET.to_vec(),
        rank,
        addresses,
        connect_timeout: Duration::from_secs(5),
        timeout: Duration::from_secs(5),
        max_message_bytes: 1 << 20,
        spin: Duration::ZERO,
        abort: AbortHandle::default(),
    }
}

/// Runs `body` as each of `world_size` ranks.
fn run_ranks<T: Send>(
    world_size: usize,
    tls: &Option<ClusterTls>,
    body: impl Fn(usize, RankLinks) -> T + Sync,
) -> Vec<T> {
    let listeners: Vec<_> = (0..world_size).map(|_| listener(tls)).collect();
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
    let (clear, secured) = (None, member());
    for (world_size, tls) in (1..=5).map(|world_size| (world_size, &clear)).chain([(2, &secured), (4, &secured)]) {
        let group: Vec<_> = (0..world_size).collect();
        let lengths = [1, 2, 7, 576, 8191, 16_385, 100_003, 300_001];
        let results = run_ranks(world_size, tls, |rank, links| {
            let mut collective = links.collective(&group, Purpose::TensorParallel).unwrap();
            lengths.map(|length| {
                let values = (0..length).map(|index| value(rank, index));
                let mut wide: Vec<_> = values.clone().map(f64::from).collect();
                let mut data: Vec<_> = values.collect();
                collective.all_reduce_sum(&mut data).unwrap();
                collective.all_reduce_sum(&mut wide).unwrap();
                (data, wide)
            })
        });
        for (index, length) in lengths.into_iter().enumerate() {
            let (data, wide) = &results[0][index];
            for (element, (sum, wide)) in data.iter().zip(wide).enumerate() {
                let exact: f64 = (0..world_size).map(|rank| f64::from(value(rank, element))).sum();
                assert!((f64::from(*sum) - exact).abs() < 1e-4, "{world_size} {length} {element}");
                assert_eq!(*wide, exact, "{world_size} {length} {element}");
            }
            // No value is a NaN or a negative zero: equal values are equal bits.
            for other in &results[1..] {
                assert!(results[0][index] == other[index], "{world_size} ranks, {length} values");
            }
        }
    }
}

#[test]
fn all_ranks_gather_the_same_bytes() {
    for world_size in 1..=4 {
        let group: Vec<_> = (0..world_size).collect();
        let results = run_ranks(world_size, &None, |rank, links| {
            let mut collective = links.collective(&group, Purpose::TensorParallel).unwrap();
            [0, 1, 256, 1001].map(|length| collective.all_gather(&vec![rank as u8 + 1; length]).unwrap())
        });
        for gathered in results {
            for (length, gathered) in [0, 1, 256, 1001].into_iter().zip(gathered) {
                let expected: Vec<_> = (1..=world_size as u8).map(|byte| vec![byte; length]).collect();
                assert!(gathered == expected, "{world_size} ranks, {length} bytes");
            }
        }
    }
}

#[test]
fn messages_pass_both_ways() {
    for tls in [None, member()] {
        run_ranks(2, &tls, |rank, links| {
            let link = links.message_link(1 - rank).unwrap();
            for round in 0..100u32 {
                link.send(&vec![round; 1000]).unwrap();
                let got: Vec<u32> = link.receive(None).unwrap();
                assert_eq!(got, vec![round; 1000]);
            }
        });
    }
}

/// Two ranks with different configurations; the second may fail to connect.
fn run_pair<T: Send>(
    configure: impl Fn(&mut RankLinksConfig) + Sync,
    body: impl Fn(usize, &RankLinks) -> T + Sync,
) -> Vec<T> {
    run_pair_with([None, None], configure, body)
}

/// The same with what each of them is secured with.
fn run_pair_with<T: Send>(
    tls: [Option<ClusterTls>; 2],
    configure: impl Fn(&mut RankLinksConfig) + Sync,
    body: impl Fn(usize, &RankLinks) -> T + Sync,
) -> Vec<T> {
    let listeners = tls.map(|tls| listener(&tls));
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr()).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|rank| {
                let mut config = config(rank, addresses.clone());
                config.connect_timeout = Duration::from_secs(1);
                configure(&mut config);
                let links = RankLinks::new(Arc::clone(&listeners[rank]), config).unwrap();
                let body = &body;
                scope.spawn(move || body(rank, &links))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Keeps one rank there until the other is done, however slow the machine is.
#[derive(Default)]
struct Done(Mutex<bool>, Condvar);

impl Done {
    fn say(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn wait(&self) {
        let is_done = self.0.lock().unwrap();
        drop(self.1.wait_timeout_while(is_done, Duration::from_secs(20), |is_done| !*is_done).unwrap());
    }
}

fn connect(links: &RankLinks) -> Result<TcpCollective, WorkerError> {
    links.collective(&[0, 1], Purpose::TensorParallel)
}

#[test]
fn a_wrong_secret_is_refused() {
    let results = run_pair(
        |config| config.secret.push(config.rank as u8),
        |_, links| connect(links).map(drop).unwrap_err().to_string(),
    );
    assert!(results[1].contains("secret"), "{results:?}");
    assert!(results[0].contains("did not connect"), "{results:?}");
}

#[test]
fn another_epoch_or_model_is_refused() {
    for change in [|key: &mut LinkKey| key.plan_epoch += 1, |key: &mut LinkKey| key.model.push('x')] {
        let results = run_pair(
            |config| {
                if config.rank == 1 {
                    change(&mut config.key)
                }
            },
            |_, links| connect(links).map(drop).unwrap_err().to_string(),
        );
        assert!(results[1].contains("is not registered"), "{results:?}");
    }
}

#[test]
fn strangers_do_not_disturb_the_listener() {
    for tls in [None, member()] {
        strangers_disturb_nobody(&tls);
    }
}

fn strangers_disturb_nobody(tls: &Option<ClusterTls>) {
    use std::io::{Read, Write};
    let listeners = [(); 2].map(|()| listener(tls));
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr()).collect();
    // One is silent, one trickles, the others send garbage.
    let silent = std::net::TcpStream::connect(addresses[0]).unwrap();
    let mut garbage: Vec<_> = [&b"\xff\xff\xff\xff"[..], b"GET / HTTP/1.1\r\n\r\n", &[0; 3000]]
        .into_iter()
        .map(|bytes| {
            let mut stream = std::net::TcpStream::connect(addresses[0]).unwrap();
            // The listener may have hung up already.
            let _ = stream.write_all(bytes);
            stream
        })
        .collect();
    let start = std::time::Instant::now();
    std::thread::scope(|scope| {
        for (rank, listener) in listeners.iter().enumerate() {
            let links = RankLinks::new(Arc::clone(listener), config(rank, addresses.clone())).unwrap();
            scope.spawn(move || connect(&links).map(drop).unwrap());
        }
    });
    assert!(start.elapsed() < Duration::from_millis(1500), "{:?}", start.elapsed());
    for stream in garbage.iter_mut().chain([&mut { silent }]) {
        stream.set_read_timeout(Some(Duration::from_secs(4))).unwrap();
        // With TLS he is told why.
        let closed = stream.read_to_end(&mut Vec::new());
        assert!(closed.is_ok() || closed.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset);
    }
}

#[test]
fn a_dead_or_silent_peer_is_an_error() {
    let secured = member();
    for (is_dead, tls) in [(true, None), (false, None), (true, secured.clone()), (false, secured)] {
        let done = Done::default();
        let results = run_pair_with(
            [tls.clone(), tls],
            |config| config.timeout = Duration::from_millis(300),
            |rank, links| {
                let mut collective = connect(links).unwrap();
                if rank == 1 {
                    if !is_dead {
                        done.wait();
                    }
                    return String::new();
                }
                let error = collective.all_reduce_sum(&mut [1.0_f32; 1000]).unwrap_err();
                done.say();
                error.to_string()
            },
        );
        let expected: &[_] =
            if is_dead { &["closed", "reset", "Broken pipe"] } else { &["sent 0 of 4000 bytes within 300ms"] };
        let is_named = expected.iter().any(|words| results[0].contains(words));
        assert!(results[0].starts_with("rank 1: ") && is_named, "{results:?}");
    }
}

#[test]
fn a_stage_waits_for_as_long_as_the_other_computes() {
    // More than the sockets hold, so that sending waits as well.
    let values = vec![1.5_f32; 4 << 20];
    for tls in [None, member()] {
        run_pair_with(
            [tls.clone(), tls],
            |config| config.timeout = Duration::from_millis(50),
            |rank, links| {
                let mut collective = links.collective(&[0, 1], Purpose::Pipeline).unwrap();
                let mut received = vec![0.0; values.len()];
                if rank == 0 {
                    collective.receive(1, &mut received).unwrap();
                    collective.send(1, &received).unwrap();
                } else {
                    std::thread::sleep(Duration::from_millis(300));
                    collective.send(0, &values).unwrap();
                    std::thread::sleep(Duration::from_millis(300));
                    collective.receive(0, &mut received).unwrap();
                    assert!(received == values);
                }
            },
        );
    }
}

#[test]
fn a_rank_of_another_cluster_is_refused() {
    for tls in [[member(), member()], [member(), None], [None, member()]] {
        let is_listening_secured = tls[0].is_some();
        let results = run_pair_with(tls, |_| (), |_, links| connect(links).map(drop).unwrap_err().to_string());
        assert!(results[0].contains("did not connect"), "{results:?}");
        assert!(results[1].starts_with("rank 0: at 127.0.0.1:"), "{results:?}");
        assert!(!is_listening_secured || !results[1].contains("not registered"), "{results:?}");
    }
}

#[test]
fn lengths_that_differ_are_an_error_on_both_sides() {
    let both = Barrier::new(2);
    let results = run_pair(
        |_| (),
        |rank, links| {
            let mut collective = connect(links).unwrap();
            let result = collective.all_reduce_sum(&mut vec![1.0_f32; 100 + rank]);
            // Keeps the socket until the other has read.
            both.wait();
            result.unwrap_err().to_string()
        },
    );
    assert!(results[0].contains("sent payload bytes 404, expected 400"), "{results:?}");
}

#[test]
fn abort_wakes_a_waiting_rank() {
    let (tls, done) = (member(), Done::default());
    let results = run_pair_with(
        [tls.clone(), tls],
        |_| (),
        |rank, links| {
            let mut collective = connect(links).unwrap();
            if rank == 1 {
                done.wait();
                return String::new();
            }
            let abort = links.abort_handle();
            let aborting = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                abort.abort("the plan is over");
            });
            let error = collective.receive(1, &mut [0.0; 10]).unwrap_err();
            done.say();
            aborting.join().unwrap();
            error.to_string()
        },
    );
    assert_eq!(results[0], "rank 1: aborted: the plan is over");
}

#[test]
fn a_silent_peer_ends_a_send() {
    let listener = std::net::TcpListener::bind(any_port()).unwrap();
    let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let _silent = listener.accept().unwrap();
    let stream = lockstep_transport::LinkStream::connect(stream, None, std::time::Instant::now()).unwrap();
    let link = super::link::Link::new(stream, 1, 7, &AbortHandle::default()).unwrap();
    let link = MessageLink::new(link, 64 << 20, Duration::ZERO).unwrap();
    let start = std::time::Instant::now();
    let error = link.send(&vec![1u32; 32 << 20]).unwrap_err().to_string();
    assert!(error.contains("not even a heartbeat") && start.elapsed() < 2 * SILENCE, "{error}");
}

#[test]
fn a_message_beyond_the_limit_is_refused() {
    let results = run_pair(
        |config| config.max_message_bytes = if config.rank == 0 { 100 } else { 10_000 },
        |rank, links| {
            let link = links.message_link(1 - rank).unwrap();
            let sent = link.send(&vec![1u32; 1000]);
            sent.and_then(|()| link.receive::<Vec<u32>>(None)).unwrap_err().to_string()
        },
    );
    assert!(results[0].contains("message of"), "{results:?}");
}

#[test]
fn a_message_link_lives_while_idle_and_notices_a_closed_peer() {
    for tls in [None, member()] {
        message_link_lives_while_idle(tls);
    }
}

fn message_link_lives_while_idle(tls: Option<ClusterTls>) {
    let results = run_pair_with(
        [tls.clone(), tls],
        |_| (),
        |rank, links| {
            let link = links.message_link(1 - rank).unwrap();
            if rank == 1 {
                std::thread::sleep(SILENCE + Duration::from_millis(300));
                link.send(&1u32).unwrap();
                // Until the other has it.
                return link.receive::<u32>(None).map_or_else(|error| error.to_string(), |value| value.to_string());
            }
            assert_eq!(link.receive::<u32>(None).unwrap(), 1);
            link.send(&2u32).unwrap();
            // Nobody receives here: the watching thread alone notices that the peer left.
            let start = std::time::Instant::now();
            while links.abort_handle().reason().is_none() && start.elapsed() < Duration::from_secs(3) {
                std::thread::sleep(Duration::from_millis(10));
            }
            links.abort_handle().reason().unwrap_or_default()
        },
    );
    assert_eq!(results[1], "2");
    assert!(results[0].contains("rank 1: closed the connection"), "{results:?}");
}
