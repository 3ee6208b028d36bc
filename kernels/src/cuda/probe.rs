//! Which CUDA libraries and GPUs this machine has, without a panic where there is none.
//! For: choosing a device, and everything that is about to call one of the libraries.
//! Invariant: `cudarc` panics when a library is absent, so nothing calls one that was not found here first.

use std::{error::Error, ffi::c_int, sync::OnceLock};

use cudarc::{cublaslt, driver, nccl, nvrtc};
use lockstep_formats::PeerLink;

use crate::KernelError;

/// Oldest driver: cubins of NVRTC 13 need one that knows CUDA 13, those of NVRTC 12 one that knows CUDA 12.
const OLDEST_DRIVER: i32 = 12_000;

/// A library that the CUDA device opens at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// `libcuda`, part of the driver.
    Driver,
    /// `libnvrtc`, which compiles the kernels.
    Nvrtc,
    /// `libcublasLt`, for prompts.
    CublasLt,
    /// `libnccl`, for collectives between GPUs.
    Nccl,
}

impl Library {
    /// File name without its ending.
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "libcuda",
            Self::Nvrtc => "libnvrtc",
            Self::CublasLt => "libcublasLt",
            Self::Nccl => "libnccl",
        }
    }

    /// Whether the system's loader finds it. The answer is kept.
    pub fn is_present(self) -> bool {
        static FOUND: [OnceLock<bool>; 4] = [const { OnceLock::new() }; 4];
        // SAFETY: loading these libraries runs their initializers, which have no preconditions.
        let probe = move || unsafe {
            match self {
                Self::Driver => driver::sys::is_culib_present(),
                Self::Nvrtc => nvrtc::sys::is_culib_present(),
                Self::CublasLt => cublaslt::sys::is_culib_present(),
                Self::Nccl => nccl::sys::is_culib_present(),
            }
        };
        *FOUND[self as usize].get_or_init(probe)
    }

    /// Refuses to go on without it.
    ///
    /// # Errors
    /// [`KernelError::Device`] naming the library and who would bring it.
    pub fn require(self) -> Result<(), KernelError> {
        if self.is_present() { Ok(()) } else { Err(self.missing()) }
    }

    fn missing(self) -> KernelError {
        let name = self.name();
        let stem = name.strip_prefix("lib").unwrap_or(name);
        let names = cudarc::get_lib_name_candidates(stem);
        // Names of other systems, such as nvrtc64_13, are of no use here.
        let tried: Vec<String> = names.into_iter().filter(|tried| tried.starts_with(&format!("{name}."))).collect();
        let refusals: Vec<String> = tried.iter().filter_map(|tried| refusal(tried)).collect();
        error(self.why_missing(&tried, &refusals))
    }

    /// What to say of a library that was opened under none of the names; `refusals` are the loader's words about those
    /// under which there is a file.
    fn why_missing(self, tried: &[String], refusals: &[String]) -> String {
        let (name, tried) = (self.name(), tried.join(", "));
        if !refusals.is_empty() {
            return format!("{name} is there but cannot be loaded: {}", refusals.join("; "));
        }
        let source = match self {
            Self::Driver => "the NVIDIA driver",
            Self::Nvrtc | Self::CublasLt => "the CUDA toolkit or its runtime packages",
            Self::Nccl => "NCCL",
        };
        format!(
            "{name} is not found: it comes with {source}; the loader has none of {tried} in the folders of LD_LIBRARY_PATH \
             and of the system"
        )
    }
}

/// The loader's words about a file that it cannot load; `None` if there is no such file, or it can.
fn refusal(name: &str) -> Option<String> {
    // SAFETY: as in `is_present`.
    let problem = unsafe { libloading::Library::new(name) }.err()?;
    let words = problem.source().unwrap_or(&problem).to_string();
    // A missing file is reported in these words too if another library needs it: then it is not this one's name.
    let is_absent = words.starts_with(&format!("{name}: cannot open shared object file: No such file"));
    (!is_absent).then_some(words)
}

/// GPUs of this machine that the driver shows.
///
/// # Errors
/// [`KernelError::Device`] if there is no driver, it fails, it is too old (also for the NVRTC that is here), or NVRTC is
/// missing.
pub fn num_devices() -> Result<usize, KernelError> {
    Library::Driver.require()?;
    driver::result::init().map_err(|code| error(format!("the driver does not start: {}", describe(code))))?;
    let mut version = 0;
    // SAFETY: the pointer is to a local; the library is present.
    unsafe { driver::sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(|code| error(format!("the driver does not tell its version: {}", describe(code))))?;
    expect_driver(version, OLDEST_DRIVER)?;
    let (major, minor) = nvrtc_version()?;
    expect_driver_for_nvrtc(version, major, minor)?;
    let count = driver::result::device::get_count().map_err(|code| error(describe(code)))?;
    usize::try_from(count).ok().filter(|count| *count > 0).ok_or_else(|| error("the driver shows no GPU".to_owned()))
}

/// What joins a GPU with all others that the driver shows; `None` without NCCL, which brings GPUs together. A GPU that is
/// shown alone may have others beside it, of which no more is known than that they are on the same machine.
///
/// # Errors
/// As [`num_devices`], or if the driver does not tell.
pub(super) fn peer_link(ordinal: usize) -> Result<Option<PeerLink>, KernelError> {
    if !Library::Nccl.is_present() {
        return Ok(None);
    }
    let num_devices = num_devices()?;
    let mut link = if num_devices > 1 { PeerLink::Nvlink } else { PeerLink::Pcie };
    for other in (0..num_devices).filter(|other| *other != ordinal) {
        if !has_atomics(ordinal, other)? {
            link = PeerLink::Pcie;
        }
    }
    Ok(Some(link))
}

/// Whether a GPU changes values in the memory of another at once, which NVLink can do and PCI Express cannot.
fn has_atomics(from: usize, to: usize) -> Result<bool, KernelError> {
    let fail =
        |code| error(format!("the driver does not tell what joins cuda:{from} and cuda:{to}: {}", describe(code)));
    let device = |ordinal| driver::result::device::get(c_int::try_from(ordinal).unwrap_or(c_int::MAX)).map_err(fail);
    let (from, to) = (device(from)?, device(to)?);
    let attribute = driver::sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    let mut value = 0;
    // SAFETY: the pointer is to a local; the library is present, and both devices are the driver's.
    unsafe { driver::sys::cuDeviceGetP2PAttribute(&raw mut value, attribute, from, to) }.result().map_err(fail)?;
    Ok(value == 1)
}

/// Version of NVRTC, such as 13 and 0.
///
/// # Errors
/// [`KernelError::Device`] if it is not there or does not answer.
pub(super) fn nvrtc_version() -> Result<(c_int, c_int), KernelError> {
    Library::Nvrtc.require()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the pointers are to locals; the library is present.
    unsafe { nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor) }
        .result()
        .map_err(|code| error(format!("NVRTC does not tell its version: {code:?}")))?;
    Ok((major, minor))
}

fn expect_driver(version: c_int, oldest: c_int) -> Result<(), KernelError> {
    if version >= oldest {
        return Ok(());
    }
    let (got, expected) = (version_name(version), version_name(oldest));
    Err(error(format!("the driver supports CUDA {got}, expected {expected} or newer")))
}

/// A driver runs code of newer compilers of its own major version alone.
fn expect_driver_for_nvrtc(version: c_int, major: c_int, minor: c_int) -> Result<(), KernelError> {
    expect_driver(version, major * 1000).map_err(|_| {
        let got = version_name(version);
        error(format!("the driver supports CUDA {got}, too old for NVRTC {major}.{minor}: expected {major}.0 or newer, or an older NVRTC"))
    })
}

/// `12080` → `12.8`.
fn version_name(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Name and text of a driver's code.
pub(super) fn describe(code: driver::DriverError) -> String {
    match (code.error_name(), code.error_string()) {
        (Ok(name), Ok(text)) => format!("{} ({})", name.to_string_lossy(), text.to_string_lossy()),
        _ => format!("code {}", code.0 as u32),
    }
}

fn error(what: String) -> KernelError {
    KernelError::Device { device: "cuda".to_owned(), what }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_names_it() {
        for library in [Library::Driver, Library::Nvrtc, Library::CublasLt, Library::Nccl] {
            let message = library.missing().to_string();
            assert!(message.contains(library.name()) && message.contains("LD_LIBRARY_PATH"), "{message}");
        }
        if !Library::Driver.is_present() {
            let message = num_devices().unwrap_err().to_string();
            assert!(message.contains("libcuda is not found"), "{message}");
        }
    }

    #[test]
    fn what_is_there_and_cannot_be_loaded_is_said_in_the_words_of_the_loader() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libnvrtc.so.13");
        std::fs::write(&path, [0; 100]).unwrap();
        let path = path.to_string_lossy();
        let refusal = refusal(&path).unwrap();
        assert!(refusal.starts_with(&*path) && !refusal.contains("No such file"), "{refusal}");
        let message = Library::Nvrtc.why_missing(&[], std::slice::from_ref(&refusal));
        assert_eq!(message, format!("libnvrtc is there but cannot be loaded: {refusal}"));
        assert_eq!(super::refusal(&format!("{path}.no")), None);
    }

    #[test]
    fn a_driver_that_is_too_old_is_an_error_with_the_numbers() {
        assert!(expect_driver(12_000, OLDEST_DRIVER).is_ok());
        let message = expect_driver(11_080, OLDEST_DRIVER).unwrap_err().to_string();
        assert!(message.contains("supports CUDA 11.8, expected 12.0 or newer"), "{message}");
        // Any minor version of the same major one will do.
        assert!(expect_driver_for_nvrtc(13_000, 13, 5).is_ok() && expect_driver_for_nvrtc(13_000, 12, 8).is_ok());
        let message = expect_driver_for_nvrtc(12_080, 13, 0).unwrap_err().to_string();
        assert!(message.contains("CUDA 12.8, too old for NVRTC 13.0: expected 13.0"), "{message}");
    }
}
