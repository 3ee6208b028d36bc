//! Streams between ranks.

use std::{
    io::{ErrorKind, IoSlice, Read, Write},
    net::{TcpListener, TcpStream},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use lockstep_tests::certificates::{Authority, Folder};
use lockstep_transport::{ClusterTls, LinkStream, explain};

fn member(folder: &Folder, name: &str, authority: &Authority) -> ClusterTls {
    ClusterTls::open(folder.member(name, authority).unwrap()).unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(2)
}

/// Both ends of a link, or why each failed.
fn pair(accepting: ClusterTls, connecting: &ClusterTls) -> [std::io::Result<LinkStream>; 2] {
    let (address, accepted) = accept(accepting);
    let connected = LinkStream::connect(TcpStream::connect(address).unwrap(), Some(connecting), soon());
    [connected, accepted.join().unwrap()]
}

fn accept(tls: ClusterTls) -> (std::net::SocketAddr, JoinHandle<std::io::Result<LinkStream>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (address, std::thread::spawn(move || LinkStream::accept(listener.accept().unwrap().0, Some(&tls), soon())))
}

#[test]
fn both_directions_carry_much_at_once_without_blocking() {
    let (folder, authority) = (Folder::new().unwrap(), Authority::new().unwrap());
    let links = pair(member(&folder, "a", &authority), &member(&folder, "b", &authority)).map(Result::unwrap);
    let num_bytes = 8 << 20;
    let byte_at = |at: usize, end: usize| (at * 31 + at / 251 + end) as u8;
    std::thread::scope(|scope| {
        for (end, link) in links.iter().enumerate() {
            link.socket().set_nonblocking(true).unwrap();
            scope.spawn(move || {
                let bytes: Vec<u8> = (0..num_bytes).map(|at| byte_at(at, end)).collect();
                let mut sent = 0;
                while sent < num_bytes || !link.is_flushed() {
                    let parts = bytes[sent..].split_at((num_bytes - sent).min(7));
                    let mut stream = link;
                    let result = if sent < num_bytes {
                        stream.write_vectored(&[IoSlice::new(parts.0), IoSlice::new(parts.1)])
                    } else {
                        stream.flush().map(|()| 0)
                    };
                    match result {
                        Ok(moved) => sent += moved,
                        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                    }
                }
            });
            scope.spawn(move || {
                let mut received = 0;
                let mut target = vec![0; 100_003];
                while received < num_bytes {
                    let mut stream = link;
                    match stream.read(&mut target) {
                        Ok(0) => panic!("closed"),
                        Ok(moved) => {
                            let is_same = (0..moved).all(|at| target[at] == byte_at(received + at, 1 - end));
                            assert!(is_same, "at {received}");
                            received += moved;
                        }
                        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                    }
                }
            });
        }
    });
    links[0].shutdown();
    assert_eq!((&links[1]).read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn a_stranger_is_refused_before_he_is_read() {
    let folder = Folder::new().unwrap();
    let (ours, others) = (Authority::new().unwrap(), Authority::new().unwrap());
    let [connected, accepted] = pair(member(&folder, "a", &ours), &member(&folder, "b", &others));
    assert!(explain(&connected.err().unwrap()).unwrap().contains("no authority that is trusted here"));
    assert!(explain(&accepted.err().unwrap()).is_some());

    // One who trusts the cluster but is not of it.
    let files = folder.files("c", Some(&ours), Some(&others.sign("c").unwrap())).unwrap();
    let [connected, accepted] = pair(member(&folder, "a", &ours), &ClusterTls::open(files).unwrap());
    assert!(explain(&accepted.err().unwrap()).unwrap().contains("no authority that is trusted here"));
    let refused = (&connected.unwrap()).read(&mut [0; 8]).unwrap_err();
    assert!(explain(&refused).unwrap().contains("does not trust the authority"), "{refused}");
}

#[test]
fn clear_text_and_silence_end_by_the_deadline() {
    let (folder, authority) = (Folder::new().unwrap(), Authority::new().unwrap());
    for bytes in [&b"LKSHAND1 and more"[..], b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03garbage", b""] {
        let (address, accepted) = accept(member(&folder, "a", &authority));
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(bytes).unwrap();
        let start = Instant::now();
        let error = accepted.join().unwrap().err().unwrap();
        assert!(start.elapsed() < Duration::from_secs(10), "{error}");
    }
}
