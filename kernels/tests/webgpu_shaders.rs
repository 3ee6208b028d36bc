//! Every shader variant as valid WGSL, to a browser as well, and as Metal's language within Apple's published limits.
#![cfg(feature = "webgpu")]
#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "a failure is what a test reports")]

use std::process::Command;

use lockstep_kernels::webgpu::{gpu::MATRICES, source::bindings, variants};
use lockstep_tests::environment;
use naga::{
    AddressSpace,
    back::msl,
    valid::{Capabilities, ModuleInfo, ValidationFlags, Validator},
};

/// Threadgroup memory of Apple's GPUs since the A11 (Metal Feature Set Tables).
const MAX_WORKGROUP_BYTES: u32 = 32 << 10;
/// What every adapter of WebGPU has of it.
const LEAST_WORKGROUP_BYTES: u32 = 16 << 10;
/// Buffer arguments of a Metal function (Metal Feature Set Tables).
const MAX_BUFFERS: usize = 31;

fn validate(name: &str, text: &str) -> (naga::Module, ModuleInfo) {
    let module =
        naga::front::wgsl::parse_str(text).unwrap_or_else(|error| panic!("{name}: {}", error.emit_to_string(text)));
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::all());
    let info = validator.validate(&module).unwrap_or_else(|error| panic!("{name}: {}", error.emit_to_string(text)));
    (module, info)
}

/// Bytes of each variable in workgroup memory.
fn workgroup_sizes(module: &naga::Module) -> impl Iterator<Item = u32> {
    let variables = module.global_variables.iter().map(|(_, variable)| variable);
    let shared = variables.filter(|variable| variable.space == AddressSpace::WorkGroup);
    shared.map(|variable| module.types[variable.ty].inner.size(module.to_ctx()))
}

/// Of matrices, Metal has those of 8 x 8 alone, and copies them from and to numbers, not vectors.
fn check_matrices(name: &str, code: &str) {
    let types = code.split("simdgroup_").skip(1).map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next().unwrap());
    let mut types: Vec<&str> = types.filter(|word| word.contains(|c: char| c.is_numeric())).collect();
    types.sort_unstable();
    types.dedup();
    assert_eq!(types, ["float8x8", "half8x8"], "{name}");
    assert!(code.contains("typedef half Half;"), "{name}");
}

#[test]
fn every_variant_translates_to_metal_within_its_limits() {
    let mut count = 0;
    // Metal's matrices are of 8 x 8 only.
    let is_for_metal = |options: &[(&str, u32)]| {
        !variants::is_for_vulkan(options) && (!options.contains(&("COOPERATIVE", 1)) || options.contains(&("SMALL", 1)))
    };
    for (source, options) in variants::all().into_iter().filter(|(_, options)| is_for_metal(options)) {
        let is_cooperative = options.contains(&("COOPERATIVE", 1));
        // A browser has neither subgroups nor immediates.
        for has_both in if variants::needs_subgroups(&options) { 1..2 } else { 0..2 } {
            let mut options = options.clone();
            options.extend([("SUBGROUPS", has_both), ("IMMEDIATES", has_both)]);
            let name = format!("{} {options:?}", source.name);
            let text = source.variant(&options).unwrap_or_else(|error| panic!("{name}: {error}"));
            let (module, info) = validate(&name, &text);
            let workgroup_bytes: u32 = workgroup_sizes(&module).sum();
            let most = if source.name == "attention_decode.wgsl" { LEAST_WORKGROUP_BYTES } else { MAX_WORKGROUP_BYTES };
            assert!(workgroup_bytes <= most, "{name}: {workgroup_bytes} bytes of workgroup memory");
            // Beside the bindings come the parameters and the sizes of the bound buffers.
            let num_buffers = bindings(&text).len() + 2;
            assert!(num_buffers <= MAX_BUFFERS, "{name}: {num_buffers} buffers");
            let options = msl::Options { lang_version: (2, 4), fake_missing_bindings: true, ..msl::Options::default() };
            let pipeline = msl::PipelineOptions::default();
            let (code, _) = msl::write_string(&module, &info, &options, &pipeline)
                .unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(code.contains("kernel void"), "{name}");
            if is_cooperative {
                check_matrices(&name, &code);
            }
            count += 1;
        }
    }
    println!("{count} variants");
}

/// Their variables in workgroup memory, which drivers lay side by side, take multiples of 16 bytes: matrices that begin anywhere
/// else are read wrongly, without a word, by an H200. Together they take no more than adapters are asked for.
#[test]
fn every_variant_for_tensor_cores_is_valid_and_aligned() {
    for (source, mut options) in variants::all() {
        if options.contains(&("COOPERATIVE", 1)) {
            options.extend([("SUBGROUPS", 1), ("IMMEDIATES", 1)]);
            let name = format!("{} {options:?}", source.name);
            let (module, _) = validate(&name, &source.variant(&options).unwrap());
            assert!(workgroup_sizes(&module).all(|num_bytes| num_bytes.is_multiple_of(16)), "{name}");
            let (_, most) = MATRICES[usize::from(options.contains(&("SMALL", 1)))];
            assert!(workgroup_sizes(&module).sum::<u32>() <= most, "{name}");
        }
    }
}

#[test]
fn every_variant_for_vulkan_alone_is_valid() {
    for (source, mut options) in variants::all().into_iter().filter(|(_, options)| variants::is_for_vulkan(options)) {
        options.extend([("SUBGROUPS", 1), ("IMMEDIATES", 1)]);
        validate(&format!("{} {options:?}", source.name), &source.variant(&options).unwrap());
    }
}

/// A browser compiles WGSL itself, and takes less than naga does.
#[test]
fn a_browser_compiles_every_variant_that_it_can_be_given() {
    let folder = tempfile::tempdir().unwrap();
    let is_for_pages = |(_, options): &(_, Vec<(&str, u32)>)| {
        let is_native = variants::needs_subgroups(options) || variants::is_for_vulkan(options);
        !options.contains(&("F16", 1)) && !is_native
    };
    let mut count = 0;
    for (source, mut options) in variants::all().into_iter().filter(is_for_pages) {
        options.extend([("SUBGROUPS", 0), ("IMMEDIATES", 0)]);
        std::fs::write(folder.path().join(format!("{count} {}", source.name)), source.variant(&options).unwrap())
            .unwrap();
        count += 1;
    }
    let mut python = Command::new(environment::python().unwrap());
    python.arg(environment::repository().join("tests/python/browser_shaders.py"));
    let ended = python.arg(environment::browser().unwrap()).arg(folder.path()).output().unwrap();
    let (seen, errors) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success() && seen.trim() == count.to_string(), "{count}: {seen}{errors}");
}
