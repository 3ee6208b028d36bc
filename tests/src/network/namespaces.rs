//! Network namespaces: the test's own, which routes, and one for each process of the cluster, joined to it by a pair of
//! virtual interfaces. A cut is a rule of the router that drops what two of them send each other.
//! Invariant: this process must have been started by [`apart`]; what is made here is removed when it is dropped, or, however
//! the process ends, by the kernel.

use std::{
    fs,
    net::Ipv4Addr,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};

/// Where the test itself is found by the others.
pub const ROUTER: [u8; 4] = [10, 77, 0, 1];
/// Namespaces for a process and all that it starts, which ends with it.
const UNSHARE: [&str; 5] = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"];
/// What [`Namespaces`] does, tried once.
const TRIAL: &str = "ip link add trial type veth peer name other && echo 1 >/proc/sys/net/ipv4/ip_forward && \
    ip rule add from 10.77.1.2 to 10.77.2.2 blackhole && unshare --net nsenter --net=/proc/self/ns/net true";
/// Longest wait for a namespace.
const PATIENCE: Duration = Duration::from_secs(10);

/// One namespace for each process of a cluster.
pub struct Namespaces(Vec<Holder>);

/// A process that does nothing in a namespace, which lives as long.
struct Holder(Child);

impl Drop for Holder {
    fn drop(&mut self) {
        // It does not end by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A command that runs its arguments in namespaces of their own, as root or, where users may, as anyone; `None` where it is
/// not permitted.
pub fn apart() -> Option<Command> {
    let as_user = ["--user", "--map-root-user"];
    [&[][..], &as_user].into_iter().find_map(|user| {
        let command = || {
            let mut command = Command::new("unshare");
            command.args(user).args(UNSHARE);
            command
        };
        let trial = command().args(["sh", "-c", TRIAL]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        trial.is_ok_and(|status| status.success()).then(command)
    })
}

/// Address of a process, by its number.
pub fn address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, number as u8 + 1, 2)
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        // The kernel removes interfaces some time after their namespaces, whose names the next ones take.
        for number in 0..self.0.len() {
            let _ = ip(&format!("link delete node{number}"));
        }
        let _ = ip(&format!("address delete {}/32 dev lo", Ipv4Addr::from(ROUTER)));
    }
}

impl Namespaces {
    /// Makes so many.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn start(count: usize) -> anyhow::Result<Self> {
        ip("link set lo up")?;
        ip(&format!("address add {}/32 dev lo", Ipv4Addr::from(ROUTER)))?;
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("forwarding")?;
        let holders = (0..count).map(Self::hold).collect::<anyhow::Result<_>>()?;
        Ok(Self(holders))
    }

    /// Makes one and joins it to the router's.
    fn hold(number: usize) -> anyhow::Result<Holder> {
        let child = Command::new("unshare").args(["--net", "sleep", "infinity"]).stdin(Stdio::null()).spawn()?;
        let holder = Holder(child);
        let end = Instant::now() + PATIENCE;
        let own = fs::read_link("/proc/self/ns/net")?;
        while fs::read_link(holder.path()).map_or(true, |path| path == own) {
            ensure!(Instant::now() < end, "no network namespace");
            std::thread::sleep(Duration::from_millis(5));
        }
        let (address, router) = (address(number), Ipv4Addr::new(10, 77, number as u8 + 1, 1));
        ip(&format!("link add node{number} type veth peer name eth0 netns {}", holder.0.id()))?;
        ip(&format!("address add {router}/24 dev node{number}"))?;
        ip(&format!("link set node{number} up"))?;
        let lines = format!(
            "link set lo up\naddress add {address}/24 dev eth0\nlink set eth0 up\nroute add default via {router}\n"
        );
        let mut inside = holder.enter(Path::new("ip"));
        let mut inside = inside.args(["-batch", "-"]).stdin(Stdio::piped()).spawn()?;
        std::io::Write::write_all(&mut inside.stdin.take().context("no standard input")?, lines.as_bytes())?;
        ensure!(inside.wait()?.success(), "cannot set up namespace {number}");
        Ok(holder)
    }

    /// A command that runs `program` in a namespace.
    pub fn command(&self, number: usize, program: &Path) -> Command {
        self.0[number].enter(program)
    }

    /// Cuts two off from each other, or undoes that.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn set(&self, pair: [usize; 2], is_cut: bool) -> anyhow::Result<()> {
        let [one, other] = pair.map(address);
        let verb = if is_cut { "add" } else { "delete" };
        ip(&format!("rule {verb} from {one} to {other} blackhole"))?;
        ip(&format!("rule {verb} from {other} to {one} blackhole"))
    }
}

impl Holder {
    fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.0.id())
    }

    fn enter(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path())).arg("--").arg(program);
        command
    }
}

fn ip(arguments: &str) -> anyhow::Result<()> {
    let status = Command::new("ip").args(arguments.split(' ')).status().context("ip cannot be run")?;
    ensure!(status.success(), "ip {arguments}: {status}");
    Ok(())
}
