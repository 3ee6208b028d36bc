//! From device source to cubin, by NVRTC, or from the cache.
//! For: [`Gpu::kernel`](super::Gpu::kernel), and the test that compiles everything without a GPU.
//! Invariant: the result is machine code of one architecture, never PTX: a driver may be older than NVRTC's PTX.

use std::ffi::{CString, NulError, c_char, c_int};

use cudarc::nvrtc::{
    result::{self, NvrtcError},
    sys,
};
use sha2::{Digest, Sha256};

use super::{
    probe::nvrtc_version,
    sources::{HEADERS, Source},
};
use crate::{
    KernelError,
    kernel_cache::{KernelCache, Key, Kind},
};

/// Options of every compilation.
const OPTIONS: [&str; 1] = ["--std=c++17"];
/// Oldest architecture: tensor cores for bf16, asynchronous copies to shared memory.
const OLDEST_COMPUTE_CAPABILITY: (i32, i32) = (8, 0);

/// Name of the architecture of a compute capability, such as `sm_90a`.
///
/// # Errors
/// [`KernelError::Unsupported`] for GPUs that are too old.
pub fn architecture(compute_capability: (i32, i32)) -> Result<String, KernelError> {
    let (major, minor) = compute_capability;
    if compute_capability < OLDEST_COMPUTE_CAPABILITY {
        let (oldest_major, oldest_minor) = OLDEST_COMPUTE_CAPABILITY;
        return Err(KernelError::Unsupported {
            operation: "open",
            what: format!("compute capability {major}.{minor} (oldest: {oldest_major}.{oldest_minor})"),
            device: "cuda".to_owned(),
        });
    }
    // Hopper's matrix instructions exist in the architecture-specific target alone.
    let specific = if compute_capability == (9, 0) { "a" } else { "" };
    Ok(format!("sm_{major}{minor}{specific}"))
}

/// Compiles sources, or takes them from the cache.
#[derive(Debug)]
pub struct Compiler {
    version: (c_int, c_int),
    cache: KernelCache,
}

impl Compiler {
    /// Opens NVRTC.
    ///
    /// # Errors
    /// [`KernelError::Device`] if it is not there or does not answer.
    pub fn new(cache: KernelCache) -> Result<Self, KernelError> {
        Ok(Self { version: nvrtc_version()?, cache })
    }

    /// NVRTC's version, such as 13.0.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Machine code of `source` for `architecture`, compiled with `options` beside the standard ones.
    ///
    /// # Errors
    /// [`KernelError::Device`] with the compiler's log.
    pub fn cubin(&self, source: &Source, architecture: &str, options: &[String]) -> Result<Vec<u8>, KernelError> {
        let key = self.key(source, architecture, options);
        if let Some(cubin) = self.cache.load(Kind::Cubin, &key) {
            return Ok(cubin);
        }
        let start = std::time::Instant::now();
        let cubin = compile(source, architecture, options)?;
        tracing::info!(
            source = source.name,
            architecture,
            ?options,
            elapsed_ms = start.elapsed().as_millis() as u64,
            "compiled kernels"
        );
        self.cache.store(Kind::Cubin, &key, &cubin);
        Ok(cubin)
    }

    fn key(&self, source: &Source, architecture: &str, options: &[String]) -> Key {
        let mut digest = Sha256::new();
        let mut add = |text: &str| {
            // Lengths keep neighbours apart.
            digest.update((text.len() as u64).to_le_bytes());
            digest.update(text);
        };
        add(&format!("{:?}", self.version));
        add(architecture);
        add(source.name);
        add(source.text);
        HEADERS.iter().for_each(|(name, text)| [name, text].into_iter().for_each(|part| add(part)));
        OPTIONS.into_iter().for_each(&mut add);
        options.iter().for_each(|option| add(option));
        digest.finalize().into()
    }
}

fn compile(source: &Source, architecture: &str, options: &[String]) -> Result<Vec<u8>, KernelError> {
    let program = Program::new(source).map_err(|problem| error(format!("{}: {problem}", source.name)))?;
    let target = [format!("--gpu-architecture={architecture}")];
    let options: Vec<&str> =
        target.iter().map(String::as_str).chain(OPTIONS).chain(options.iter().map(String::as_str)).collect();
    program.compile(&options).map_err(|code| {
        let log = program.log();
        error(format!("{} does not compile for {}: {code:?}\n{}", source.name, options.join(" "), log.trim_end()))
    })?;
    program.cubin().map_err(|code| error(format!("{}: no cubin: {code:?}", source.name)))
}

/// An NVRTC program, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: &Source) -> Result<Self, String> {
        let nul = |problem: NulError| problem.to_string();
        let text = CString::new(source.text).map_err(nul)?;
        let name = CString::new(source.name).map_err(nul)?;
        let all = |pick: fn(&(&'static str, &'static str)) -> &'static str| {
            HEADERS.iter().map(|header| CString::new(pick(header))).collect::<Result<Vec<_>, _>>()
        };
        let (names, texts) = (all(|header| header.0).map_err(nul)?, all(|header| header.1).map_err(nul)?);
        let pointers = |strings: &[CString]| strings.iter().map(|string| string.as_ptr()).collect::<Vec<_>>();
        let (name_pointers, text_pointers) = (pointers(&names), pointers(&texts));
        let mut program = std::ptr::null_mut();
        // SAFETY: NUL-terminated strings that live until the end of the call, which copies them; two arrays of the
        // length given.
        unsafe {
            sys::nvrtcCreateProgram(
                &raw mut program,
                text.as_ptr(),
                name.as_ptr(),
                HEADERS.len() as c_int,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        }
        .result()
        .map_err(|code| format!("{code:?}"))?;
        Ok(Self(program))
    }

    fn compile(&self, options: &[&str]) -> Result<(), NvrtcError> {
        // SAFETY: the program lives.
        unsafe { result::compile_program(self.0, options) }
    }

    fn log(&self) -> String {
        // SAFETY: the program lives.
        let log = unsafe { result::get_program_log(self.0) }.unwrap_or_default();
        let bytes: Vec<u8> = log.into_iter().map(|byte| byte as u8).take_while(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn cubin(&self) -> Result<Vec<u8>, NvrtcError> {
        let mut size = 0;
        // SAFETY: the program lives; the pointer is to a local.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &raw mut size) }.result()?;
        let mut cubin = vec![0_u8; size];
        // SAFETY: the program lives; the buffer has the size that it asked for.
        unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast::<c_char>()) }.result()?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once. A failure would leak memory and nothing else.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

fn error(what: String) -> KernelError {
    KernelError::Device { device: "nvrtc".to_owned(), what }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_named_and_old_ones_refused() {
        assert_eq!(architecture((9, 0)).unwrap(), "sm_90a");
        assert_eq!(architecture((8, 9)).unwrap(), "sm_89");
        assert_eq!(architecture((12, 0)).unwrap(), "sm_120");
        let message = architecture((7, 5)).unwrap_err().to_string();
        assert!(message.contains("7.5") && message.contains("8.0"), "{message}");
    }

    #[test]
    fn keys_differ_with_everything_that_decides_the_code() {
        let compiler = |version| Compiler { version, cache: KernelCache::default() };
        let source = Source { name: "a.cu", text: "text", variants: &[] };
        let other = Source { name: "a.cu", text: "other", variants: &[] };
        let options = [String::from("-DA=1")];
        let keys = [
            compiler((13, 0)).key(&source, "sm_90a", &[]),
            compiler((13, 1)).key(&source, "sm_90a", &[]),
            compiler((13, 0)).key(&other, "sm_90a", &[]),
            compiler((13, 0)).key(&source, "sm_80", &[]),
            compiler((13, 0)).key(&source, "sm_90a", &options),
        ];
        for (index, key) in keys.iter().enumerate() {
            assert!(!keys[..index].contains(key), "{index}");
        }
    }
}
