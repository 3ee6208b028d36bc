#!/usr/bin/env bash
# Runs cargo for a target with rustup's library for it or, where rustup gives none, with the library compiled along, from the
# sources that Debian ships.
#
#   tests/cargo-for.sh TARGET SUBCOMMAND [arguments of cargo]
set -euo pipefail
target=$1 subcommand=$2
shift 2

fail() { echo "cargo-for.sh: $*" >&2; exit 1; }

if rustup target list --installed 2>/dev/null | grep -qx "$target" || rustup target add "$target" 2>/dev/null; then
    exec cargo "$subcommand" --target "$target" "$@"
fi
if ! dpkg -s rustc-web cargo-web rust-web-src >/dev/null 2>&1; then
    command -v apt-get >/dev/null || fail "rustup has no $target, and there is no apt-get to fetch rust-web-src"
    echo "== Rust with its library's sources through apt-get: 145 MB" >&2
    as_root=$([ "$(id -u)" = 0 ] || echo sudo)
    $as_root apt-get -qq update
    $as_root apt-get -qq install -y --no-install-recommends rustc-web cargo-web rust-web-src >/dev/null ||
        fail "cannot install rustc-web, cargo-web and rust-web-src"
fi
# Debian's has no linker for WebAssembly; the Rust that builds the rest has.
CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=$(find "$(rustc --print sysroot)" -name rust-lld | head -1)
export CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER
RUSTC_BOOTSTRAP=1 RUSTC=/usr/bin/rustc exec /usr/bin/cargo "$subcommand" --target "$target" -Zbuild-std=std,panic_abort "$@"
