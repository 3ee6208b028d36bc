//! Real etcd processes on loopback, from Debian's packages etcd-server and etcd-client.
//! Invariant: they are killed and their folders removed when the [`Etcd`] is dropped.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use lockstep_transport::TlsFiles;
use tempfile::TempDir;

use crate::ports::free_ports;

/// Longest wait for a member to answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks.
const POLL: Duration = Duration::from_millis(50);

/// A cluster of etcd.
pub struct Etcd {
    members: Vec<Member>,
    folder: TempDir,
    /// Flags with which etcdctl is let in.
    access: Vec<String>,
}

struct Member {
    client_url: String,
    arguments: Vec<String>,
    log: PathBuf,
    child: Child,
}

impl Etcd {
    /// Starts so many members and waits until they answer.
    ///
    /// # Errors
    /// If etcd is not installed or does not start.
    pub fn start(num_members: usize) -> anyhow::Result<Self> {
        Self::start_with(num_members, None)
    }

    /// Starts one member that shows the certificate of `files` and demands one of its authority.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_secured(files: &TlsFiles) -> anyhow::Result<Self> {
        Self::start_with(1, Some(files))
    }

    fn start_with(num_members: usize, tls: Option<&TlsFiles>) -> anyhow::Result<Self> {
        let (mut secured, mut access) = (Vec::new(), Vec::new());
        if let Some(TlsFiles { ca, pair }) = tls {
            let (ca, (cert, key)) = ca.as_ref().zip(pair.as_ref()).context("a member needs all files")?;
            let file = |name: &str, path: &Path| format!("--{name}={}", path.display());
            secured.push("--client-cert-auth".to_owned());
            secured.extend([file("trusted-ca-file", ca), file("cert-file", cert), file("key-file", key)]);
            access.extend([file("cacert", ca), file("cert", cert), file("key", key)]);
        }
        let client_scheme = if tls.is_some() { "https" } else { "http" };
        let folder = TempDir::new()?;
        let ports = free_ports(2 * num_members)?;
        let url = |scheme: &str, port: u16| format!("{scheme}://127.0.0.1:{port}");
        let urls = |pair: &[u16]| (url(client_scheme, pair[0]), url("http", pair[1]));
        let pairs: Vec<(String, String)> = ports.chunks(2).map(urls).collect();
        let peers: Vec<String> =
            pairs.iter().enumerate().map(|(index, (_, peer))| format!("n{index}={peer}")).collect();
        let mut members = Vec::new();
        for (index, (client_url, peer_url)) in pairs.iter().enumerate() {
            let data = folder.path().join(format!("data-{index}"));
            let arguments = [
                ("--name", format!("n{index}")),
                ("--data-dir", data.display().to_string()),
                ("--listen-client-urls", client_url.clone()),
                ("--advertise-client-urls", client_url.clone()),
                ("--listen-peer-urls", peer_url.clone()),
                ("--initial-advertise-peer-urls", peer_url.clone()),
                ("--initial-cluster", peers.join(",")),
                ("--initial-cluster-state", "new".to_owned()),
                ("--log-level", "error".to_owned()),
            ];
            let mut arguments: Vec<String> =
                arguments.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect();
            arguments.push("--unsafe-no-fsync".to_owned());
            arguments.extend(secured.iter().cloned());
            let log = folder.path().join(format!("log-{index}"));
            let child = spawn(&arguments, &log)?;
            members.push(Member { client_url: client_url.clone(), arguments, log, child });
        }
        let etcd = Self { members, folder, access };
        etcd.wait_healthy()?;
        Ok(etcd)
    }

    /// Client URLs of all members.
    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(|member| member.client_url.clone()).collect()
    }

    /// Kills a member.
    ///
    /// # Errors
    /// If there is no such member.
    pub fn kill(&mut self, index: usize) -> anyhow::Result<()> {
        let member = self.members.get_mut(index).context("no such member")?;
        member.child.kill()?;
        member.child.wait()?;
        Ok(())
    }

    /// Starts a member again that was killed, and waits until it answers.
    ///
    /// # Errors
    /// If it does not.
    pub fn restart(&mut self, index: usize) -> anyhow::Result<()> {
        let member = self.members.get_mut(index).context("no such member")?;
        member.child = spawn(&member.arguments, &member.log)?;
        self.wait_healthy()
    }

    /// Process id of a member.
    ///
    /// # Errors
    /// If there is no such member.
    pub fn pid(&self, index: usize) -> anyhow::Result<u32> {
        Ok(self.members.get(index).context("no such member")?.child.id())
    }

    /// Runs etcdctl and returns what it prints.
    ///
    /// # Errors
    /// If it fails.
    pub fn control(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .arg(format!("--endpoints={}", self.endpoints().join(",")))
            .args(&self.access)
            .args(arguments)
            .output()
            .context("etcdctl cannot be run (Debian: apt-get install etcd-client)")?;
        ensure!(output.status.success(), "etcdctl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }

    /// From now on nobody does anything without a password; `user` may use the keys that begin with `prefix`.
    ///
    /// # Errors
    /// If etcd refuses.
    pub fn demand_password(&mut self, user: &str, password: &str, prefix: &str) -> anyhow::Result<()> {
        let with_password = |user: &str, password: &str| format!("{user}:{password}");
        self.control(&["user", "add", "root:root"])?;
        self.control(&["role", "add", user])?;
        self.control(&["role", "grant-permission", user, "readwrite", prefix, "--prefix=true"])?;
        self.control(&["user", "add", &with_password(user, password)])?;
        self.control(&["user", "grant-role", user, user])?;
        self.control(&["auth", "enable"])?;
        self.access.push("--user=root:root".to_owned());
        Ok(())
    }

    /// Gives a user another password.
    ///
    /// # Errors
    /// If etcd refuses.
    pub fn change_password(&self, user: &str, password: &str) -> anyhow::Result<()> {
        self.control(&["user", "delete", user])?;
        self.control(&["user", "add", &format!("{user}:{password}")])?;
        self.control(&["user", "grant-role", user, user]).map(drop)
    }

    /// Forgets the history of all keys up to now.
    ///
    /// # Errors
    /// If etcd refuses.
    pub fn compact(&self) -> anyhow::Result<()> {
        let status: serde_json::Value = serde_json::from_str(&self.control(&["get", "any", "--write-out=json"])?)?;
        let revision = status["header"]["revision"].as_i64().context("no revision")?;
        self.control(&["compact", &revision.to_string()]).map(drop)
    }

    fn wait_healthy(&self) -> anyhow::Result<()> {
        let end = Instant::now() + PATIENCE;
        while let Err(error) = self.control(&["endpoint", "health"]) {
            if Instant::now() > end {
                let log = std::fs::read_to_string(self.folder.path().join("log-0")).unwrap_or_default();
                bail!("etcd does not answer: {error}\n{log}");
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for member in &mut self.members {
            // It may have been killed already.
            let _ = member.child.kill();
            let _ = member.child.wait();
        }
    }
}

fn spawn(arguments: &[String], log: &PathBuf) -> anyhow::Result<Child> {
    let log = File::options().create(true).append(true).open(log)?;
    Command::new("etcd")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("etcd cannot be started (Debian: apt-get install etcd-server)")
}
