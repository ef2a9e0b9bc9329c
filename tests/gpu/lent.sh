#!/usr/bin/env bash
# The first ten minutes on a GPU that was lent: what matters most first, each part within a limit of its own.
#
#   tests/gpu/lent.sh [FOLDER]       results go to FOLDER, else to $OUT, else to build/lent
#
# Needs python3 with torch, Triton, numpy and pytest, and no pip: sources are on PYTHONPATH, pytest reads no settings of
# this repository and no conftest.py. Engines also need transformers, tokenizers and safetensors; parts that miss a
# module skip and say so. A part leaves a log with a line for each test as it begins and ends, and a report in JUnit's
# form that is whole after each test; summary.txt has every test that did not pass, and lent.tar.gz all of it.
#
#   PYTHON=python3      which Python
#   LENT_SECONDS=570    of all parts; those that no time is left for are listed
#   LENT_DRY=1          a CPU plays the GPU, under Triton's interpreter: one case of each kernel, and all is imported
set -u
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
out=${1:-${OUT:-$root/build/lent}}
python=${PYTHON:-python3}
seconds=${LENT_SECONDS:-570}
began=$SECONDS
rm -rf "$out/parts"
mkdir -p "$out/parts"
sources="$root/kernels/src:$root/services/engine/src:$root/services/worker/src:$root/tests:$root/tests/gpu"
export PYTHONPATH="$sources${PYTHONPATH:+:$PYTHONPATH}"
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1  # others' plugins may miss what they import
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/lent-triton}"
if [ "${LENT_DRY:-}" ]; then export TRITON_INTERPRET=1; else export PAGESTREAM_REQUIRE=gpu; fi
: > "$out/summary.txt"

say() { printf '%4ds  %s\n' $((SECONDS - began)) "$*" | tee -a "$out/summary.txt"; }

pack() { tar -czf "$out/.lent.tar.gz" -C "$out" parts summary.txt && mv "$out/.lent.tar.gz" "$out/lent.tar.gz"; }

# part NAME LIMIT COMMAND...: ended by SIGINT, and 15 s later by SIGKILL, which alone ends a call into the driver.
part() {
    local name=$1 limit=$2 left=$((seconds - (SECONDS - began) - 10)) code=0
    shift 2
    if [ "$left" -lt 20 ]; then say "$name: not begun, no time is left"; return; fi
    [ "$limit" -lt "$left" ] || limit=$left
    say "$name: begins, at most $limit s"
    timeout -s INT -k 15 "$limit" "$@" > "$out/parts/$name.log" 2>&1 || code=$?
    case $code in
        124 | 137) say "$name: ended after its $limit s; the last line of parts/$name.log is where it was" ;;
        *) say "$name: ended, exit code $code" ;;
    esac
    "$python" "$root/tests/gpu/lent_report.py" "$out/parts/$name.xml" "$out/parts/$name.log" | tee -a "$out/summary.txt"
    pack
}

# tests NAME LIMIT ARGUMENTS...: pytest, in several processes where xdist is there and the part asks for them.
tests() {
    local name=$1 limit=$2 processes=()
    shift 2
    if [ "$1" = parallel ]; then
        shift
        if "$python" -c 'import xdist' 2> /dev/null; then processes=(-p xdist.plugin -n 8); fi
    fi
    export LENT_RESULTS="$out/parts/$name.xml"
    part "$name" "$limit" "$python" -m pytest -p lent_results --noconftest -c /dev/null --rootdir "$root" \
        -p no:cacheprovider -W ignore::pytest.PytestUnknownMarkWarning -v -rfE --tb=short "${processes[@]}" "$@"
}

# -- minute 0: what machine this is ----------------------------------------------------------------------------------
part machine 40 "$python" "$root/tests/gpu/lent_machine.py"

# -- minutes 0 to 2: does each kernel compile and give the right numbers; does a graph follow its tensors ----
tests kernels-first 150 parallel tests/gpu/test_kernels_gpu.py -k 'one_case_of_each or captured'

# -- minutes 2 to 4: an engine, recorded and not, against a CPU; adapters after sleep; a cache of fp8 ----
tests engine-first 130 tests/gpu/test_engine_gpu.py -k 'llama and greedy or recorded_decodes or asleep or fp8'

# -- minutes 4 to 7: every case of every kernel ----------------------------------------------------------------------
if [ -z "${LENT_DRY:-}" ]; then
    tests kernels-all 190 parallel tests/gpu/test_kernels_gpu.py -k 'not one_case_of_each and not captured'
fi

# -- minutes 7 to 8: the other engines: bits in any batch, weights in host memory, requests that go on ----
tests engine-all 90 tests/gpu/test_engine_gpu.py tests/gpu/test_gpu_use.py \
    -k 'not (llama and greedy or recorded_decodes or asleep or fp8)'

# -- minutes 8 to 9.5: figures ---------------------------------------------------------------------------------------
if [ -z "${LENT_DRY:-}" ]; then
    part figures 90 "$python" tests/benchmarks/gpu/run.py --only decode linears launch \
        --json "$out/figures.json" --page "$out/parts/figures.md" --without-tests
fi

say "done: $out/summary.txt, $out/lent.tar.gz"
! grep -q '^ *FAILED\|exit code [^05]\|ended after\|not begun' "$out/summary.txt"
