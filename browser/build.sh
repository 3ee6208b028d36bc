#!/usr/bin/env bash
# Makes the folder for `lockstep coordinator --browser-dir`: the page, and the crates that it runs as WebAssembly.
#
#   browser/build.sh [FOLDER]        default: target/browser/page
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-target/browser/page}

# Small code, since every visitor loads it.
CARGO_PROFILE_RELEASE_OPT_LEVEL=s CARGO_PROFILE_RELEASE_STRIP=debuginfo \
    tests/cargo-for.sh wasm32-unknown-unknown rustc --quiet --release --locked --target-dir target/browser \
    --package lockstep-browser --lib --crate-type cdylib
cargo run --quiet --locked --manifest-path browser/bindgen/Cargo.toml --target-dir target/browser -- \
    target/browser/wasm32-unknown-unknown/release/lockstep_browser.wasm "$folder"
cp browser/page/* "$folder/"
