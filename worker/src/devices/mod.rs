//! Which devices of this machine a worker's ranks own, why, and how one is opened.
//! For: the worker's start, which reports them, and each rank's thread, which opens its own.
//! Invariant: what was chosen stays: a device that cannot be opened later is an error, never silently another device.
//! Not here: what a device does (`lockstep-kernels`); this module alone names its backends.

#[cfg(feature = "cuda")]
mod cuda;
pub mod listing;
#[cfg(feature = "webgpu")]
pub mod webgpu;

use std::{fmt, path::PathBuf, str::FromStr};

use lockstep_formats::Dtype;
#[cfg(feature = "cuda")]
use lockstep_kernels::cuda::CudaDevice;
#[cfg(any(feature = "cuda", feature = "webgpu"))]
use lockstep_kernels::kernel_cache::KernelCache;
#[cfg(feature = "webgpu")]
use lockstep_kernels::webgpu::WebGpuDevice;
use lockstep_kernels::{Device, KernelError, adapter_id::AdapterId, cpu::CpuDevice, device::DeviceInfo};
use lockstep_sharding::usable_bytes;

use crate::{WorkerError, config::threads_per_device};

/// Why there are no GPUs.
#[cfg(not(feature = "cuda"))]
const NO_CUDA: &str = "this build lacks the feature cuda";
/// Why there are no adapters.
#[cfg(not(feature = "webgpu"))]
const NO_WEBGPU: &str = "this build lacks the feature webgpu";

/// What the settings ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceSelection {
    /// All NVIDIA GPUs if CUDA works here, else the GPUs that Metal, Vulkan or DX12 show, else the processor.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// These NVIDIA GPUs, one for each rank.
    Cuda(Vec<usize>),
    /// The GPUs that Metal, Vulkan or DX12 show.
    WebGpuAuto,
    /// These adapters, one for each rank.
    WebGpu(Vec<AdapterId>),
    /// Devices of several kinds, each alone: workers of one device each.
    Mixed(Vec<DeviceSelection>),
}

impl DeviceSelection {
    /// Devices that are named one by one.
    pub fn num_named(&self) -> Option<usize> {
        match self {
            Self::Auto | Self::Cpu | Self::WebGpuAuto => None,
            Self::Cuda(ordinals) => Some(ordinals.len()),
            Self::WebGpu(adapters) => Some(adapters.len()),
            Self::Mixed(devices) => Some(devices.len()),
        }
    }

    /// Of devices that are named, those in `range`; else all.
    #[must_use]
    pub fn part(&self, range: std::ops::Range<usize>) -> Self {
        match self {
            Self::Auto | Self::Cpu | Self::WebGpuAuto => self.clone(),
            Self::Cuda(ordinals) => Self::Cuda(ordinals.get(range).unwrap_or_default().to_vec()),
            Self::WebGpu(adapters) => Self::WebGpu(adapters.get(range).unwrap_or_default().to_vec()),
            Self::Mixed(devices) => match devices.get(range).unwrap_or_default() {
                [one] => one.clone(),
                several => Self::Mixed(several.to_vec()),
            },
        }
    }
}

/// Refuses a name that comes twice.
fn distinct<T: Clone + PartialEq>(names: Vec<T>, text: impl Fn(&T) -> String) -> Result<Vec<T>, String> {
    match names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)) {
        Some((_, twice)) => Err(format!("{} comes twice", text(twice))),
        None => Ok(names),
    }
}

impl FromStr for DeviceSelection {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => return Ok(Self::Auto),
            "cpu" => return Ok(Self::Cpu),
            "webgpu:auto" => return Ok(Self::WebGpuAuto),
            _ => {}
        }
        let ordinal = |name: &str| name.strip_prefix("cuda:")?.parse().ok();
        let adapter = |name: &str| name.parse::<AdapterId>().ok();
        if let Some(ordinals) = text.split(',').map(ordinal).collect() {
            return Ok(Self::Cuda(distinct(ordinals, |ordinal| format!("cuda:{ordinal}"))?));
        }
        if let Some(adapters) = text.split(',').map(adapter).collect() {
            return Ok(Self::WebGpu(distinct(adapters, AdapterId::to_string)?));
        }
        let single = |name: &str| match (name, ordinal(name), adapter(name)) {
            ("cpu", ..) => Some(Self::Cpu),
            (_, Some(ordinal), _) => Some(Self::Cuda(vec![ordinal])),
            (_, _, Some(adapter)) => Some(Self::WebGpu(vec![adapter])),
            _ => None,
        };
        let devices: Option<Vec<Self>> = text.split(',').map(single).collect();
        let devices = devices.ok_or_else(|| {
            format!("{text:?} is none of auto, cpu, webgpu:auto, or names such as cuda:0, vulkan:0, metal:0, dx12:0, between commas")
        })?;
        distinct(devices.iter().filter(|device| **device != Self::Cpu).cloned().collect(), Self::to_string)?;
        Ok(Self::Mixed(devices))
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
            Self::WebGpuAuto => formatter.write_str("webgpu:auto"),
            Self::WebGpu(adapters) => {
                let names: Vec<String> = adapters.iter().map(AdapterId::to_string).collect();
                formatter.write_str(&names.join(","))
            }
            Self::Mixed(devices) => {
                let names: Vec<String> = devices.iter().map(Self::to_string).collect();
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
    /// Why these were asked for, if somebody has chosen for the user.
    pub reason: Option<String>,
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
    #[cfg(feature = "webgpu")]
    WebGpu(AdapterId),
}

impl LocalDevice {
    fn cuda_ordinal(self) -> Option<usize> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(ordinal) => Some(ordinal),
            _ => None,
        }
    }

    fn adapter(self) -> Option<AdapterId> {
        match self {
            #[cfg(feature = "webgpu")]
            Self::WebGpu(id) => Some(id),
            _ => None,
        }
    }
}

impl fmt::Display for LocalDevice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => formatter.write_str("cpu"),
            #[cfg(feature = "cuda")]
            Self::Cuda(ordinal) => write!(formatter, "cuda:{ordinal}"),
            #[cfg(feature = "webgpu")]
            Self::WebGpu(id) => id.fmt(formatter),
        }
    }
}

/// The devices of a worker, by local rank.
#[derive(Clone, Debug)]
pub struct LocalDevices {
    devices: Vec<LocalDevice>,
    reason: String,
    settings: DeviceSettings,
    #[cfg(feature = "cuda")]
    open_gpus: cuda::OpenGpus,
}

/// What is done with an opened device, whatever its type.
pub(crate) trait DeviceTask {
    /// What comes of it.
    type Output;

    /// Opens the device and uses it.
    fn run<D: Device>(self, open: impl FnOnce() -> Result<D, KernelError>) -> Self::Output;
}

impl LocalDevices {
    /// Chooses as the settings ask. Automatically GPUs are chosen if at least `num_ranks` work: each is tried.
    ///
    /// # Errors
    /// [`WorkerError::Config`] if a device was asked for that this build or this machine does not have, or a type of
    /// keys and values that the devices do not hold; [`WorkerError::Kernel`] if CUDA does not work though asked for.
    pub fn choose(settings: DeviceSettings, num_ranks: usize) -> Result<Self, WorkerError> {
        let devices = vec![LocalDevice::Cpu; settings.num_cpu_devices];
        let on_cpu = Self {
            devices,
            reason: settings.reason.clone().unwrap_or_else(|| "asked for".to_owned()),
            settings,
            #[cfg(feature = "cuda")]
            open_gpus: cuda::OpenGpus::default(),
        };
        let chosen = match on_cpu.settings.selection.clone() {
            DeviceSelection::Cpu => on_cpu,
            DeviceSelection::Cuda(ordinals) => on_cpu.with_asked(&ordinals)?,
            DeviceSelection::WebGpu(adapters) => on_cpu.with_adapters(&adapters)?,
            DeviceSelection::WebGpuAuto => on_cpu.with_found_adapters(num_ranks)?,
            DeviceSelection::Mixed(_) => {
                let problem = format!(
                    "{} are of several kinds: `lockstep up` takes them, a worker for each",
                    on_cpu.settings.selection
                );
                return Err(WorkerError::Config { field: "device", problem });
            }
            DeviceSelection::Auto => on_cpu.with_found(num_ranks),
        };
        chosen.check_dtype()?;
        let names: Vec<String> = chosen.devices.iter().map(LocalDevice::to_string).collect();
        tracing::info!(devices = names.join(","), reason = chosen.reason, "devices chosen");
        Ok(chosen)
    }

    #[cfg(feature = "cuda")]
    fn with_asked(self, ordinals: &[usize]) -> Result<Self, WorkerError> {
        cuda::OpenGpus::expect(ordinals)?;
        Ok(Self { devices: ordinals.iter().copied().map(LocalDevice::Cuda).collect(), ..self })
    }

    #[cfg(not(feature = "cuda"))]
    fn with_asked(self, _: &[usize]) -> Result<Self, WorkerError> {
        Err(WorkerError::Config { field: "device", problem: NO_CUDA.to_owned() })
    }

    #[cfg(feature = "webgpu")]
    fn with_adapters(self, adapters: &[AdapterId]) -> Result<Self, WorkerError> {
        webgpu::expect(adapters)?;
        Ok(Self { devices: adapters.iter().copied().map(LocalDevice::WebGpu).collect(), ..self })
    }

    #[cfg(not(feature = "webgpu"))]
    fn with_adapters(self, _: &[AdapterId]) -> Result<Self, WorkerError> {
        Err(WorkerError::Config { field: "device", problem: NO_WEBGPU.to_owned() })
    }

    #[cfg(feature = "webgpu")]
    fn with_found_adapters(self, num_ranks: usize) -> Result<Self, WorkerError> {
        let (adapters, reason) = webgpu::choose(num_ranks);
        match adapters {
            Some(adapters) => {
                Ok(Self { devices: adapters.into_iter().map(LocalDevice::WebGpu).collect(), reason, ..self })
            }
            None => Err(WorkerError::Config { field: "device", problem: reason }),
        }
    }

    #[cfg(not(feature = "webgpu"))]
    fn with_found_adapters(self, _: usize) -> Result<Self, WorkerError> {
        Err(WorkerError::Config { field: "device", problem: NO_WEBGPU.to_owned() })
    }

    /// Where CUDA is not used: another GPU, or the processor.
    #[cfg(feature = "webgpu")]
    fn without_cuda(self, num_ranks: usize, why: &str) -> Self {
        let (adapters, reason) = webgpu::choose(num_ranks);
        let reason = format!("{why}; {reason}");
        match adapters {
            Some(adapters) => Self { devices: adapters.into_iter().map(LocalDevice::WebGpu).collect(), reason, ..self },
            None => Self { reason, ..self },
        }
    }

    #[cfg(not(feature = "webgpu"))]
    fn without_cuda(self, _: usize, why: &str) -> Self {
        Self { reason: why.to_owned(), ..self }
    }

    #[cfg(feature = "cuda")]
    fn with_found(self, num_ranks: usize) -> Self {
        let (ordinals, reason) = cuda::choose(self.open_gpus.find(&self.kernel_cache()), num_ranks);
        match ordinals {
            Some(ordinals) => Self { devices: ordinals.into_iter().map(LocalDevice::Cuda).collect(), reason, ..self },
            None => {
                if cuda::is_expected() {
                    tracing::warn!(reason, "CUDA is not used");
                }
                Self { open_gpus: cuda::OpenGpus::default(), ..self }.without_cuda(num_ranks, &reason)
            }
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn with_found(self, num_ranks: usize) -> Self {
        self.without_cuda(num_ranks, &format!("no GPU is used: {NO_CUDA}"))
    }

    #[cfg(any(feature = "cuda", feature = "webgpu"))]
    fn kernel_cache(&self) -> KernelCache {
        KernelCache::new(self.settings.kernel_cache.clone())
    }

    /// Refuses a type of keys and values that the devices do not hold, before a model is loaded.
    fn check_dtype(&self) -> Result<(), WorkerError> {
        match (self.settings.dtype, self.selection()) {
            (Some(Dtype::F32), DeviceSelection::Cuda(_)) => {
                let problem = format!(
                    "f32 is asked for, but the tensor cores of {} take keys and values in f16 or bf16; --device cpu holds f32",
                    self.selection()
                );
                Err(WorkerError::Config { field: "dtype", problem })
            }
            _ => Ok(()),
        }
    }

    /// What was chosen, in the words of the settings.
    pub fn selection(&self) -> DeviceSelection {
        let ordinals = self.devices.iter().filter_map(|device| device.cuda_ordinal()).collect::<Vec<_>>();
        let adapters = self.devices.iter().filter_map(|device| device.adapter()).collect::<Vec<_>>();
        match (ordinals.is_empty(), adapters.is_empty()) {
            (false, _) => DeviceSelection::Cuda(ordinals),
            (true, false) => DeviceSelection::WebGpu(adapters),
            (true, true) => DeviceSelection::Cpu,
        }
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

    /// What each device is and sustains, measured: blocks for up to seconds.
    ///
    /// # Errors
    /// [`WorkerError::Kernel`] if one cannot be opened.
    pub fn infos(&self) -> Result<Vec<DeviceInfo>, WorkerError> {
        #[cfg(feature = "cuda")]
        {
            let ordinals: Vec<usize> = self.devices.iter().filter_map(|device| device.cuda_ordinal()).collect();
            if !ordinals.is_empty() {
                return Ok(self.open_gpus.measure(&ordinals, &self.kernel_cache())?);
            }
        }
        #[cfg(feature = "webgpu")]
        {
            let adapters: Vec<AdapterId> = self.devices.iter().filter_map(|device| device.adapter()).collect();
            if !adapters.is_empty() {
                return adapters.iter().map(|id| Ok(WebGpuDevice::new(*id, self.kernel_cache())?.measure()?)).collect();
            }
        }
        let info = CpuDevice::new(self.threads_per_rank())?.measure()?;
        Ok(vec![info; self.len()])
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
            LocalDevice::Cuda(ordinal) => task.run(|| {
                let device = CudaDevice::new(ordinal, self.kernel_cache());
                self.open_gpus.release(ordinal);
                device
            }),
            #[cfg(feature = "webgpu")]
            LocalDevice::WebGpu(id) => task.run(|| WebGpuDevice::new(id, self.kernel_cache())),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selections_are_read_and_written() {
        for text in [
            "auto",
            "cpu",
            "cuda:0",
            "cuda:3,cuda:1",
            "webgpu:auto",
            "vulkan:0",
            "metal:1,dx12:0",
            "cpu,vulkan:0,cpu,cuda:1",
        ] {
            assert_eq!(text.parse::<DeviceSelection>().unwrap().to_string(), text);
        }
        for wrong in [
            "",
            "gpu",
            "cuda",
            "cuda:",
            "cuda:x",
            "cuda:0,",
            "cuda:1,cuda:1",
            "cuda:1,cpu,cuda:1",
            "metal:2,metal:2",
            "cpu,auto",
        ] {
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
        struct Open;
        impl DeviceTask for Open {
            type Output = Result<(), KernelError>;
            fn run<D: Device>(self, open: impl FnOnce() -> Result<D, KernelError>) -> Self::Output {
                open().map(drop)
            }
        }
        devices.with_device(1, Open).unwrap().unwrap();
        assert!(matches!(devices.with_device(2, Open), Err(WorkerError::Mismatch(_))));
    }

    #[test]
    fn a_choice_of_its_own_says_why() {
        let settings = DeviceSettings { num_cpu_devices: 1, ..DeviceSettings::default() };
        let chosen = LocalDevices::choose(settings.clone(), 1).unwrap();
        let expected = if chosen.selection() == DeviceSelection::Cpu { "no GPU is used: " } else { "CUDA works here" };
        assert!(chosen.reason().starts_with(expected), "{}", chosen.reason());
        // Whoever chose for somebody else hands the reason on.
        let reason = Some("a test".to_owned());
        let named = DeviceSettings { selection: DeviceSelection::Cpu, reason, ..settings };
        assert_eq!(LocalDevices::choose(named, 1).unwrap().reason(), "a test");
    }

    #[test]
    #[cfg(feature = "cuda")]
    fn a_type_that_the_devices_do_not_hold_is_refused() {
        let check = |device, dtype| {
            let settings = DeviceSettings { dtype, ..DeviceSettings::default() };
            let (reason, open_gpus) = (String::new(), cuda::OpenGpus::default());
            LocalDevices { devices: vec![device], reason, settings, open_gpus }.check_dtype()
        };
        let message = check(LocalDevice::Cuda(3), Some(Dtype::F32)).unwrap_err().to_string();
        assert!(message.contains("cuda:3") && message.contains("f32"), "{message}");
        for (device, dtype) in [
            (LocalDevice::Cuda(3), Some(Dtype::Bf16)),
            (LocalDevice::Cuda(3), None),
            (LocalDevice::Cpu, Some(Dtype::F32)),
        ] {
            assert!(check(device, dtype).is_ok(), "{device:?} {dtype:?}");
        }
    }

    #[test]
    #[cfg(not(feature = "cuda"))]
    fn what_was_not_built_is_refused_by_name() {
        let settings = DeviceSettings { selection: DeviceSelection::Cuda(vec![0]), ..DeviceSettings::default() };
        let message = LocalDevices::choose(settings, 1).unwrap_err().to_string();
        assert!(message.contains("feature cuda"), "{message}");
    }
}
