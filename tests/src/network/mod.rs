//! A network that a test can cut, for the coordinators and workers of a [`SharedCluster`](crate::SharedCluster).
//!
//! - [`namespaces`]: every process has a network namespace of its own, and what the others send it comes through a router
//!   that can drop it: where that is permitted. [`proxy`]: on loopback, through proxies that can fall silent.
//!
//! Invariants: this machine's own network is not touched; a cut is silent, nobody is told; whatever was made ends with the
//! test's process.

mod namespaces;
mod proxy;

use std::{net::SocketAddr, path::Path, process::Command};

use anyhow::Context;

use self::{namespaces::Namespaces, proxy::Proxy};
use crate::{Etcd, ports::free_ports};

/// Names the process that `run_apart` started.
const APART: &str = "LOCKSTEP_TEST_APART";
/// Asks for proxies.
const PROXIES: &str = "LOCKSTEP_TEST_PROXIES";
/// Port of coordinators in their namespaces.
const GRPC_PORT: u16 = 7070;

/// A process of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// By index.
    Coordinator(usize),
    /// By index.
    Worker(usize),
}

/// What is cut off from what.
#[derive(Clone, Debug)]
pub enum Cut {
    /// These workers from each other; where there are proxies, the ranks of these workers from all others.
    Ranks(Vec<usize>),
    /// A worker from all coordinators.
    Coordinators(usize),
    /// Everybody from etcd.
    Etcd,
}

/// Where the processes of a cluster meet.
pub struct Network {
    num_coordinators: usize,
    paths: Paths,
    etcd: Option<Proxy>,
}

enum Paths {
    /// One for each coordinator, then for each worker.
    Namespaces(Namespaces),
    /// For each worker, gRPC and ranks; coordinators listen on these ports.
    Proxies { workers: Vec<[Proxy; 2]>, ports: Vec<u16> },
}

/// Runs this executable once more, with these arguments, in namespaces of its own if they are permitted; whether it did, or
/// the caller has to go on itself.
///
/// # Errors
/// If it fails there.
pub fn run_apart(arguments: &[&str]) -> anyhow::Result<bool> {
    if std::env::var_os(APART).is_some() {
        return Ok(false);
    }
    let apart = if std::env::var_os(PROXIES).is_some() { None } else { namespaces::apart() };
    let Some(mut apart) = apart else {
        println!("network faults by proxies: namespaces are not permitted here, or not wanted");
        return Ok(false);
    };
    let status = apart.arg(std::env::current_exe()?).args(arguments).env(APART, "1").status()?;
    anyhow::ensure!(status.success(), "{arguments:?} in namespaces of its own: {status}");
    Ok(true)
}

impl Network {
    /// Namespaces if [`run_apart`] started this process, else proxies.
    ///
    /// # Errors
    /// If it cannot be made.
    pub async fn start(num_coordinators: usize, num_workers: usize) -> anyhow::Result<Self> {
        let paths = if std::env::var_os(APART).is_some() {
            Paths::Namespaces(Namespaces::start(num_coordinators + num_workers)?)
        } else {
            let mut workers = Vec::new();
            for index in 0..num_workers {
                let ports = free_ports(2)?;
                let [grpc, ranks] = [0, 1].map(|port| worker_address(index, ports[port]));
                workers.push([through(index, grpc).await?, through(index, ranks).await?]);
            }
            Paths::Proxies { workers, ports: free_ports(num_coordinators)? }
        };
        Ok(Self { num_coordinators, paths, etcd: None })
    }

    /// What cuts it.
    pub fn means(&self) -> &'static str {
        match self.paths {
            Paths::Namespaces(_) => "namespaces",
            Paths::Proxies { .. } => "proxies",
        }
    }

    /// Gives every process a way to etcd; returns its URL.
    ///
    /// # Errors
    /// If there is no such way.
    pub async fn connect_etcd(&mut self, etcd: &Etcd) -> anyhow::Result<String> {
        let url = etcd.endpoints().into_iter().next().context("etcd without members")?;
        let address: SocketAddr = url.trim_start_matches("http://").parse()?;
        let at = match self.paths {
            Paths::Namespaces(_) => SocketAddr::from((namespaces::ROUTER, address.port())),
            Paths::Proxies { .. } => SocketAddr::from(([127, 0, 2, 1], address.port())),
        };
        self.etcd = Some(Proxy::start(at, address).await?);
        Ok(format!("http://{at}"))
    }

    /// A command that runs `program` as a process of `node`.
    pub fn command(&self, node: Node, program: &Path) -> Command {
        match &self.paths {
            Paths::Namespaces(namespaces) => namespaces.command(self.number(node), program),
            Paths::Proxies { .. } => Command::new(program),
        }
    }

    /// The flags with which the process of `node` meets the others.
    pub fn arguments(&self, node: Node) -> Vec<String> {
        let mut arguments = vec![String::from("--insecure")];
        match (node, &self.paths) {
            (Node::Coordinator(index), _) => arguments.push(format!("--grpc-listen={}", self.grpc(index))),
            (Node::Worker(_), Paths::Namespaces(_)) => {
                arguments.push(format!("--advertise-host={}", namespaces::address(self.number(node))));
            }
            (Node::Worker(index), Paths::Proxies { workers, .. }) => {
                let [grpc, ranks] = &workers[index];
                arguments.push(format!("--advertise-host={}", grpc.at.ip()));
                arguments.push(format!("--listen={}", grpc.to));
                arguments.push(format!("--rank-listen={}", ranks.to));
            }
        }
        arguments
    }

    /// Where a coordinator listens.
    pub fn grpc(&self, coordinator: usize) -> SocketAddr {
        match &self.paths {
            Paths::Namespaces(_) => {
                (namespaces::address(self.number(Node::Coordinator(coordinator))), GRPC_PORT).into()
            }
            Paths::Proxies { ports, .. } => ([127, 0, 0, 1], ports[coordinator]).into(),
        }
    }

    /// Cuts.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn cut(&self, cut: &Cut) -> anyhow::Result<()> {
        self.set(cut, true)
    }

    /// Undoes [`cut`](Self::cut).
    ///
    /// # Errors
    /// If the system refuses.
    pub fn heal(&self, cut: &Cut) -> anyhow::Result<()> {
        self.set(cut, false)
    }

    fn set(&self, cut: &Cut, is_cut: bool) -> anyhow::Result<()> {
        match (cut, &self.paths) {
            (Cut::Etcd, _) => self.etcd.iter().for_each(|proxy| proxy.set(is_cut)),
            (Cut::Ranks(cut), Paths::Proxies { workers, .. }) => {
                cut.iter().for_each(|&worker| workers[worker][1].set(is_cut));
            }
            (Cut::Coordinators(worker), Paths::Proxies { workers, .. }) => workers[*worker][0].set(is_cut),
            (Cut::Ranks(workers), Paths::Namespaces(namespaces)) => {
                for (position, &one) in workers.iter().enumerate() {
                    for &other in &workers[position + 1..] {
                        let pair = [one, other].map(|worker| self.number(Node::Worker(worker)));
                        namespaces.set(pair, is_cut)?;
                    }
                }
            }
            (Cut::Coordinators(worker), Paths::Namespaces(namespaces)) => {
                for coordinator in 0..self.num_coordinators {
                    let pair = [Node::Coordinator(coordinator), Node::Worker(*worker)];
                    namespaces.set(pair.map(|node| self.number(node)), is_cut)?;
                }
            }
        }
        Ok(())
    }

    fn number(&self, node: Node) -> usize {
        match node {
            Node::Coordinator(index) => index,
            Node::Worker(index) => self.num_coordinators + index,
        }
    }
}

/// Where a worker that is reached through proxies listens.
fn worker_address(index: usize, port: u16) -> SocketAddr {
    ([127, 0, 1, index as u8 + 1], port).into()
}

/// A proxy to a port of a worker.
async fn through(index: usize, to: SocketAddr) -> anyhow::Result<Proxy> {
    Ok(Proxy::start(([127, 0, 2, index as u8 + 2], to.port()).into(), to).await?)
}
