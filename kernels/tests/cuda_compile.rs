//! Compiles every kernel for every supported architecture, without a GPU. Needs NVRTC: `tests/run.sh` installs it.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failure is what a test reports")]

use std::{collections::BTreeSet, path::Path};

use lockstep_kernels::cuda::{
    KernelCache,
    compiler::Compiler,
    sources::{HEADERS, SOURCES, Source},
};

const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_89", "sm_90a", "sm_100"];

fn compile_all(architecture: &str) {
    let compiler = Compiler::new(KernelCache::default()).unwrap();
    for source in SOURCES {
        let variants = if source.variants.is_empty() { &[""] } else { source.variants };
        for options in variants {
            let options: Vec<String> = options.split_whitespace().map(str::to_owned).collect();
            let cubin = compiler.cubin(source, architecture, &options).unwrap_or_else(|error| panic!("{error}"));
            assert!(!cubin.is_empty(), "{}", source.name);
        }
    }
}

#[test]
fn kernels_compile_for_ampere() {
    compile_all(ARCHITECTURES[0]);
}

#[test]
fn kernels_compile_for_ada() {
    compile_all(ARCHITECTURES[1]);
}

#[test]
fn kernels_compile_for_hopper() {
    compile_all(ARCHITECTURES[2]);
}

#[test]
fn kernels_compile_for_blackwell() {
    compile_all(ARCHITECTURES[3]);
}

#[test]
fn every_file_is_listed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
    let files = |folder: &Path, ending: &str| -> BTreeSet<String> {
        let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(ending)).collect()
    };
    let sources: BTreeSet<String> = SOURCES.iter().map(|source| source.name.to_owned()).collect();
    assert_eq!(sources, files(&folder, ".cu"));
    let headers: BTreeSet<String> = HEADERS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(headers, files(&folder.join("include"), ".cuh"));
}

#[test]
fn a_wrong_source_is_an_error_with_the_compilers_words() {
    let source = Source { name: "wrong.cu", text: "#include \"launch.cuh\"\nnonsense x;", variants: &[] };
    let compiler = Compiler::new(KernelCache::default()).unwrap();
    let message = compiler.cubin(&source, "sm_90a", &[]).unwrap_err().to_string();
    assert!(message.contains("wrong.cu") && message.contains("nonsense"), "{message}");
}

#[test]
fn a_second_start_compiles_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let cache = || KernelCache::new(Some(folder.path().to_owned()));
    let source = Source { name: "a.cu", text: "extern \"C\" __global__ void a() {}", variants: &[] };
    let compiled = Compiler::new(cache()).unwrap().cubin(&source, "sm_90a", &[]).unwrap();
    let entry = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let written = std::fs::metadata(&entry).unwrap().modified().unwrap();
    assert_eq!(Compiler::new(cache()).unwrap().cubin(&source, "sm_90a", &[]).unwrap(), compiled);
    assert_eq!(std::fs::metadata(&entry).unwrap().modified().unwrap(), written);
}
