//! The devices of a cluster and how fast they are, as the planner sees them.
//! For: built from worker registrations, from `--devices`, or from a topology file of a cluster that does not exist.
//! Not here: reading the file, measuring a device.
//!
//! The form of a topology file is described in `docs/topology.md`.

use lockstep_formats::{Dtype, PeerLink};
use serde::{Deserialize, Serialize};

use crate::PlanError;

/// A cluster: devices in a fixed order, and the links between hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Devices; a plan refers to them by their index here.
    pub devices: Vec<DeviceSpec>,
    /// Links between two devices of one host; `None`: those of the slowest kind of device that takes part.
    pub intra_host: Option<LinkSpec>,
    /// Links between hosts; `None`: likewise.
    pub inter_host: Option<LinkSpec>,
}

/// One device that can hold a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// Worker process that owns the device.
    pub worker_id: String,
    /// Index of the device within its worker.
    pub local_rank: usize,
    /// Host name; ranks of one tensor-parallel group prefer one host.
    pub host: String,
    /// Kind and model, such as `cpu AMD EPYC` or `cuda NVIDIA H200`.
    pub name: String,
    /// Memory that weights, KV blocks and activations may use.
    pub memory_bytes: u64,
    /// Sustained memory read bandwidth.
    pub memory_bytes_per_second: f64,
    /// Sustained multiply-add rate in quantized matmul, in floating-point operations (two per multiply-add).
    pub operations_per_second: f64,
    /// Type of keys and values that is asked for; `None`: what suits the model.
    #[serde(default)]
    pub dtype: Option<Dtype>,
    /// What joins it with those devices of its host that have one too; `None`: what the topology says of the host.
    #[serde(default)]
    pub peer_link: Option<PeerLink>,
}

impl DeviceSpec {
    /// Worker and index, as people write it: `a/0`.
    pub fn label(&self) -> String {
        format!("{}/{}", self.worker_id, self.local_rank)
    }

    /// Whether it is a processor: then its memory is that of the host, which others use too, and ranks meet over TCP.
    pub(crate) fn is_processor(&self) -> bool {
        self.name.starts_with("cpu")
    }
}

/// The part of a device's free memory that a plan may use; a tenth is left to the rest of the machine.
pub fn usable_bytes(free_bytes: u64) -> u64 {
    free_bytes / 10 * 9
}

/// Cost of moving a message.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// One-way time of an empty message, seconds.
    pub latency_seconds: f64,
    /// Sustained bandwidth in each direction.
    pub bytes_per_second: f64,
}

impl LinkSpec {
    /// TCP between processes of one host.
    pub const TCP_LOOPBACK: Self = Self { latency_seconds: 15e-6, bytes_per_second: 1.7e9 };
    /// TCP between hosts, ten gigabits a second.
    pub const TCP_ETHERNET: Self = Self { latency_seconds: 50e-6, bytes_per_second: 1.1e9 };

    fn of(link: PeerLink) -> Self {
        match link {
            PeerLink::Nvlink => NVLINK,
            PeerLink::Pcie => PCIE,
        }
    }
}

/// A device that is known by name. Memory is that of an idle device; rates are sustained ones, about nine tenths of the
/// data sheet's bandwidth and what quantized matmul reaches of its arithmetic.
struct Kind {
    name: &'static str,
    memory_bytes: f64,
    memory_bytes_per_second: f64,
    operations_per_second: f64,
    intra_host: LinkSpec,
    inter_host: LinkSpec,
}

const NVLINK: LinkSpec = LinkSpec { latency_seconds: 5e-6, bytes_per_second: 300e9 };
const PCIE: LinkSpec = LinkSpec { latency_seconds: 10e-6, bytes_per_second: 20e9 };
const FABRIC: LinkSpec = LinkSpec { latency_seconds: 25e-6, bytes_per_second: 20e9 };

const KINDS: [Kind; 7] = [
    kind("h200", 150e9, 4.5e12, 600e12, NVLINK, FABRIC),
    kind("h100", 85e9, 3.0e12, 600e12, NVLINK, FABRIC),
    kind("a100-80g", 85e9, 1.8e12, 220e12, NVLINK, FABRIC),
    kind("l40s", 48e9, 0.78e12, 250e12, PCIE, FABRIC),
    kind("rtx4090", 25e9, 0.92e12, 250e12, PCIE, LinkSpec::TCP_ETHERNET),
    kind("m2-ultra", 155e9, 0.7e12, 25e12, PCIE, LinkSpec::TCP_ETHERNET),
    kind("cpu", 16e9, 20e9, 0.4e12, LinkSpec::TCP_LOOPBACK, LinkSpec::TCP_ETHERNET),
];

const fn kind(
    name: &'static str,
    memory_bytes: f64,
    memory_bytes_per_second: f64,
    operations_per_second: f64,
    intra_host: LinkSpec,
    inter_host: LinkSpec,
) -> Kind {
    Kind { name, memory_bytes, memory_bytes_per_second, operations_per_second, intra_host, inter_host }
}

/// Most devices of a described cluster: a slip of the keyboard must not take all memory.
const MAX_DEVICES: usize = 4096;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TopologyFile {
    hosts: Vec<HostEntry>,
    intra_host: Option<LinkSpec>,
    inter_host: Option<LinkSpec>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostEntry {
    name: String,
    devices: Vec<DeviceEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceEntry {
    kind: String,
    #[serde(default = "one")]
    count: usize,
    memory_bytes: Option<u64>,
    memory_bytes_per_second: Option<f64>,
    operations_per_second: Option<f64>,
}

fn one() -> usize {
    1
}

impl Topology {
    /// The cluster that a short text describes: `8*h200@a, 8*h200@b` or `2*cpu`. Parts without `@host` are a host each.
    /// The kinds are [`Self::kinds`].
    ///
    /// # Errors
    /// [`PlanError::Topology`] naming the part that is not understood.
    pub fn parse_devices(text: &str) -> Result<Self, PlanError> {
        let mut hosts: Vec<HostEntry> = Vec::new();
        for (index, part) in text.split(',').enumerate() {
            let (devices, host) = part.split_once('@').unwrap_or((part, ""));
            let host = if host.trim().is_empty() { format!("host-{index}") } else { host.trim().to_owned() };
            let (count, kind) = devices.split_once('*').unwrap_or(("1", devices));
            let count = count
                .trim()
                .parse()
                .map_err(|_| topology_error(part.trim(), "expected COUNT*KIND@HOST, such as 8*h200@a or cpu"))?;
            let entry = DeviceEntry {
                kind: kind.trim().to_owned(),
                count,
                memory_bytes: None,
                memory_bytes_per_second: None,
                operations_per_second: None,
            };
            match hosts.iter_mut().find(|known| known.name == host) {
                Some(known) => known.devices.push(entry),
                None => hosts.push(HostEntry { name: host, devices: vec![entry] }),
            }
        }
        Self::build(TopologyFile { hosts, intra_host: None, inter_host: None })
    }

    /// Names of the kinds of devices that descriptions may use.
    pub fn kinds() -> impl Iterator<Item = &'static str> {
        KINDS.iter().map(|kind| kind.name)
    }

    /// The cluster that a topology file describes.
    ///
    /// # Errors
    /// [`PlanError::Topology`] naming the field.
    pub fn from_toml(text: &str) -> Result<Self, PlanError> {
        let file = toml::from_str(text).map_err(|error| topology_error("file", error.to_string().trim_end()))?;
        Self::build(file)
    }

    /// The link that holds up a group of `devices`.
    pub(crate) fn link(&self, devices: &[usize]) -> LinkSpec {
        let specs = || devices.iter().filter_map(|&device| self.devices.get(device));
        let is_one_host = specs().zip(specs().skip(1)).all(|(one, next)| one.host == next.host);
        let slowest = |slowest: PeerLink, spec: &DeviceSpec| spec.peer_link.map(|link| slowest.max(link));
        if let (true, Some(link)) = (is_one_host, specs().try_fold(PeerLink::Nvlink, slowest)) {
            return LinkSpec::of(link);
        }
        let stated = if is_one_host { self.intra_host } else { self.inter_host };
        stated.unwrap_or_else(|| {
            // A kind's name is part of the name that a worker reports: `cuda NVIDIA H200`. Through Vulkan, Metal and DX12
            // devices meet over their hosts, whatever they are.
            let kind = |name: &str| {
                let meets_over_hosts = ["vulkan:", "metal:", "dx12:"].iter().any(|prefix| name.starts_with(prefix));
                let known = KINDS.iter().rposition(|kind| name.to_lowercase().contains(kind.name));
                known.filter(|_| !meets_over_hosts)
            };
            let slowest = specs().map(|spec| kind(&spec.name).unwrap_or(KINDS.len() - 1)).max();
            let kind = &KINDS[slowest.unwrap_or(KINDS.len() - 1)];
            if is_one_host { kind.intra_host } else { kind.inter_host }
        })
    }

    fn build(file: TopologyFile) -> Result<Self, PlanError> {
        let mut devices = Vec::new();
        for host in &file.hosts {
            let mut local_rank = 0;
            for entry in &host.devices {
                let known = KINDS.iter().find(|known| known.name == entry.kind).ok_or_else(|| {
                    let names = Self::kinds().collect::<Vec<_>>().join(", ");
                    topology_error("kind", format!("{:?} is none of {names}", entry.kind))
                })?;
                if entry.count == 0 || entry.count > MAX_DEVICES - devices.len() {
                    let problem = format!("{} of {} is not within 1..={MAX_DEVICES}", entry.count, entry.kind);
                    return Err(topology_error("count", problem));
                }
                for _ in 0..entry.count {
                    devices.push(DeviceSpec {
                        worker_id: host.name.clone(),
                        local_rank,
                        host: host.name.clone(),
                        name: entry.kind.clone(),
                        memory_bytes: entry.memory_bytes.unwrap_or(usable_bytes(known.memory_bytes as u64)),
                        memory_bytes_per_second: entry.memory_bytes_per_second.unwrap_or(known.memory_bytes_per_second),
                        operations_per_second: entry.operations_per_second.unwrap_or(known.operations_per_second),
                        dtype: None,
                        peer_link: None,
                    });
                    local_rank += 1;
                }
            }
        }
        let topology = Self { devices, intra_host: file.intra_host, inter_host: file.inter_host };
        topology.check()?;
        Ok(topology)
    }

    /// Accepts a topology whose rates are usable numbers.
    ///
    /// # Errors
    /// [`PlanError::Topology`] naming the device or link and its field.
    pub fn check(&self) -> Result<(), PlanError> {
        let positive = |field: String, value: f64| {
            let is_usable = value.is_finite() && value > 0.0;
            if is_usable { Ok(()) } else { Err(topology_error(field, format!("{value} is not a positive number"))) }
        };
        if self.devices.is_empty() {
            return Err(topology_error("devices", "the cluster has none"));
        }
        for device in &self.devices {
            let at = format!("device {}", device.label());
            positive(format!("{at}: memory_bytes_per_second"), device.memory_bytes_per_second)?;
            positive(format!("{at}: operations_per_second"), device.operations_per_second)?;
        }
        for (name, link) in [("intra_host", &self.intra_host), ("inter_host", &self.inter_host)] {
            let Some(link) = link else { continue };
            positive(format!("{name}: bytes_per_second"), link.bytes_per_second)?;
            positive(format!("{name}: latency_seconds"), link.latency_seconds)?;
        }
        Ok(())
    }
}

fn topology_error(field: impl Into<String>, problem: impl Into<String>) -> PlanError {
    PlanError::Topology { field: field.into(), problem: problem.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_describe_clusters() {
        let topology = Topology::parse_devices("8*h200@a, 8*h200@b,cpu").unwrap();
        assert_eq!(topology.devices.len(), 17);
        assert_eq!(topology.devices[15].host, "b");
        assert_eq!(topology.devices[15].local_rank, 7);
        // A slow device slows only the links that it takes part in.
        assert_eq!((topology.link(&[0, 1]), topology.link(&[7, 8])), (NVLINK, FABRIC));
        assert_eq!(topology.link(&[15, 16]), LinkSpec::TCP_ETHERNET);
    }

    #[test]
    fn the_documented_file_is_read() {
        let document = include_str!("../../docs/topology.md");
        let sample = document.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        let topology = Topology::from_toml(sample).unwrap();
        assert_eq!((topology.devices.len(), topology.devices[15].label()), (16, "b/7".to_owned()));
        assert_eq!(topology.link(&[0, 7]), NVLINK);
        assert_eq!(topology.link(&[0, 8]), LinkSpec { latency_seconds: 20e-6, bytes_per_second: 25e9 });
        for kind in Topology::kinds() {
            assert!(document.contains(&format!("| `{kind}` |")), "{kind} is not documented");
        }
    }

    #[test]
    fn wrong_texts_are_refused_by_name() {
        for (text, named) in
            [("", "kind"), ("3*tpu", "tpu"), ("x*cpu", "x*cpu"), ("0*cpu", "count"), ("9999*cpu", "count")]
        {
            let message = Topology::parse_devices(text).unwrap_err().to_string();
            assert!(message.contains(named), "{text}: {message}");
        }
        let message = Topology::from_toml("hosts = []\nnodes = 3").unwrap_err().to_string();
        assert!(message.contains("nodes"), "{message}");
        assert!(Topology::from_toml("hosts = []").is_err());
    }
}
