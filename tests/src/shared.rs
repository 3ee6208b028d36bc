//! Several coordinators over a real etcd, each process started by itself, so that each can be killed by itself.
//! Invariant: the processes are killed when the [`SharedCluster`] is dropped; clusters take turns as those of `up` do.

use std::{
    fs::File,
    process::{Child, Command, Stdio},
    time::Instant,
};

use anyhow::{Context, bail};
use serde_json::Value;
use tempfile::TempDir;

use crate::{Client, Etcd, cluster, environment, process::PATIENCE};

/// Between two looks.
const POLL: std::time::Duration = std::time::Duration::from_millis(50);

/// Coordinators and workers of one cluster.
pub struct SharedCluster {
    /// Where they meet.
    pub etcd: Etcd,
    coordinators: Vec<Process>,
    workers: Vec<Process>,
    folder: TempDir,
    /// How every process gets at etcd.
    access: Vec<String>,
    _turn: File,
}

/// A process that is killed when this is dropped.
struct Process {
    child: Child,
    /// gRPC address of a coordinator.
    grpc: String,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have been killed already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl SharedCluster {
    /// Starts coordinators that want the model cut by `policy`, and workers of one thread.
    ///
    /// # Errors
    /// With the log, if a process does not start.
    pub fn start(num_coordinators: usize, num_workers: usize, policy: &str) -> anyhow::Result<Self> {
        Self::start_on(Etcd::start(1)?, Vec::new(), num_coordinators, num_workers, policy)
    }

    /// The same over an etcd that lets in who is started with the flags `access`.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_on(
        etcd: Etcd,
        access: Vec<String>,
        num_coordinators: usize,
        num_workers: usize,
        policy: &str,
    ) -> anyhow::Result<Self> {
        let turn = cluster::turn()?;
        let folder = TempDir::new()?;
        let mut cluster = Self { etcd, coordinators: Vec::new(), workers: Vec::new(), folder, access, _turn: turn };
        let min_workers = format!("--min-workers={num_workers}");
        for index in 0..num_coordinators {
            let ready_file = cluster.folder.path().join(format!("coordinator-{index}.json"));
            let model = environment::model()?;
            let arguments =
                ["--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", "--model-name=smol", &min_workers];
            let mut command = cluster.command("coordinator")?;
            command.args(arguments).arg("--model").arg(model).arg("--ready-file").arg(&ready_file);
            command.args([format!("--policy={policy}"), format!("--coordinator-id=coordinator-{index}")]);
            cluster.coordinators.push(Process { child: command.spawn()?, grpc: String::new() });
        }
        for index in 0..num_workers {
            cluster.add_worker(&format!("worker-{index}"))?;
        }
        for index in 0..num_coordinators {
            let ready = cluster.ready(index)?;
            cluster.coordinators[index].grpc = ready["grpc"].as_str().context("no address")?.to_owned();
        }
        Ok(cluster)
    }

    /// Starts one more worker; returns its index.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn add_worker(&mut self, worker_id: &str) -> anyhow::Result<usize> {
        let mut command = self.command("worker")?;
        command.args(["--device=cpu", "--threads-per-device=1", "--worker-id", worker_id]);
        self.workers.push(Process { child: command.spawn()?, grpc: String::new() });
        Ok(self.workers.len() - 1)
    }

    /// gRPC address of a coordinator.
    ///
    /// # Errors
    /// If there is no such coordinator.
    pub fn grpc(&self, index: usize) -> anyhow::Result<&str> {
        Ok(&self.coordinators.get(index).context("no such coordinator")?.grpc)
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

    /// Kills a coordinator at once.
    ///
    /// # Errors
    /// If there is no such coordinator.
    pub fn kill_coordinator(&mut self, index: usize) -> anyhow::Result<()> {
        Ok(self.coordinators.get_mut(index).context("no such coordinator")?.child.kill()?)
    }

    /// Kills a worker at once.
    ///
    /// # Errors
    /// If there is no such worker.
    pub fn kill_worker(&mut self, index: usize) -> anyhow::Result<()> {
        Ok(self.workers.get_mut(index).context("no such worker")?.child.kill()?)
    }

    /// What the processes logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn command(&self, role: &str) -> anyhow::Result<Command> {
        let log = File::options().create(true).append(true).open(self.folder.path().join("log"))?;
        let mut command = Command::new(environment::binary()?);
        command.arg(role).arg(format!("--etcd={}", self.etcd.endpoints().join(","))).args(&self.access);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(command)
    }

    /// The ready file of a coordinator, once it is there.
    fn ready(&mut self, index: usize) -> anyhow::Result<Value> {
        let path = self.folder.path().join(format!("coordinator-{index}.json"));
        let end = Instant::now() + PATIENCE;
        while !path.exists() {
            if self.coordinators[index].child.try_wait()?.is_some() || Instant::now() > end {
                bail!("coordinator {index} does not listen: {}", self.log());
            }
            std::thread::sleep(POLL);
        }
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    }
}
