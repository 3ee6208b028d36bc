#!/usr/bin/env bash
# All GPU tests and benchmarks on a machine with NVIDIA GPUs. Needs no toolkit and no cargo there, but the driver, NVRTC
# and cuBLASLt. Fails where no GPU is found.
#
#   tests/gpu.sh pack FOLDER                         where cargo is: builds, and collects what `run` needs
#   tests/gpu.sh run FOLDER RESULTS [MODEL.gguf]     on the machine with GPUs: writes RESULTS/gpu.json and RESULTS/gpu.txt
#
# A random Llama is compared with transformers if python3 (LOCKSTEP_TEST_TORCH_PYTHON names another) has torch and
# transformers; TRANSFORMERS=1 fails without them. SANITIZE=1 runs the kernel tests under compute-sanitizer as well.
# Without MODEL (SmolLM2-135M-Instruct Q4_1, tests/run.sh says where it comes from) the end-to-end tests are not run, and
# both files say so. Benchmarks use a random model of the shape of an 8B Llama in Q4_K_M, written to RESULTS.
# SHAPE=llama-70b, REPETITIONS=5 and the like change them.
set -euo pipefail

fail() { echo "tests/gpu.sh: $*" >&2; exit 1; }
say() { echo "== $*" >&2; }

pack() {
    local folder=$1
    cd "$(dirname "$0")/.."
    mkdir -p "$folder/tests" "$folder/benches"
    cargo build --release --workspace --features lockstep-cli/cuda --bin lockstep
    install -s target/release/lockstep "$folder/lockstep"
    local artifacts
    artifacts=$(cargo test --release --workspace --features lockstep-cli/cuda --no-run --message-format=json \
        --test 'cuda_*' --test scenarios --bench 'cuda_*')
    while read -r kind name path; do
        [ "$name" = cuda_compile ] || install -s "$path" "$folder/$kind/$name"
    done < <(python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message.get("executable"):
        kind = message["target"]["kind"][0]
        if kind in ("test", "bench"):
            print({"test": "tests", "bench": "benches"}[kind], message["target"]["name"], message["executable"])
' <<<"$artifacts")
    git rev-parse HEAD >"$folder/commit" 2>/dev/null || echo unknown >"$folder/commit"
    install "tests/gpu.sh" "$folder/gpu.sh"
    say "packed into $folder: $(du -sh "$folder" | cut -f1)"
}

# The kernel tests under compute-sanitizer, every third case of each, all side by side; prints a line a test and tool, fails
# if one fails or does not end within SANITIZE_SECONDS. A cache of a million tokens is too large for it.
sanitize() {
    local folder=$1 results=$2 failed=0 sanitizer
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    [ -x "$sanitizer" ] || fail "SANITIZE=1, but compute-sanitizer is not found (it comes with the CUDA toolkit)"
    local runs=()
    for executable in "$folder"/tests/cuda_*; do
        for tool in memcheck racecheck; do
            case $executable in *_long) continue ;; esac
            # Tests of errors ask for what the driver refuses: that is no finding.
            LOCKSTEP_TEST_FEW=1 LIMIT=${SANITIZE_SECONDS:-300} run_tests "$executable" \
                "$results/logs/${tool}_$(basename "$executable")" 1 \
                "$sanitizer" --tool "$tool" --report-api-errors no --error-exitcode 9 &
            runs+=("${tool}_$(basename "$executable") $!")
        done
    done
    local run name outcome
    for run in "${runs[@]}"; do
        name=${run% *}
        outcome=clean
        wait "${run#* }" || { outcome="failed ($?)"; failed=1; tail -20 "$results/logs/$name" >&2; }
        echo "$name $outcome: $(grep -o 'SUMMARY: .*' "$results/logs/$name" | tail -1)"
    done
    return "$failed"
}

# Ignored tests of one executable that need no more than there is; the log keeps what they print. Words after the third
# are put before the command.
run_tests() {
    local executable=$1 log=$2 num_gpus=$3
    shift 3
    local skipped=()
    [ "$has_transformers" = 1 ] || skipped+=(--skip transformers_does)
    [ "$num_gpus" -ge 2 ] || skipped+=(--skip two_gpus)
    [ "$num_gpus" -ge 4 ] || skipped+=(--skip four_gpus)
    timeout "${LIMIT:-600}" "$@" "$executable" --ignored --test-threads 1 --nocapture "${skipped[@]}" >"$log" 2>&1
}

run() {
    local folder results=$2 model=${3:-} failed=0
    [ -x "$1/lockstep" ] && [ -d "$1/tests" ] || fail "$1 holds no pack: make one with tests/gpu.sh pack"
    folder=$(cd "$1" && pwd)
    local num_gpus
    num_gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU') || fail "no GPU is found (nvidia-smi --list-gpus)"
    mkdir -p "$results/logs"
    results=$(cd "$results" && pwd)
    local gpu
    gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1)
    # Multicast between GPUs is not available on every machine that has several.
    export NCCL_NVLS_ENABLE=0
    export LOCKSTEP_BIN=$folder/lockstep LOCKSTEP_LOG=warn CARGO_TARGET_DIR=$results
    export LOCKSTEP_TEST_KERNEL_CACHE=$results/kernels
    local tests=() benches=()
    has_transformers=1
    if ! "${LOCKSTEP_TEST_TORCH_PYTHON:-python3}" -c 'import torch, transformers' 2>"$results/logs/transformers"; then
        has_transformers=${TRANSFORMERS:-0}
        tests+=("transformers not-run: $(tail -1 "$results/logs/transformers")")
        say "no comparison with transformers: $(tail -1 "$results/logs/transformers")"
    fi

    [ "$num_gpus" -ge 2 ] || tests+=("two_gpus not-run: GPUs here: $num_gpus")
    [ "$num_gpus" -ge 4 ] || tests+=("four_gpus not-run: GPUs here: $num_gpus")

    for executable in "$folder"/tests/*; do
        local name outcome
        name=$(basename "$executable")
        if [ "$name" = scenarios ] && [ -z "$model" ]; then
            tests+=("$name not-run:no-model")
            continue
        fi
        say "test $name"
        [ -z "$model" ] || LOCKSTEP_TEST_MODEL=$(realpath "$model")
        [ -z "$model" ] || export LOCKSTEP_TEST_MODEL
        outcome=passed
        run_tests "$executable" "$results/logs/$name" "$num_gpus" || { outcome=failed; failed=1; tail -20 "$results/logs/$name" >&2; }
        tests+=("$name $outcome: $(grep -o '[0-9]* passed; [0-9]* failed' "$results/logs/$name" || echo "it ended early")")
    done

    if [ "${SANITIZE:-0}" = 1 ]; then
        say "compute-sanitizer"
        local findings
        findings=$(sanitize "$folder" "$results") || failed=1
        mapfile -t -O "${#tests[@]}" tests <<<"$findings"
    fi

    for executable in "$folder"/benches/*; do
        [ -e "$executable" ] || continue
        local name
        name=$(basename "$executable")
        say "bench $name"
        timeout 600 "$executable" --bench >"$results/logs/bench_$name" 2>&1 || { failed=1; tail -20 "$results/logs/bench_$name" >&2; }
        while read -r line; do benches+=("$name $line"); done <"$results/logs/bench_$name"
    done

    local shape=${SHAPE:-llama-8b}
    local file=$results/$shape.gguf
    say "bench $shape"
    [ -e "$file" ] || "$LOCKSTEP_BIN" synth "$shape" --output "$file" >&2
    # On one GPU, and on all of them together.
    local devices=(cuda:0)
    [ "$num_gpus" = 1 ] || devices+=("$(seq -s, -f 'cuda:%.0f' 0 $((num_gpus - 1)))")
    for device in "${devices[@]}"; do
        local bench=("$LOCKSTEP_BIN" bench --model "$file" --device "$device" --tensor-parallel "$(tr , '\n' <<<"$device" | wc -l)"
            --repetitions "${REPETITIONS:-5}" --json)
        { "${bench[@]}" --prefill "${PREFILL:-512,4096}" --depth "${DEPTH:-512,8192}" &&
            "${bench[@]}" --prefill 512 --concurrent "${CONCURRENT:-8,32,128}"; } || failed=1
    done >"$results/logs/model.json"

    RESULTS=$results GPU="$num_gpus x $gpu" COMMIT=$(cat "$folder/commit") SHAPE=$shape \
        TESTS=$(printf '%s\n' "${tests[@]}") BENCHES=$(printf '%s\n' ${benches[@]+"${benches[@]}"}) python3 - <<'PYTHON'
import json, os

tests = {name: outcome for name, outcome in (line.split(" ", 1) for line in os.environ["TESTS"].splitlines())}
kernels = [line.split(" ", 1) for line in os.environ["BENCHES"].splitlines() if " " in line]
models, startups = [], []
with open(os.environ["RESULTS"] + "/logs/model.json") as lines:
    for line in lines:
        run = json.loads(line)
        startups.append(run["startup"])
        models += [{"model": run["target"], **test} for test in run["tests"]]
report = {
    "gpu": os.environ["GPU"], "commit": os.environ["COMMIT"],
    "tests": tests, "startups": startups, "kernels": [{"bench": bench, "line": line} for bench, line in kernels], "models": models,
}
with open(os.environ["RESULTS"] + "/gpu.json", "w") as file:
    json.dump(report, file, indent=1)
rows = [("gpu", report["gpu"]), ("commit", report["commit"])]
rows += [(f"test {name}", outcome) for name, outcome in tests.items()]
rows += [(bench, line) for bench, line in kernels]
rows += [(f"{test['model'].partition(' (')[0]}: {test['test']}", f"{test['tokens_per_second']:.1f} tokens/s ({test['min']:.1f} to {test['max']:.1f})") for test in models]
rows += [(f"{os.environ['SHAPE']} startup", f"{start['bytes'] / 2**30:.1f} GiB loaded in {start['load_seconds']:.2f} s, first token after {start['first_token_seconds']:.2f} s") for start in startups]
width = max(len(row[0]) for row in rows)
with open(os.environ["RESULTS"] + "/gpu.txt", "w") as file:
    file.writelines(f"{name:<{width}}  {value}\n" for name, value in rows)
PYTHON
    cat "$results/gpu.txt"
    [ "$failed" = 0 ] || fail "something failed; $results/logs has the output"
}

case "${1:-} $#" in
    "pack 2") pack "$2" ;;
    "run 3" | "run 4") run "$2" "$3" "${4:-}" ;;
    *) fail "usage: tests/gpu.sh pack FOLDER | tests/gpu.sh run FOLDER RESULTS [MODEL.gguf]" ;;
esac
