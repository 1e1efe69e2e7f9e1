#!/usr/bin/env bash
# One command for a machine with a GPU and no network: build against the Python that is there, test,
# check the kernels with compute-sanitizer, measure with `python -m fastamp.bench`, and write
# benchmarks/results/<device>.json. Without arguments it runs all four parts. Where a command may
# take eight minutes at most, run them one by one: on_gpu.sh tests, then sanitize, bench and rows (of
# the step); the results are added to the file. Needs torch, pybind11, scikit-build-core, cmake,
# ninja, pytest, nvcc. Environment: PYTHON (default python3), RESULTS (default benchmarks/results).
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
results=${RESULTS:-benchmarks/results}
parts=" ${*:-tests sanitize bench rows} "
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir -p "$results"
passed=()
failed=()

# Adds what was measured so far to one file, named after the device, so that a run that is cut short
# leaves something.
write_results() {
  "$python" - "$site" "$results" "${passed[*]-}" "${failed[*]-}" <<'PY'
import json, pathlib, sys
import torch
site, results = map(pathlib.Path, sys.argv[1:3])
passed, failed = (set(words.split()) for words in sys.argv[3:5])
name = torch.cuda.get_device_name()
out = results / (name.lower().replace(" ", "_") + ".json")
old = json.loads(out.read_text()) if out.exists() else {}
steps = {
    "passed": sorted({*old.get("passed", []), *passed} - failed),
    "failed": sorted({*old.get("failed", []), *failed} - passed),
}
found = {path.stem: json.loads(path.read_text()) for path in sorted(site.glob("*.json"))}
environment = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": name}
out.write_text(json.dumps({**old, **environment, **steps, **found}, indent=1) + "\n")
PY
}

step() {
  local name=$1 start=$SECONDS
  shift
  printf '\n=== %s\n' "$name"
  if "$@"; then passed+=("$name"); else failed+=("$name"); fi
  printf -- '--- %s: %d s\n' "$name" $((SECONDS - start))
  write_results
}

step build "$python" -m pip install -q --no-index --no-deps --no-build-isolation --target "$site" \
  --config-settings=cmake.define.FASTAMP_CUDA=ON --config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=native .
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
"$python" -c "import fastamp; assert fastamp.backends()[0] == 'cuda', fastamp.backends()" || exit 1

# A file whose extra package is not there costs that file only.
# One process: the tests share one GPU, and pytest-xdist need not be there.
pytest=("$python" -m pytest -q -p no:cacheprovider --continue-on-collection-errors
  -o addopts="-rfE --strict-markers --strict-config --import-mode=importlib")
sanitized=(tests/step/test_clip_and_norm.py -m cuda -k "promised_order or reaches_every_element or gradient_at_once")
if [[ $parts == *" tests "* ]]; then
  step gpu-tests "${pytest[@]}" -m cuda
  step cpu-tests "${pytest[@]}" -m "not cuda"
fi
if [[ $parts == *" sanitize "* ]]; then
  for tool in memcheck racecheck; do
    step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 "${pytest[@]}" "${sanitized[@]}"
  done
fi
commands=()
if [[ $parts == *" bench "* ]]; then commands+=(amp loader timer); fi
if [[ $parts == *" rows "* ]]; then commands+=(step); fi
for command in "${commands[@]}"; do
  step "$command" "$python" -m fastamp.bench "$command" --device cuda --json "$site/bench_$command.json"
done

echo "results in $results, $SECONDS s, passed: ${passed[*]-}, failed: ${failed[*]-}"
((${#failed[@]} == 0))
