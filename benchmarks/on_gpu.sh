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
failed=()
step() {
  local name=$1 start=$SECONDS
  shift
  printf '\n=== %s\n' "$name"
  "$@" || failed+=("$name")
  printf -- '--- %s: %d s\n' "$name" $((SECONDS - start))
}

step "build for this GPU" "$python" -m pip install -q --no-index --no-deps --no-build-isolation \
  --target "$site" -Ccmake.define.FASTAMP_CUDA=ON -Ccmake.define.CMAKE_CUDA_ARCHITECTURES=native .
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
"$python" -c "import fastamp; assert fastamp.backends() == ['cuda', 'cpu', 'fallback'], fastamp.backends()" || exit 1

step "tests" "$python" -m pytest -q -p no:cacheprovider
for tool in memcheck racecheck; do
  step "compute-sanitizer $tool" compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-name-exclude kns=at \
    "$python" -m pytest -q -p no:cacheprovider tests/test_amp.py -m cuda \
    -k "promised_order or reaches_every_element or every_kind_of_gradient_at_once"
done
step "benchmarks" "$python" benchmarks/amp.py --device cuda --json "$site/amp.json"
step "the main job" "$python" -m fastamp.bench --device cuda --json "$site/bench.json"

"$python" - "$site" "$results" ${failed[@]+"${failed[@]}"} <<'PY'
"""Join what was measured into one file, named after the device."""
import json, pathlib, sys
import torch
site, results = map(pathlib.Path, sys.argv[1:3])
name = torch.cuda.get_device_name()
parts = {p.stem: json.loads(p.read_text()) for p in sorted(site.glob("*.json"))}
out = results / (name.lower().replace(" ", "_") + ".json")
out.write_text(json.dumps({"device": name, "failed": sys.argv[3:], **parts}, indent=1) + "\n")
print("wrote", out)
PY
if ((${#failed[@]})); then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "all passed in $SECONDS s"
