//! `tests/gpu.sh run` with a pack and a GPU that are not real: what it writes when parts fail, hang, or the run is ended.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use lockstep_tests::{environment, process::PATIENCE};
use serde_json::Value;
use tempfile::TempDir;

const LIBTEST: &str = "echo 'test one ... ok'; echo 'test result: ok. 2 passed; 0 failed; 0 ignored'";
const BENCH: &str = r#"case $1 in
devices) echo '[{"device": "cpu", "remark": null}, {"device": "vulkan:0", "remark": '"${SOFTWARE:-null}"'}]' ;;
synth) touch "$4" ;;
bench) echo '{"target": "shape (x)", "startup": {"bytes": 1, "load_seconds": 1, "first_token_seconds": 1}, "tests": [{"test": "pp512", "tokens_per_second": 9.0, "min": 8.0, "max": 9.5}]}' ;;
esac"#;

/// A pack of shell scripts, a folder with an `nvidia-smi`, and where results go.
struct FakePack {
    folder: TempDir,
}

impl FakePack {
    fn new(parts: &[(&str, &str)]) -> Self {
        let pack = Self { folder: tempfile::tempdir().unwrap() };
        let smi = "case $1 in --list-gpus) echo 'GPU 0: fake' ;; *) echo 'fake, 1.0' ;; esac";
        for (path, script) in [("bin/nvidia-smi", smi), ("pack/lockstep", BENCH)].iter().chain(parts) {
            let path = pack.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::write(pack.path("pack/commit"), "c0ffee\n").unwrap();
        pack
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(environment::repository().join("tests/gpu.sh"));
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap());
        command.arg("run").args([self.path("pack"), self.path("results")]).env("PATH", path).env("LIMIT", "2");
        command.env("LOCKSTEP_TEST_TORCH_PYTHON", "false").stdin(Stdio::null());
        command
    }

    fn report(&self) -> (Value, String) {
        let read = |name: &str| fs::read_to_string(self.path("results").join(name)).unwrap();
        (serde_json::from_str(&read("gpu.json")).unwrap(), read("gpu.txt"))
    }
}

fn outcome<'a>(report: &'a Value, test: &str) -> &'a str {
    report["tests"][test].as_str().unwrap_or_else(|| panic!("{test}: {report}"))
}

#[test]
fn every_part_is_in_the_report_whatever_became_of_it() {
    let pack = FakePack::new(&[
        ("pack/tests/cuda_good", LIBTEST),
        ("pack/tests/cuda_bad", "echo no; exit 101"),
        ("pack/tests/cuda_slow", "echo 'test first ... ok'; exec sleep 60"),
        ("pack/tests/webgpu_good", LIBTEST),
        ("pack/benches/cuda_fast", "echo 12 GB/s"),
        ("pack/benches/cuda_slow", "echo first line; exec sleep 60"),
    ]);
    let Output { status, stderr, .. } = pack.command().output().unwrap();
    assert!(!status.success(), "{}", String::from_utf8_lossy(&stderr));
    let (report, table) = pack.report();
    assert_eq!((report["commit"].as_str(), report["gpu"].as_str()), (Some("c0ffee"), Some("1 x fake, 1.0")));
    for (test, expected) in [
        ("cuda_good", "passed: 2 passed; 0 failed"),
        ("cuda_bad", "failed (101): 0 passed before"),
        ("cuda_slow", "cut off after 2 s: 1 passed before"),
        ("webgpu_good", "passed: 2 passed; 0 failed"),
        ("bench_cuda_slow", "cut off after 2 s"),
        ("two_gpus", "not-run: GPUs here: 1"),
    ] {
        assert_eq!(outcome(&report, test), expected);
        assert!(table.contains(expected), "{table}");
    }
    assert_eq!(report["models"][0]["tokens_per_second"], 9.0);
    let lines: Vec<_> =
        report["kernels"].as_array().unwrap().iter().map(|line| line["line"].as_str().unwrap()).collect();
    assert_eq!(lines, ["12 GB/s", "first line"]);
}

#[test]
fn vulkan_in_software_is_no_gpu() {
    let parts = [
        ("pack/tests/cuda_a", LIBTEST),
        ("pack/tests/webgpu_a", LIBTEST),
        ("pack/benches/cuda_a", "echo 12 GB/s"),
        ("pack/benches/webgpu_a", "echo 13 GB/s"),
    ];
    let pack = FakePack::new(&parts);
    let run = |must: &str| pack.command().env("SOFTWARE", "\"computes\"").env("VULKAN", must).output().unwrap().status;
    assert!(run("0").success());
    let (report, table) = pack.report();
    assert!(outcome(&report, "vulkan").starts_with("not-run: "), "{report}");
    assert!(!table.contains("webgpu_a") && table.contains("12 GB/s"), "{table}");
    assert!(!run("1").success());
}

#[test]
fn a_run_that_is_ended_writes_its_report() {
    let pack = FakePack::new(&[
        ("pack/tests/cuda_a", LIBTEST),
        ("pack/tests/cuda_b", "echo started >\"$0.started\"; exec sleep 60"),
        ("pack/tests/cuda_c", LIBTEST),
    ]);
    let mut run = pack.command().env("LIMIT", "60").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    wait_for(&pack.path("pack/tests/cuda_b.started"), start);
    let pid = run.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    while run.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < PATIENCE, "it goes on");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (report, _) = pack.report();
    assert_eq!(outcome(&report, "cuda_a"), "passed: 2 passed; 0 failed");
    for test in ["cuda_b", "cuda_c"] {
        assert_eq!(outcome(&report, test), "cut off when the run was ended: 0 passed before");
    }
}

fn wait_for(path: &Path, start: Instant) {
    while !path.exists() {
        assert!(start.elapsed() < PATIENCE, "{} does not appear", path.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}
