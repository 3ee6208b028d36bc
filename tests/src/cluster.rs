//! A local cluster as users start it: `lockstep up` and its children.
//! Invariant: its processes end when the [`Cluster`] is dropped, because `up` follows its standard input; clusters take
//! turns through a file lock, also between test processes.

use std::{
    fs::File,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use lockstep_transport::TlsFiles;
use serde_json::Value;
use tempfile::TempDir;

use crate::{Client, environment, process::PATIENCE};

/// Where `up` says what it runs.
const READY_FILE: &str = "ready.json";
/// Between two looks.
const POLL: Duration = Duration::from_millis(50);

/// How the model is cut: over one-device workers on the processor, or over the GPUs of one or several workers.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Ranks that share each layer.
    pub tensor: usize,
    /// Stages of layers.
    pub pipeline: usize,
    /// Threads of each worker on the processor.
    pub threads: usize,
    /// Whether ranks own GPUs.
    pub is_on_gpus: bool,
    /// Worker processes, which share the ranks equally.
    pub workers: usize,
    /// Full copies of the model.
    pub replicas: usize,
    /// Names of the ranks' devices, if they are of other kinds.
    pub devices: Option<&'static str>,
}

impl Layout {
    /// `tensor` × `pipeline` workers of one thread.
    pub fn new(tensor: usize, pipeline: usize) -> Self {
        Self { tensor, pipeline, threads: 1, is_on_gpus: false, workers: tensor * pipeline, replicas: 1, devices: None }
    }

    /// `tensor` × `pipeline` workers with these devices.
    pub fn on(devices: &'static str, tensor: usize, pipeline: usize) -> Self {
        Self { devices: Some(devices), ..Self::new(tensor, pipeline) }
    }

    /// `tensor` × `pipeline` GPUs of one worker.
    pub fn on_gpus(tensor: usize, pipeline: usize) -> Self {
        Self { is_on_gpus: true, workers: 1, ..Self::new(tensor, pipeline) }
    }

    /// The same, each GPU with a worker of its own.
    pub fn on_gpus_of_workers(tensor: usize, pipeline: usize) -> Self {
        Self { is_on_gpus: true, ..Self::new(tensor, pipeline) }
    }

    /// Arguments of `up`.
    fn arguments(&self) -> Vec<String> {
        let num_ranks = self.tensor * self.pipeline * self.replicas;
        let devices = if let Some(devices) = self.devices {
            format!("--device={devices}")
        } else if self.is_on_gpus {
            let names: Vec<String> = (0..num_ranks).map(|ordinal| format!("cuda:{ordinal}")).collect();
            format!("--device={}", names.join(","))
        } else {
            "--device=cpu".to_owned()
        };
        vec![
            devices,
            format!("--workers={}", self.workers),
            format!("--tensor-parallel={}", self.tensor),
            format!("--pipeline-parallel={}", self.pipeline),
            format!("--replicas={}", self.replicas),
            format!("--threads-per-worker={}", self.threads),
        ]
    }
}

/// A running cluster.
pub struct Cluster {
    up: Child,
    folder: TempDir,
    ready: Value,
    _turn: File,
}

impl Cluster {
    /// Starts one on free ports and waits until the model serves.
    ///
    /// # Errors
    /// With the cluster's log, if it does not.
    pub fn start(layout: Layout) -> anyhow::Result<Self> {
        Self::start_with(layout, &environment::model()?)
    }

    /// The same with a model file of the test's own.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(layout: Layout, model: &Path) -> anyhow::Result<Self> {
        Self::start_in(layout, model, &[], &[])
    }

    /// One whose members speak mutual TLS with each other, as `files` say; clients stay in clear text.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_secured(layout: Layout, files: &TlsFiles) -> anyhow::Result<Self> {
        Self::start_in(layout, &environment::model()?, &of_members(files)?, &[])
    }

    /// One whose processes get these variables.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with_environment(layout: Layout, variables: &[(&str, &Path)]) -> anyhow::Result<Self> {
        Self::start_in(layout, &environment::model()?, variables, &[])
    }

    /// One of a model whose processes are given further arguments.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with_arguments(layout: Layout, model: &Path, arguments: &[&str]) -> anyhow::Result<Self> {
        Self::start_in(layout, model, &[], arguments)
    }

    fn start_in(
        layout: Layout,
        model: &Path,
        environment: &[(&str, &Path)],
        arguments: &[&str],
    ) -> anyhow::Result<Self> {
        let turn = turn()?;
        let folder = TempDir::new()?;
        let ready_file = folder.path().join(READY_FILE);
        let log = File::options().create(true).append(true).open(folder.path().join("log"))?;
        let mut up = Command::new(environment::binary()?)
            .arg("up")
            .arg("--exit-on-stdin-close")
            .arg("--model")
            .arg(model)
            .arg("--ready-file")
            .arg(&ready_file)
            .args(["--model-name=smol", "--grpc-port=0", "--http-port=0"])
            .args(layout.arguments())
            .envs(environment.iter().copied())
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let end = Instant::now() + PATIENCE;
        while !ready_file.exists() {
            if up.try_wait()?.is_some() || Instant::now() > end {
                let _ = up.kill();
                bail!("the cluster does not serve: {}", std::fs::read_to_string(folder.path().join("log"))?);
            }
            std::thread::sleep(POLL);
        }
        let ready = serde_json::from_slice(&std::fs::read(&ready_file)?)?;
        Ok(Self { up, folder, ready, _turn: turn })
    }

    /// gRPC address, host:port.
    pub fn grpc(&self) -> String {
        self.ready["grpc"].as_str().unwrap_or_default().to_owned()
    }

    /// HTTP address, host:port.
    pub fn http(&self) -> String {
        self.ready["http"].as_str().unwrap_or_default().to_owned()
    }

    /// Process id of a worker, which changes when it is started again.
    ///
    /// # Errors
    /// If there is no such worker.
    pub fn worker_pid(&self, index: usize) -> anyhow::Result<u64> {
        let ready: Value = serde_json::from_slice(&std::fs::read(self.folder.path().join(READY_FILE))?)?;
        ready["worker_pids"][index].as_u64().with_context(|| format!("no worker {index} in {ready}"))
    }

    /// One more worker of one thread; it is killed when dropped.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn spare_worker(&self, worker_id: &str) -> anyhow::Result<SpareWorker> {
        self.spare_worker_in(worker_id, &[])
    }

    /// The same with the certificates of `files`.
    ///
    /// # Errors
    /// As [`spare_worker`](Self::spare_worker).
    pub fn spare_member(&self, worker_id: &str, files: &TlsFiles) -> anyhow::Result<SpareWorker> {
        self.spare_worker_in(worker_id, &of_members(files)?)
    }

    fn spare_worker_in(&self, worker_id: &str, environment: &[(&str, &Path)]) -> anyhow::Result<SpareWorker> {
        let log = File::options().append(true).open(self.folder.path().join("log"))?;
        let coordinator = format!("--coordinator={}", self.grpc());
        let child = Command::new(environment::binary()?)
            .args(["worker", "--device=cpu", "--threads-per-device=1", "--worker-id", worker_id, &coordinator])
            .envs(environment.iter().copied())
            .stderr(log)
            .spawn()?;
        Ok(SpareWorker(child))
    }

    /// A client of it.
    ///
    /// # Errors
    /// If it cannot connect.
    pub async fn client(&self) -> anyhow::Result<Client> {
        Client::connect(&self.grpc()).await
    }

    /// What its processes logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Stops it as a user does, with Ctrl-C, and returns its exit status and log.
    ///
    /// # Errors
    /// If it does not end.
    pub fn stop(mut self) -> anyhow::Result<(ExitStatus, String)> {
        let sent = Command::new("kill").arg("-INT").arg(self.up.id().to_string()).status()?;
        anyhow::ensure!(sent.success(), "the cluster takes no signal");
        let status = self.wait()?;
        Ok((status, self.log()))
    }

    fn end(&mut self) -> anyhow::Result<ExitStatus> {
        drop(self.up.stdin.take());
        self.wait()
    }

    fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Some(status) = self.up.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(POLL);
        }
        self.up.kill()?;
        bail!("the cluster did not stop: {}", self.log())
    }
}

/// A worker that `up` knows nothing of.
pub struct SpareWorker(Child);

impl SpareWorker {
    /// Its process id.
    pub fn pid(&self) -> u64 {
        self.0.id().into()
    }
}

impl Drop for SpareWorker {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("{error}");
        }
    }
}

/// The variables that give a process the certificates of a member.
fn of_members(files: &TlsFiles) -> anyhow::Result<[(&'static str, &Path); 3]> {
    let (cert, key) = files.pair.as_ref().context("a member without a certificate")?;
    let ca = files.ca.as_ref().context("a member without an authority")?;
    Ok([("LOCKSTEP_CLUSTER_CA", ca), ("LOCKSTEP_CLUSTER_CERT", cert), ("LOCKSTEP_CLUSTER_KEY", key)])
}

/// Waits for this process's turn to run a cluster; it ends when the file is closed.
///
/// # Errors
/// If the lock file cannot be made.
pub fn turn() -> anyhow::Result<File> {
    let path = environment::target().join("cluster.lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.with_context(|| format!("lock file {}", path.display()))?;
    file.lock()?;
    Ok(file)
}
