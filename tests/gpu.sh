#!/usr/bin/env bash
# All GPU tests and benchmarks on a machine with NVIDIA GPUs, of CUDA and, on the first of them, of Vulkan. Needs no toolkit
# and no cargo there, but the driver, NVRTC and cuBLASLt, and libvulkan.so.1. Fails where no GPU is found; where Vulkan shows
# none first, the report says that its part was not run, and VULKAN=1 fails.
#
#   tests/gpu.sh pack FOLDER                         where cargo is: builds (with FEATURES, those of CUDA and WebGPU if not
#                                                    set), and collects what `run` needs
#   tests/gpu.sh run FOLDER RESULTS [MODEL.gguf]     on the machine with GPUs: writes RESULTS/gpu.json and RESULTS/gpu.txt
#
# A random Llama is compared with transformers if python3 (LOCKSTEP_TEST_TORCH_PYTHON names another) has torch and
# transformers; TRANSFORMERS=1 fails without them. SANITIZE=1 runs the kernel tests under compute-sanitizer as well.
# Without MODEL (SmolLM2-135M-Instruct Q4_1, the README says where it comes from) the end-to-end tests are not run.
# Benchmarks use a random model of the shape of an 8B Llama in Q4_K_M, written to RESULTS (4.6 GiB); SHAPE=llama-70b,
# REPETITIONS=3, PREFILL, DEPTH and CONCURRENT change them. A part (an executable of tests, a benchmark) that takes longer
# than LIMIT seconds (600) is cut off. Both files are written whatever happens, be it that the run is ended (INT, TERM),
# and say what failed, was cut off or was not run.
set -euo pipefail

fail() { echo "tests/gpu.sh: $*" >&2; exit 1; }
say() { echo "== $*" >&2; }

pack() {
    local folder=$1
    cd "$(dirname "$0")/.."
    mkdir -p "$folder/tests" "$folder/benches"
    local features=${FEATURES:-lockstep-cli/cuda,lockstep-cli/webgpu}
    cargo build --release --workspace --features "$features" --bin lockstep
    install -s target/release/lockstep "$folder/lockstep"
    local artifacts
    artifacts=$(cargo test --release --workspace --features "$features" --no-run --message-format=json \
        --test 'cuda_*' --test 'webgpu_*' --test scenarios --bench 'cuda_*' --bench 'webgpu_*')
    while read -r kind name path; do
        # These need a compiler or a browser, and no GPU.
        case $name in cuda_compile | webgpu_shaders) continue ;; esac
        install -s "$path" "$folder/$kind/$name"
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

# Runs a part for LIMIT seconds at most. When the whole run is ended the part is, and `ended` says so for those after it.
ended=
child=
limited() {
    local outcome=0
    [ -z "$ended" ] || return 143
    timeout -k 5 "${LIMIT:-600}" "$@" &
    child=$!
    wait "$child" || outcome=$?
    # A signal interrupts the first wait, not the part.
    [ -z "$ended" ] || { wait "$child" || true; outcome=143; }
    child=
    return "$outcome"
}
end() {
    ended=1
    [ -z "$child" ] || kill "$child" 2>/dev/null || true
}

# What became of a part that ended so: `limited` tells.
name_of_outcome() {
    case $1 in
        0) echo passed ;;
        124 | 137) echo "cut off after ${LIMIT:-600} s" ;;
        143) echo "cut off when the run was ended" ;;
        *) echo "failed ($1)" ;;
    esac
}

# Those tests of one executable that need a GPU, and no more of them than there are; the log keeps what they print. Words
# after the third are put before the command.
run_tests() {
    local executable=$1 log=$2 num_gpus=$3
    shift 3
    local filter=(--ignored)
    # Everything of WebGPU concerns the adapter, but what is run once more on a certain one in software.
    case $executable in */webgpu_*) filter=(--skip subgroups_of_four) ;; esac
    [ "$has_transformers" = 1 ] || filter+=(--skip transformers_does)
    [ "$num_gpus" -ge 2 ] || filter+=(--skip two_gpus)
    [ "$num_gpus" -ge 4 ] || filter+=(--skip four_gpus)
    limited "$@" "$executable" "${filter[@]}" --test-threads 1 --nocapture >"$log" 2>&1
}

# Whether the first adapter that Vulkan shows is a GPU: it is the one that the tests take.
is_vulkan_there() {
    "$LOCKSTEP_BIN" devices --json 2>"$1" | python3 -c '
import json, sys
vulkan = [device for device in json.load(sys.stdin) if device["device"] == "vulkan:0"]
sys.exit(not vulkan or vulkan[0]["remark"] is not None)' 2>>"$1"
}

# Tests that passed, by their log.
count_passed() {
    grep -o '[0-9]* passed; [0-9]* failed' "$1" || echo "$(grep -cE '(^|[. ])ok$' "$1") passed before"
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
    trap end INT TERM
    has_transformers=1
    if ! "${LOCKSTEP_TEST_TORCH_PYTHON:-python3}" -c 'import torch, transformers' 2>"$results/logs/transformers"; then
        has_transformers=${TRANSFORMERS:-0}
        tests+=("transformers not-run: $(tail -1 "$results/logs/transformers")")
        say "no comparison with transformers: $(tail -1 "$results/logs/transformers")"
    fi

    local has_vulkan=1
    if ! is_vulkan_there "$results/logs/vulkan"; then
        has_vulkan=0
        [ "${VULKAN:-0}" = 0 ] || failed=1
        tests+=("vulkan not-run: vulkan:0 is no GPU, lockstep devices tells more")
        say "no tests of Vulkan: vulkan:0 is no GPU, lockstep devices tells more"
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
        [ "$has_vulkan" = 1 ] || case $name in webgpu_*) continue ;; esac
        say "test $name"
        [ -z "$model" ] || LOCKSTEP_TEST_MODEL=$(realpath "$model")
        [ -z "$model" ] || export LOCKSTEP_TEST_MODEL
        outcome=0
        run_tests "$executable" "$results/logs/$name" "$num_gpus" || outcome=$?
        [ "$outcome" = 0 ] || { failed=1; tail -20 "$results/logs/$name" >&2; }
        tests+=("$name $(name_of_outcome "$outcome"): $(count_passed "$results/logs/$name")")
    done
    # Ranks on Vulkan, alone and beside the processor's, on the real model.
    if [ "$has_vulkan" = 1 ] && [ -n "$model" ] && [ -e "$folder/tests/scenarios" ]; then
        say "test scenarios_webgpu"
        outcome=0
        limited "$folder/tests/scenarios" webgpu --nocapture >"$results/logs/scenarios_webgpu" 2>&1 || outcome=$?
        [ "$outcome" = 0 ] || { failed=1; tail -20 "$results/logs/scenarios_webgpu" >&2; }
        tests+=("scenarios_webgpu $(name_of_outcome "$outcome"): $(count_passed "$results/logs/scenarios_webgpu")")
    fi

    if [ "${SANITIZE:-0}" = 1 ]; then
        say "compute-sanitizer"
        local findings
        findings=$(sanitize "$folder" "$results") || failed=1
        mapfile -t -O "${#tests[@]}" tests <<<"$findings"
    fi

    local shape=${SHAPE:-llama-8b}
    local file=$results/$shape.gguf outcome=0
    say "bench $shape"
    [ -e "$file" ] || limited "$LOCKSTEP_BIN" synth "$shape" --output "$file" >&2 || outcome=$?
    [ "$outcome" = 0 ] || { failed=1; tests+=("synth_$shape $(name_of_outcome "$outcome")"); rm -f "$file"; }
    # On one GPU, on all of them together, and on the first through Vulkan, where many sequences at once take long.
    local devices=(cuda:0)
    [ "$num_gpus" = 1 ] || devices+=("$(seq -s, -f 'cuda:%.0f' 0 $((num_gpus - 1)))")
    [ "$has_vulkan" = 0 ] || devices+=(vulkan:0)
    [ -e "$file" ] || devices=()
    for device in "${devices[@]}"; do
        local bench=("$LOCKSTEP_BIN" bench --model "$file" --device "$device" --tensor-parallel "$(tr , '\n' <<<"$device" | wc -l)"
            --repetitions "${REPETITIONS:-5}" --json)
        local lengths=("--prefill ${PREFILL:-512,4096} --depth ${DEPTH:-512,8192}" "--prefill 512 --concurrent ${CONCURRENT:-8,32,128}")
        [ "$device" != vulkan:0 ] || unset 'lengths[1]'
        local length
        for length in "${lengths[@]}"; do
            outcome=0
            # shellcheck disable=SC2086 # words
            limited "${bench[@]}" $length || outcome=$?
            [ "$outcome" = 0 ] || { failed=1; tests+=("bench_${device}_${length// /_} $(name_of_outcome "$outcome")"); }
        done
    done >"$results/logs/model.json"

    # Last: they take longest and concern kernels alone.
    for executable in "$folder"/benches/*; do
        [ -e "$executable" ] || continue
        local name
        name=$(basename "$executable")
        [ "$has_vulkan" = 1 ] || case $name in webgpu_*) continue ;; esac
        say "bench $name"
        outcome=0
        limited "$executable" --bench >"$results/logs/bench_$name" 2>&1 || outcome=$?
        [ "$outcome" = 0 ] || { failed=1; tail -20 "$results/logs/bench_$name" >&2; tests+=("bench_$name $(name_of_outcome "$outcome")"); }
        while read -r line; do benches+=("$name $line"); done <"$results/logs/bench_$name"
    done

    RESULTS=$results GPU="$num_gpus x $gpu" COMMIT=$(cat "$folder/commit") SHAPE=$shape \
        TESTS=$(printf '%s\n' "${tests[@]}") BENCHES=$(printf '%s\n' ${benches[@]+"${benches[@]}"}) python3 - <<'PYTHON'
import json, os

tests = {name: outcome for name, outcome in (line.split(" ", 1) for line in os.environ["TESTS"].splitlines())}
kernels = [line.split(" ", 1) for line in os.environ["BENCHES"].splitlines() if " " in line]
models, startups = [], []
with open(os.environ["RESULTS"] + "/logs/model.json") as lines:
    for line in filter(str.strip, lines):
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
