//! Ports for processes that bind them later, and, when they are killed, again.
//! Invariant: none is one that the system gives to connections that go out or to who asks for any port: nobody takes it while
//! its process is away.

use std::{
    net::{Ipv4Addr, TcpListener},
    ops::Range,
};

use anyhow::bail;

/// What the system gives by itself, if it does not say.
const FIRST_GIVEN: u16 = 32_768;
/// Ports that are looked at before none is taken to be free.
const TRIES: usize = 1000;

/// Ports at which nobody listened a moment ago.
///
/// # Errors
/// If there are none.
pub fn free_ports(count: usize) -> anyhow::Result<Vec<u16>> {
    let range = range();
    let mut ports = Vec::new();
    for _ in 0..TRIES {
        if ports.len() == count {
            return Ok(ports);
        }
        let port = rand::random_range(range.clone());
        if !ports.contains(&port) && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            ports.push(port);
        }
    }
    bail!("only {} of {count} ports are free among {range:?}", ports.len())
}

/// The upper half of those below what the system gives.
fn range() -> Range<u16> {
    let given = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let first = given.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(FIRST_GIVEN);
    first / 2..first
}
