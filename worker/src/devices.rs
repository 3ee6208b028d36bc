//! Which devices of this machine a worker's ranks own, why, and how one is opened.
//! For: the worker's start, which reports them, and each rank's thread, which opens its own.
//! Invariant: what was chosen stays: a device that cannot be opened later is an error, never silently another device.
//! Not here: what a device does (`lockstep-kernels`); this is the only file that names its backends.

use std::{fmt, path::PathBuf, str::FromStr};

use lockstep_formats::Dtype;
use lockstep_kernels::{Device, KernelError, cpu::CpuDevice, device::DeviceInfo};
use lockstep_sharding::usable_bytes;

use crate::{WorkerError, config::threads_per_device};

/// What the settings ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceSelection {
    /// All NVIDIA GPUs if CUDA works here, else the processor.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// These NVIDIA GPUs, one for each rank.
    Cuda(Vec<usize>),
}

impl FromStr for DeviceSelection {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => return Ok(Self::Auto),
            "cpu" => return Ok(Self::Cpu),
            _ => {}
        }
        let ordinal = |name: &str| name.strip_prefix("cuda:")?.parse().ok();
        let ordinals: Option<Vec<usize>> = text.split(',').map(ordinal).collect();
        let ordinals = ordinals.ok_or_else(|| format!("{text:?} is none of auto, cpu, cuda:0,cuda:1,…"))?;
        match ordinals.iter().enumerate().find(|(index, ordinal)| ordinals[..*index].contains(ordinal)) {
            Some((_, twice)) => Err(format!("cuda:{twice} comes twice")),
            None => Ok(Self::Cuda(ordinals)),
        }
    }
}

impl fmt::Display for DeviceSelection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => formatter.write_str("auto"),
            Self::Cpu => formatter.write_str("cpu"),
            Self::Cuda(ordinals) => {
                let names: Vec<String> = ordinals.iter().map(|ordinal| format!("cuda:{ordinal}")).collect();
                formatter.write_str(&names.join(","))
            }
        }
    }
}

/// Settings of a worker's devices.
#[derive(Clone, Debug, Default)]
pub struct DeviceSettings {
    /// Which.
    pub selection: DeviceSelection,
    /// Devices (ranks) to make of the processor, if that is what is used.
    pub num_cpu_devices: usize,
    /// Threads of each of them; 0: all cores divided by the devices.
    pub threads_per_device: usize,
    /// Type of keys and values; `None`: what suits the model.
    pub dtype: Option<Dtype>,
    /// Folder of compiled GPU kernels; `None`: they are compiled at every start.
    pub kernel_cache: Option<PathBuf>,
}

/// A device by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LocalDevice {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(usize),
}

impl LocalDevice {
    fn cuda_ordinal(self) -> Option<usize> {
        match self {
            Self::Cpu => None,
            #[cfg(feature = "cuda")]
            Self::Cuda(ordinal) => Some(ordinal),
        }
    }
}

/// The devices of a worker, by local rank.
#[derive(Clone, Debug)]
pub struct LocalDevices {
    devices: Vec<LocalDevice>,
    reason: String,
    settings: DeviceSettings,
}

/// What is done with an opened device, whatever its type.
pub(crate) trait DeviceTask {
    /// What comes of it.
    type Output;

    /// Opens the device and uses it.
    fn run<D: Device>(self, open: impl FnOnce() -> Result<D, KernelError>) -> Self::Output;
}

impl LocalDevices {
    /// Chooses as the settings ask; GPUs are chosen automatically only if there are at least `num_ranks`.
    ///
    /// # Errors
    /// [`WorkerError::Config`] if a device was asked for that this build or this machine does not have.
    pub fn choose(settings: DeviceSettings, num_ranks: usize) -> Result<Self, WorkerError> {
        let cpu = || vec![LocalDevice::Cpu; settings.num_cpu_devices];
        let (devices, reason) = match &settings.selection {
            DeviceSelection::Cpu => (cpu(), "asked for".to_owned()),
            DeviceSelection::Cuda(ordinals) => (cuda_devices(Some(ordinals))?, "asked for".to_owned()),
            DeviceSelection::Auto => match cuda_devices(None) {
                Ok(devices) if devices.len() < num_ranks => {
                    (cpu(), format!("no GPU is used: there are {}, {num_ranks} are needed", devices.len()))
                }
                Ok(devices) => (devices, "CUDA works here".to_owned()),
                Err(problem) => (cpu(), format!("no GPU is used: {problem}")),
            },
        };
        tracing::info!(?devices, reason, "devices chosen");
        Ok(Self { devices, reason, settings })
    }

    /// What was chosen, in the words of the settings.
    pub fn selection(&self) -> DeviceSelection {
        let ordinals = self.devices.iter().filter_map(|device| device.cuda_ordinal()).collect::<Vec<_>>();
        if ordinals.is_empty() { DeviceSelection::Cpu } else { DeviceSelection::Cuda(ordinals) }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// Memory of the machine that devices on the processor share: a tenth of what is free is left to the rest of the
    /// machine. `None`: each device has memory of its own.
    pub fn shared_memory_bytes(&self, info: &DeviceInfo) -> Option<u64> {
        let is_shared = self.devices.contains(&LocalDevice::Cpu);
        is_shared.then(|| usable_bytes(info.memory_bytes))
    }

    /// Cores that each rank keeps busy: the processor's threads, or the one that drives a GPU.
    pub(crate) fn threads_per_rank(&self) -> usize {
        let is_cpu = self.devices.contains(&LocalDevice::Cpu);
        if is_cpu { threads_per_device(self.settings.threads_per_device, self.len()) } else { 1 }
    }

    /// Why these.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// What each device is; equal ones are measured once. Blocks for up to seconds.
    ///
    /// # Errors
    /// [`WorkerError::Kernel`] if one cannot be opened.
    pub fn infos(&self) -> Result<Vec<DeviceInfo>, WorkerError> {
        let mut infos: Vec<DeviceInfo> = Vec::with_capacity(self.len());
        for (local_rank, device) in self.devices.iter().enumerate() {
            let info = match self.devices[..local_rank].iter().position(|other| other == device) {
                Some(equal) => infos[equal].clone(),
                None => self.with_device(local_rank, Describe)??,
            };
            infos.push(info);
        }
        Ok(infos)
    }

    /// Runs `task` with device number `local_rank`.
    ///
    /// # Errors
    /// [`WorkerError::Mismatch`] if there are fewer devices.
    pub(crate) fn with_device<T: DeviceTask>(&self, local_rank: usize, task: T) -> Result<T::Output, WorkerError> {
        let device = self.devices.get(local_rank).ok_or_else(|| {
            WorkerError::Mismatch(format!("local rank {local_rank} of a worker of {} devices", self.len()))
        })?;
        Ok(match *device {
            LocalDevice::Cpu => {
                let num_threads = self.threads_per_rank();
                task.run(|| CpuDevice::new(num_threads))
            }
            #[cfg(feature = "cuda")]
            LocalDevice::Cuda(ordinal) => {
                use lockstep_kernels::cuda::{CudaDevice, KernelCache};
                task.run(|| CudaDevice::new(ordinal, KernelCache::new(self.settings.kernel_cache.clone())))
            }
        })
    }
}

/// These GPUs, or all.
#[cfg(feature = "cuda")]
fn cuda_devices(ordinals: Option<&[usize]>) -> Result<Vec<LocalDevice>, WorkerError> {
    let num_devices = lockstep_kernels::cuda::probe::num_devices()?;
    let all: Vec<usize> = (0..num_devices).collect();
    let ordinals = ordinals.unwrap_or(&all);
    if let Some(missing) = ordinals.iter().find(|ordinal| **ordinal >= num_devices) {
        let problem = format!("cuda:{missing} is asked for, the driver shows {num_devices} GPUs");
        return Err(WorkerError::Config { field: "device", problem });
    }
    Ok(ordinals.iter().copied().map(LocalDevice::Cuda).collect())
}

#[cfg(not(feature = "cuda"))]
fn cuda_devices(_: Option<&[usize]>) -> Result<Vec<LocalDevice>, WorkerError> {
    Err(WorkerError::Config { field: "device", problem: "this build lacks the feature cuda".to_owned() })
}

/// Opens a device to learn what it can do.
struct Describe;

impl DeviceTask for Describe {
    type Output = Result<DeviceInfo, KernelError>;

    fn run<D: Device>(self, open: impl FnOnce() -> Result<D, KernelError>) -> Self::Output {
        open().map(|device| device.info().clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selections_are_read_and_written() {
        for text in ["auto", "cpu", "cuda:0", "cuda:3,cuda:1"] {
            assert_eq!(text.parse::<DeviceSelection>().unwrap().to_string(), text);
        }
        for wrong in ["", "gpu", "cuda", "cuda:", "cuda:x", "cuda:0,", "cuda:0,cpu", "cuda:1,cuda:1"] {
            assert!(wrong.parse::<DeviceSelection>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_device_of_the_processor_is_opened() {
        let settings = DeviceSettings {
            selection: DeviceSelection::Cpu,
            num_cpu_devices: 2,
            threads_per_device: 1,
            ..DeviceSettings::default()
        };
        let devices = LocalDevices::choose(settings, 1).unwrap();
        assert_eq!((devices.len(), devices.reason()), (2, "asked for"));
        let infos = devices.infos().unwrap();
        assert!(infos.len() == 2 && infos[0].name.starts_with("cpu"), "{infos:?}");
        assert!(matches!(devices.with_device(2, Describe), Err(WorkerError::Mismatch(_))));
    }

    #[test]
    #[cfg(not(feature = "cuda"))]
    fn what_was_not_built_is_refused_by_name() {
        let settings = DeviceSettings { selection: DeviceSelection::Cuda(vec![0]), ..DeviceSettings::default() };
        let message = LocalDevices::choose(settings, 1).unwrap_err().to_string();
        assert!(message.contains("feature cuda"), "{message}");
    }
}
