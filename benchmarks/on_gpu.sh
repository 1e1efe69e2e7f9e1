#!/usr/bin/env bash
# All checks for a machine with a GPU and no network: builds against the installed Python, tests, and
# measures with `python -m fastamp.bench` and gpu.py. Runs all parts, or those named: on_gpu.sh tests soak.
# `--list` shows them. Each part takes less than eight minutes and adds its results to
# benchmarks/results/<device>.json, even if it is cut short. Exit status: 0; 1 if something failed;
# 2 if nothing can run. Needs torch 2.10 or later, pybind11, scikit-build-core, cmake,
# ninja, pytest, nvcc. Environment: PYTHON (default python3), RESULTS (default benchmarks/results).
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
results=${RESULTS:-benchmarks/results}

# The parts, the greatest risk first: minutes, the risk, and the claim that rests on the part.
read -r -d '' list <<'EOF'
tests       6  the kernels are wrong, or launch too often               | docs/how/numerics.md: the same bits on every backend
captures    1  a capture breaks, or the step in it                      | docstrings: safe under graph capture
ranks       3  NCCL, FSDP2, NVML, a failed kernel                       | README: clipping over ranks
sanitize    7  memory that is not a kernel's own                        |
soak        5  a batch is read while it is copied; leaks                | README: device="cuda" copies ahead
kernels     3  kernels far from the memory's speed, copies beside no work | docs/how/gpu.md: the H200's times
rows        6  the step brings nothing                                  | docs/how/gpu.md: the H200's times
bench       6  the main job, loader and timer bring nothing             |
EOF
if [[ ${1-} == --list ]]; then
  printf "part      min  %-56s | what rests on it\n%s\n" "the risk" "$list"
  exit 0
fi
known=$(awk '/^[a-z]/ { print $1 }' <<<"$list")
for part in "$@"; do
  if ! grep -qx -- "$part" <<<"$known"; then
    echo "on_gpu.sh: $part is no part; --list tells them" >&2
    exit 2
  fi
done
if ! nvidia-smi -L >/dev/null 2>&1 && ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
  echo "on_gpu.sh: needs a GPU, and finds none" >&2
  exit 2
fi
if ! why=$("$python" - 2>&1 <<'PY'
import re, sys, torch
version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
if version < (2, 10):
    sys.exit(f"needs torch 2.10 or later, finds {torch.__version__}")
if not torch.cuda.is_available():
    sys.exit(f"needs a GPU, and torch {torch.__version__} finds none")
PY
); then
  echo "on_gpu.sh: ${why##*$'\n'}" >&2
  exit 2
fi
(($#)) && known=$(printf '%s\n' "$@")
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir -p "$results"
passed=()
failed=()

# Adds the results so far to one file, named after the device: the steps that passed and failed with
# their commits, each failed test, and the measurements.
write_results() {
  "$python" - "$site" "$results" "${passed[*]-}" "${failed[*]-}" <<'PY'
import json, pathlib, subprocess, sys
import xml.etree.ElementTree as ET
import torch
site, results = map(pathlib.Path, sys.argv[1:3])
passed, failed = (set(words.split()) for words in sys.argv[3:5])
name = torch.cuda.get_device_name()
out = results / (name.lower().replace(" ", "_") + ".json")
old = json.loads(out.read_text()) if out.exists() else {}
command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
steps = {
    "passed": sorted({*old.get("passed", []), *passed} - failed),
    "failed": sorted({*old.get("failed", []), *failed} - passed),
}
found = {path.stem: json.loads(path.read_text()) for path in sorted(site.glob("*.json"))}
for path in sorted(site.glob("*.xml")):
    cases = list(ET.parse(path).iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    found[path.stem] = {
        "tests": len(cases),
        "skipped": skipped,
        "failed": [f"{c.get('classname')}::{c.get('name')}" for c in bad],
    }
commits = {**old.get("commits", {}), **dict.fromkeys([*passed, *failed], commit)}
environment = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": name}
record = {**old, **environment, **steps, "commits": commits, **found}
out.write_text(json.dumps(record, indent=1) + "\n")
PY
}

wanted() { grep -qx -- "$1" <<<"$known"; }

step() {
  local name=$1 start=$SECONDS
  shift
  printf '\n=== %s\n' "$name"
  if timeout -k 10 470 "$@"; then passed+=("$name"); else failed+=("$name"); fi
  printf -- '--- %s: %d s\n' "$name" $((SECONDS - start))
  write_results
}

# How many kernels a whole step of AdamW launches, the two that read the gradients included; a GPU
# with slow float64 launches a third one for each table of them.
cat >"$site/launches.py" <<'PY'
import json, sys
import torch
import fastamp
found = {}
for tensors, groups, fused, most in [(148, 1, True, 4), (148, 1, None, 3), (600, 2, None, 3), (465, 465, None, 4)]:
    made = [torch.nn.Parameter(torch.ones(1000, device="cuda")) for _ in range(tensors)]
    each = tensors // groups
    rows = [{"params": made[i * each : (i + 1) * each], "lr": 1e-3 / (1 + i)} for i in range(groups)]
    optimizer = torch.optim.AdamW(rows, fused=fused)
    for _ in range(2):
        for p in made:
            p.grad = torch.ones_like(p)
        with torch.profiler.profile() as profile:
            assert fastamp.optimizer_step(optimizer, 1.0).way == "native"
            torch.cuda.synchronize()
    on_gpu = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = {e.key.partition("<")[0]: e.count for e in on_gpu if "kernel" in e.key and "again_kernel" not in e.key}
    name = f"{tensors} tensors, {groups} groups, {'fused' if fused else 'left open'}"
    found[name] = kernels
    print(name, kernels)
    assert 0 < sum(kernels.values()) <= most, found
json.dump(found, open(sys.argv[1], "w"))
PY

# NVML's values reach the tracker, without an error.
cat >"$site/nvml.py" <<'PY'
import time, warnings
import fastamp
tracker = fastamp.MetricsTracker()
tracker.watch("cuda")
time.sleep(3)
tracker.flush()
names = [name for name in tracker.summary() if name.startswith("gpu")]
print(names)
assert names
tracker.close()
PY

# A kernel that fails ends the program with torch's error, and no thread waits for ever.
cat >"$site/failed_kernel.py" <<'PY'
import torch
import fastamp
parameter = torch.nn.Parameter(torch.zeros(8, device="cuda"))
parameter.grad = torch.ones(8, device="cuda")
batches = iter(fastamp.prefetch((torch.ones(1000) for _ in range(100)), "cuda"))
next(batches)
parameter.grad[torch.tensor([99], device="cuda")]
try:
    print(fastamp.clip_grad_norm_(parameter, 1.0).item())
except (RuntimeError, torch.AcceleratorError) as error:
    print(type(error).__name__, str(error).splitlines()[0])
    assert "assert" in str(error), error
else:
    raise AssertionError("no error")
PY

printf '\n=== build\n'
"$python" -m pip install -q --no-index --no-deps --no-build-isolation --target "$site" \
  --config-settings=cmake.define.FASTAMP_CUDA=ON --config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=native . || exit 1
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
"$python" -c "import fastamp; assert fastamp.backends()[0] == 'cuda', fastamp.backends()" || exit 1

# One process: the tests share one GPU, and pytest-xdist need not be installed. A missing extra
# package fails only the files that need it.
pytest=("$python" -m pytest -q -p no:cacheprovider --continue-on-collection-errors
  -o addopts="-rfE --strict-markers --strict-config --import-mode=importlib")
if wanted tests; then
  step launches "$python" "$site/launches.py" "$site/launches.json"
  step gpu-tests "${pytest[@]}" -m cuda --junitxml="$site/gpu-tests.xml" --deselect tests/step/test_captures.py
fi
if wanted captures; then
  step captures "${pytest[@]}" -m cuda --junitxml="$site/captures.xml" tests/step/test_captures.py
fi
if wanted ranks; then
  small=(--layers 2 --width 64 --heads 2 --block-size 64 --steps 60 --batch-size 8)
  for parallel in ddp fsdp; do
    step "nccl-$parallel" "$python" -m torch.distributed.run --nproc-per-node "$("$python" -c 'import torch; print(torch.cuda.device_count())')" \
      examples/train_gpt.py "${small[@]}" --precision bf16-mixed --parallel "$parallel"
  done
  step nvml "$python" "$site/nvml.py"
  step failed-kernel "$python" "$site/failed_kernel.py"
fi
if wanted sanitize; then
  sanitized=(tests/step/test_clip_and_norm.py -m cuda -k "promised_order or reaches_every_element or gradient_at_once")
  updates=(tests/step/test_counts.py -m cuda
    -k "bias_corrections or many_parameters or anywhere_in_a_bucket or learning_rates_on")
  for tool in memcheck racecheck; do
    step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 "${pytest[@]}" "${sanitized[@]}"
    step "$tool-update" compute-sanitizer --tool "$tool" --error-exitcode 9 "${pytest[@]}" "${updates[@]}"
  done
fi
if wanted soak; then step soak "$python" tests/support/gpu_soak.py; fi
bench() { step "$1" "$python" -m fastamp.bench "${@:2}" --device cuda --json "$site/bench_$1.json"; }
if wanted kernels; then step gpu "$python" benchmarks/gpu.py --json "$site/bench_gpu.json"; fi
if wanted rows; then bench step step; fi
if wanted bench; then
  bench jobs jobs
  bench loader loader
  bench timer timer
fi

echo "results in $results, $SECONDS s; passed: ${passed[*]-}; failed: ${failed[*]-}"
echo "what rests on the parts that ran:"
grep -E "^($(paste -sd'|' <<<"$known")) " <<<"$list" | awk -F'|' 'NF > 1 && $2 !~ /^ *$/ { split($1, w, " "); print "  " w[1] ":" $2 }'
((${#failed[@]} == 0))
