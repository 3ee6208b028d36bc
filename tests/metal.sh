#!/usr/bin/env bash
# Type-checks the kernels with the WebGPU device, wgpu's Metal backend included, for Apple Silicon, on any host: nothing is
# linked, so neither an SDK nor an Apple machine is needed. It shows that the host's side compiles, no more; that the shaders
# translate to Metal's language is tested by kernels/tests/webgpu_shaders.rs.
#
#   tests/metal.sh
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-apple-darwin
arguments=(check --release --package lockstep-kernels --lib --features webgpu --target "$target" --target-dir target/metal)

fail() { echo "tests/metal.sh: $*" >&2; exit 1; }

if rustup target list --installed 2>/dev/null | grep -qx "$target" || rustup target add "$target" 2>/dev/null; then
    exec cargo "${arguments[@]}"
fi

# Without rustup's library for that target the library is compiled too, from the sources that Debian ships: 145 MB.
if ! dpkg -s rust-web-src >/dev/null 2>&1; then
    command -v apt-get >/dev/null || fail "rustup has no $target, and there is no apt-get to fetch rust-web-src"
    echo "== Rust with its library's sources through apt-get" >&2
    as_root=$([ "$(id -u)" = 0 ] || echo sudo)
    $as_root apt-get -qq update
    $as_root apt-get -qq install -y --no-install-recommends rustc-web cargo-web rust-web-src >/dev/null ||
        fail "cannot install rustc-web, cargo-web and rust-web-src"
fi
RUSTC_BOOTSTRAP=1 RUSTC=/usr/bin/rustc exec /usr/bin/cargo "${arguments[@]}" -Zbuild-std=std
