#!/usr/bin/env bash
# Type-checks the kernels with the WebGPU device, wgpu's Metal backend included, for Apple Silicon, on any host: nothing is
# linked, so neither an SDK nor an Apple machine is needed. It shows that the host's side compiles, no more; that the shaders
# translate to Metal's language is tested by kernels/tests/webgpu_shaders.rs.
#
#   tests/metal.sh
set -euo pipefail
cd "$(dirname "$0")/.."
exec tests/cargo-for.sh aarch64-apple-darwin check --release --package lockstep-kernels --lib --features webgpu \
    --target-dir target/metal
