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

# How many kernels a whole step of AdamW launches, the two that read the gradients included.
launches() {
  "$python" - "$site/launches.json" "${1:-cuda}" <<'PY'
import json, sys
import torch
import fastamp
device = sys.argv[2]
found = {}
for tensors, groups, fused, most in [(148, 1, True, 4), (148, 1, None, 3), (600, 2, None, 3), (465, 465, None, 4)]:
    made = [torch.nn.Parameter(torch.ones(1000, device=device)) for _ in range(tensors)]
    each = tensors // groups
    rows = [{"params": made[i * each : (i + 1) * each], "lr": 1e-3 / (1 + i)} for i in range(groups)]
    optimizer = torch.optim.AdamW(rows, fused=fused)
    for _ in range(2):
        for p in made:
            p.grad = torch.ones_like(p)
        with torch.profiler.profile() as profile:
            assert fastamp.optimizer_step(optimizer, 1.0).way == "native"
            torch.cuda.synchronize() if device == "cuda" else None
    on_gpu = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = {e.key.partition("<")[0]: e.count for e in on_gpu if "kernel" in e.key}
    name = f"{tensors} tensors, {groups} groups, {'fused' if fused else 'left open'}"
    found[name] = kernels
    print(name, kernels)
    assert device == "cpu" or 0 < sum(kernels.values()) <= most, found
json.dump(found, open(sys.argv[1], "w"))
PY
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
updates=(tests/step/test_counts.py -m cuda
  -k "bias_corrections or many_parameters or anywhere_in_a_bucket or learning_rates_on")
if [[ $parts == *" tests "* ]]; then
  step launches launches
  step gpu-tests "${pytest[@]}" -m cuda
  step cpu-tests "${pytest[@]}" -m "not cuda"
fi
if [[ $parts == *" sanitize "* ]]; then
  for tool in memcheck racecheck; do
    step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 "${pytest[@]}" "${sanitized[@]}"
    step "$tool-update" compute-sanitizer --tool "$tool" --error-exitcode 9 "${pytest[@]}" "${updates[@]}"
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
