//! Several coordinators over a real etcd, each process started by itself, so that each can be killed and restarted by
//! itself, on loopback or on a [`Network`] that can be cut.
//! Invariant: the processes are killed when the [`SharedCluster`] is dropped; clusters take turns as those of `up` do.

use std::{
    fs::File,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    time::Instant,
};

use anyhow::{Context, bail};
use tempfile::TempDir;

use crate::{
    Client, Etcd, cluster, environment,
    network::{Network, Node},
    ports::free_ports,
    process::PATIENCE,
};

/// Between two looks.
const POLL: std::time::Duration = std::time::Duration::from_millis(50);

/// Coordinators and workers of one cluster.
pub struct SharedCluster {
    /// Where they meet.
    pub etcd: Etcd,
    /// What cuts them off from each other, if anything does.
    pub network: Option<Network>,
    /// How every process gets at etcd.
    access: Vec<String>,
    coordinators: Vec<Process>,
    workers: Vec<Process>,
    folder: TempDir,
    _turn: File,
}

/// A process that is killed when this is dropped.
struct Process {
    node: Node,
    arguments: Vec<String>,
    child: Child,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have been killed already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Who and how many.
#[derive(Clone, Copy, Debug)]
pub struct Members<'a> {
    /// Coordinators.
    pub num_coordinators: usize,
    /// Workers, of one thread.
    pub num_workers: usize,
    /// Without so many nothing is planned where nothing serves.
    pub min_workers: usize,
    /// How the coordinators want the model cut.
    pub policy: &'a str,
    /// Further arguments of the workers.
    pub worker_arguments: &'a [&'a str],
    /// Further arguments of the coordinators.
    pub coordinator_arguments: &'a [&'a str],
}

impl<'a> Members<'a> {
    /// So many, all of whom are waited for.
    pub fn new(num_coordinators: usize, num_workers: usize, policy: &'a str) -> Self {
        let (worker_arguments, coordinator_arguments) = (&[][..], &[][..]);
        let min_workers = num_workers;
        Self { num_coordinators, num_workers, min_workers, policy, worker_arguments, coordinator_arguments }
    }
}

impl SharedCluster {
    /// Starts coordinators that want the model cut by `policy`, and workers of one thread.
    ///
    /// # Errors
    /// With the log, if a process does not start.
    pub fn start(num_coordinators: usize, num_workers: usize, policy: &str) -> anyhow::Result<Self> {
        Self::start_members(Members::new(num_coordinators, num_workers, policy))
    }

    /// The same with what `members` says.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_members(members: Members<'_>) -> anyhow::Result<Self> {
        Self::start_over(Etcd::start(1)?, Vec::new(), members)
    }

    /// The same over an etcd that lets in who is started with the flags `access`.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_over(etcd: Etcd, mut access: Vec<String>, members: Members<'_>) -> anyhow::Result<Self> {
        access.push(format!("--etcd={}", etcd.endpoints().join(",")));
        Self::start_in(cluster::turn()?, etcd, access, None, members)
    }

    /// The same on a network.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub async fn start_on(mut network: Network, members: Members<'_>) -> anyhow::Result<Self> {
        let (turn, etcd) = (cluster::turn()?, Etcd::start(1)?);
        let access = vec![format!("--etcd={}", network.connect_etcd(&etcd).await?)];
        Self::start_in(turn, etcd, access, Some(network), members)
    }

    fn start_in(
        turn: File,
        etcd: Etcd,
        access: Vec<String>,
        network: Option<Network>,
        members: Members<'_>,
    ) -> anyhow::Result<Self> {
        let (coordinators, workers, folder) = (Vec::new(), Vec::new(), TempDir::new()?);
        let mut cluster = Self { etcd, network, access, coordinators, workers, folder, _turn: turn };
        for index in 0..members.num_coordinators {
            cluster.add_coordinator(index, members)?;
        }
        for index in 0..members.num_workers {
            cluster.add_worker_with(&format!("worker-{index}"), members.worker_arguments)?;
        }
        for index in 0..members.num_coordinators {
            cluster.wait_listening(index)?;
        }
        Ok(cluster)
    }

    fn add_coordinator(&mut self, index: usize, members: Members<'_>) -> anyhow::Result<()> {
        let node = Node::Coordinator(index);
        let mut arguments = [&[String::from("coordinator")], &self.access[..]].concat();
        match &self.network {
            Some(network) => arguments.extend(network.arguments(node)),
            None => arguments.push(format!("--grpc-listen=127.0.0.1:{}", free_ports(1)?[0])),
        }
        arguments.extend(["--http-listen=127.0.0.1:0", "--model-name=smol"].map(String::from));
        arguments.push(format!("--model={}", environment::model()?.display()));
        arguments.push(format!("--ready-file={}", self.ready_file(index).display()));
        arguments.push(format!("--min-workers={}", members.min_workers));
        arguments.push(format!("--policy={}", members.policy));
        arguments.push(format!("--coordinator-id=coordinator-{index}"));
        arguments.extend(members.coordinator_arguments.iter().map(|&argument| argument.to_owned()));
        let child = self.spawn(node, &arguments)?;
        self.coordinators.push(Process { node, arguments, child });
        Ok(())
    }

    /// Starts one more worker; returns its index.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn add_worker(&mut self, worker_id: &str) -> anyhow::Result<usize> {
        self.add_worker_with(worker_id, &[])
    }

    fn add_worker_with(&mut self, worker_id: &str, further: &[&str]) -> anyhow::Result<usize> {
        let node = Node::Worker(self.workers.len());
        let mut arguments = [&[String::from("worker")], &self.access[..]].concat();
        arguments.extend(self.network.iter().flat_map(|network| network.arguments(node)));
        arguments.extend(["--device=cpu", "--threads-per-device=1"].map(String::from));
        arguments.push(format!("--worker-id={worker_id}"));
        arguments.extend(further.iter().map(|&argument| argument.to_owned()));
        let child = self.spawn(node, &arguments)?;
        self.workers.push(Process { node, arguments, child });
        Ok(self.workers.len() - 1)
    }

    /// gRPC address of a coordinator.
    ///
    /// # Errors
    /// If there is no such coordinator.
    pub fn grpc(&self, index: usize) -> anyhow::Result<&str> {
        let arguments = &self.process(Node::Coordinator(index))?.arguments;
        arguments.iter().find_map(|argument| argument.strip_prefix("--grpc-listen=")).context("no address")
    }

    /// A client of a coordinator.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn client(&self, index: usize) -> anyhow::Result<Client> {
        Client::connect(self.grpc(index)?).await
    }

    /// Index of the coordinator that plans.
    ///
    /// # Errors
    /// If there is none.
    pub fn leader(&self) -> anyhow::Result<usize> {
        let name = self.etcd.control(&["get", "/lockstep/leader", "--print-value-only"])?;
        let index = name.trim().strip_prefix("coordinator-").and_then(|index| index.parse().ok());
        index.with_context(|| format!("no leader: {name:?}"))
    }

    /// Process id of a member.
    ///
    /// # Errors
    /// If there is no such member.
    pub fn pid(&self, node: Node) -> anyhow::Result<u32> {
        Ok(self.process(node)?.child.id())
    }

    /// Kills a member at once.
    ///
    /// # Errors
    /// If there is no such member.
    pub fn kill(&mut self, node: Node) -> anyhow::Result<()> {
        Ok(self.process_mut(node)?.child.kill()?)
    }

    /// Starts a member again that has ended or was killed, under its name and its address.
    ///
    /// # Errors
    /// If there is no such member or it does not start.
    pub fn restart(&mut self, node: Node) -> anyhow::Result<()> {
        self.process_mut(node)?.child.wait()?;
        if let Node::Coordinator(index) = node {
            std::fs::remove_file(self.ready_file(index))?;
        }
        let child = self.spawn(node, &self.process(node)?.arguments)?;
        self.process_mut(node)?.child = child;
        Ok(())
    }

    /// Gives a member the argument `name=value` in place of the one that it has, from its next start on.
    ///
    /// # Errors
    /// If there is no such member.
    pub fn set(&mut self, node: Node, name: &str, value: &str) -> anyhow::Result<()> {
        let arguments = &mut self.process_mut(node)?.arguments;
        arguments.retain(|argument| argument.split_once('=').is_none_or(|(other, _)| other != name));
        arguments.push(format!("{name}={value}"));
        Ok(())
    }

    /// How a member ended, if it has.
    ///
    /// # Errors
    /// If there is no such member.
    pub fn ended(&mut self, node: Node) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.process_mut(node)?.child.try_wait()?)
    }

    /// Waits until a coordinator listens.
    ///
    /// # Errors
    /// If it does not, with the log.
    pub fn wait_listening(&mut self, index: usize) -> anyhow::Result<()> {
        let end = Instant::now() + PATIENCE;
        while !self.ready_file(index).exists() {
            if self.ended(Node::Coordinator(index))?.is_some() || Instant::now() > end {
                bail!("coordinator {index} does not listen: {}", self.log());
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// What the processes logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn ready_file(&self, index: usize) -> PathBuf {
        self.folder.path().join(format!("coordinator-{index}.json"))
    }

    fn process(&self, node: Node) -> anyhow::Result<&Process> {
        self.coordinators.iter().chain(&self.workers).find(|process| process.node == node).context("no such member")
    }

    fn process_mut(&mut self, node: Node) -> anyhow::Result<&mut Process> {
        let mut processes = self.coordinators.iter_mut().chain(&mut self.workers);
        processes.find(|process| process.node == node).context("no such member")
    }

    fn spawn(&self, node: Node, arguments: &[String]) -> anyhow::Result<Child> {
        let log = File::options().create(true).append(true).open(self.folder.path().join("log"))?;
        let binary = environment::binary()?;
        let mut command = match &self.network {
            Some(network) => network.command(node, &binary),
            None => Command::new(binary),
        };
        command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(command.spawn()?)
    }
}
