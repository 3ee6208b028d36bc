//! Where the tests find what they need.

use std::{env, path::PathBuf};

use anyhow::{Context, ensure};

/// The model file: `LOCKSTEP_TEST_MODEL`.
///
/// # Errors
/// If it is not set or names no file.
pub fn model() -> anyhow::Result<PathBuf> {
    path_of("LOCKSTEP_TEST_MODEL")
}

/// A Chromium: `LOCKSTEP_TEST_BROWSER`.
///
/// # Errors
/// If it is not set or names no file.
pub fn browser() -> anyhow::Result<PathBuf> {
    path_of("LOCKSTEP_TEST_BROWSER")
}

/// The page that computes in a browser, which `browser/build.sh` made: `LOCKSTEP_TEST_PAGE`.
///
/// # Errors
/// If it is not set or names no folder.
pub fn page() -> anyhow::Result<PathBuf> {
    path_of("LOCKSTEP_TEST_PAGE")
}

/// A Prometheus, with its promtool beside it: `LOCKSTEP_TEST_PROMETHEUS`.
///
/// # Errors
/// If it is not set or names no file.
pub fn prometheus() -> anyhow::Result<PathBuf> {
    path_of("LOCKSTEP_TEST_PROMETHEUS")
}

/// A Python with llama.cpp, grpcio, openai and playwright: `LOCKSTEP_TEST_PYTHON`.
///
/// # Errors
/// If it is not set or names no file.
pub fn python() -> anyhow::Result<PathBuf> {
    path_of("LOCKSTEP_TEST_PYTHON")
}

/// A Python with torch and transformers: `LOCKSTEP_TEST_TORCH_PYTHON`, or `python3`.
pub fn torch_python() -> PathBuf {
    env::var_os("LOCKSTEP_TEST_TORCH_PYTHON").map_or_else(|| PathBuf::from("python3"), PathBuf::from)
}

fn path_of(variable: &str) -> anyhow::Result<PathBuf> {
    let path = env::var_os(variable).map(PathBuf::from);
    let path = path.with_context(|| format!("{variable} is not set: run the tests with tests/run.sh"))?;
    ensure!(path.exists(), "{variable} is {}, which does not exist: run the tests with tests/run.sh", path.display());
    Ok(path)
}

/// Root of the repository.
pub fn repository() -> PathBuf {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    PathBuf::from(root)
}

/// Where cargo builds.
pub fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from)
}

/// The binary that the tests run: `LOCKSTEP_BIN`, or the release build of this workspace.
///
/// # Errors
/// If it is not built.
pub fn binary() -> anyhow::Result<PathBuf> {
    let path = env::var_os("LOCKSTEP_BIN").map_or_else(|| target().join("release/lockstep"), PathBuf::from);
    ensure!(path.exists(), "{} is not built: run the tests with tests/run.sh", path.display());
    Ok(path)
}
