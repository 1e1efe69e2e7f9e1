#!/usr/bin/env bash
# One command for a machine with a GPU and no network: build against the Python that is there, test
# everything, check the kernels with compute-sanitizer, measure, and write
# benchmarks/results/<device>.json. Takes under 8 minutes. Needs torch, pybind11, scikit-build-core,
# cmake, ninja, pytest, nvcc. Environment: PYTHON (default python3), RESULTS (default benchmarks/results).
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
results=${RESULTS:-benchmarks/results}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir -p "$results"
passed=()
failed=()

# Joins what was measured so far into one file, named after the device, so that a run that is cut
# short leaves something.
write_results() {
  "$python" - "$site" "$results" "${passed[*]-}" "${failed[*]-}" <<'PY'
import json, pathlib, sys
import torch
site, results = map(pathlib.Path, sys.argv[1:3])
name = torch.cuda.get_device_name()
steps = {"passed": sys.argv[3].split(), "failed": sys.argv[4].split()}
parts = {path.stem: json.loads(path.read_text()) for path in sorted(site.glob("*.json"))}
environment = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": name}
out = results / (name.lower().replace(" ", "_") + ".json")
out.write_text(json.dumps({**environment, **steps, **parts}, indent=1) + "\n")
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
  -Ccmake.define.FASTAMP_CUDA=ON -Ccmake.define.CMAKE_CUDA_ARCHITECTURES=native .
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
"$python" -c "import fastamp; assert fastamp.backends()[0] == 'cuda', fastamp.backends()" || exit 1

# A file whose extra package is not there costs that file only.
# One process: the tests share one GPU, and pytest-xdist need not be there.
pytest=("$python" -m pytest -q -p no:cacheprovider --continue-on-collection-errors
  -o addopts="-rfE --strict-markers --strict-config --import-mode=importlib")
sanitized=(tests/step/test_clip_and_norm.py -m cuda -k "promised_order or reaches_every_element or gradient_at_once")
step gpu-tests "${pytest[@]}" -m cuda
step benchmarks env -u PYTHONSAFEPATH "$python" benchmarks/amp.py --device cuda --json "$site/amp.json"
step timer "$python" -m fastamp.bench timer --json "$site/timer.json"
step memcheck compute-sanitizer --tool memcheck --error-exitcode 9 "${pytest[@]}" "${sanitized[@]}"
step main-job "$python" -m fastamp.bench --device cuda --json "$site/bench.json"
step racecheck compute-sanitizer --tool racecheck --error-exitcode 9 "${pytest[@]}" "${sanitized[@]}"
step cpu-tests "${pytest[@]}" -m "not cuda"

echo "results in $results, $SECONDS s, passed: ${passed[*]-}, failed: ${failed[*]-}"
((${#failed[@]} == 0))
