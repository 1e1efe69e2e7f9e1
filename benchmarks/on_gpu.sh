#!/usr/bin/env bash
# All checks for a machine with a GPU and no network, in two calls of less than ten minutes each:
#   benchmarks/on_gpu.sh first      then      benchmarks/on_gpu.sh second
# Or the parts that are named, or all; --list shows them. Each piece of a part appends its lines to
# RESULTS/on_gpu.jsonl before the next one begins, and at the end, also of a script that is stopped,
# RESULTS/<device>.json is made of them. What the programs print is in RESULTS/on_gpu.log.
# Exit status: 0; 1 if something failed; 2 if nothing can run. Needs torch 2.10 or later, nvcc,
# pybind11, scikit-build-core, cmake, ninja; the tests need pytest, and hypothesis or leave out the
# files that use it. Environment: PYTHON (default python3), RESULTS (default benchmarks/results),
# COMMIT (default git's), LIMIT_S of the whole call (default 570 with first or second), PART_S, the
# most seconds of a piece.
set -uo pipefail
set -m  # pieces are groups of processes, and do not ignore Ctrl-C
cd "$(dirname "$0")/.."
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin  # where compute-sanitizer is
python=${PYTHON:-python3}
results=${RESULTS:-benchmarks/results}

# The parts, those that tell most first: the call, minutes at most, the risk, and what rests on it.
read -r -d '' list <<'EOF'
build    first  4   it does not compile for this GPU                      | README: the install
facts    first  1   -                                                     | the limit of all times
bits     first  1.5 the kernels are wrong                                 | docs/how/numerics.md: the same bits on every backend
launches first  1   a step launches too often                             | docs/how/step.md: launches of a step
captures first  1.5 a capture breaks, or the step in it                   | docstrings: safe under graph capture
kernels  first  1.5 kernels far from the memory's speed                   | docs/how/gpu.md: times
step     first  3   the step brings nothing                               | docs/how/gpu.md: times
tests    first  4   streams, copies, timer and trainer, on a device       | docs/how/gpu.md: what has run
memcheck first  2   memory that is not a kernel's own                     |
shipped  second 6   the code for all GPUs that people get does not run    | README: the install
soak     second 2   a batch is read while it is copied; a wrong way; leaks | README: device="cuda" copies ahead
racecheck second 2  threads of a block that do not wait for each other    |
nccl     second 1.5 NCCL, FSDP2                                           | README: clipping over ranks
nvml     second 0.5 NVML                                                  | docs: fastamp.MetricsTracker
failed   second 0.5 a kernel that fails lets a thread wait for ever       |
rows     second 8   the step brings nothing on other shapes               | docs/how/gpu.md: times
jobs     second 8   a whole training gains nothing                        | docs/how/gpu.md: times
EOF
known=$(awk '{ print $1 }' <<<"$list")
if [[ ${1-} == --list ]]; then
  printf '%-10s %-7s min  %-58s | what rests on it\n' part call "the risk"
  awk '{ n = $1; c = $2; m = $3; $1 = $2 = $3 = ""; i = index($0, "|")
    printf "%-10s %-7s %-4s %-58s %s\n", n, c, m, substr($0, 4, i - 4), substr($0, i) }' <<<"$list"
  exit 0
fi
wanted=()
for word in "$@"; do
  if [[ $word == first || $word == second ]]; then
    wanted+=($(awk -v call="$word" '$2 == call { print $1 }' <<<"$list"))
    LIMIT_S=${LIMIT_S:-570}
  elif grep -qx -- "$word" <<<"$known"; then
    wanted+=("$word")
  else
    echo "on_gpu.sh: $word is no part; --list tells them" >&2
    exit 2
  fi
done
(($#)) || wanted=($known)
if ! nvidia-smi -L >/dev/null 2>&1 && ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
  echo "on_gpu.sh: needs a GPU, and finds none" >&2
  exit 2
fi
if ! device=$("$python" benchmarks/gpu_parts.py check 2>&1); then
  echo "on_gpu.sh: ${device##*$'\n'}" >&2
  exit 2
fi
device=${device##*$'\n'}

commit=${COMMIT:-$(git describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null)}
end_s=$((${LIMIT_S:-86400} - 15))  # a piece that is stopped may take so long to end
mkdir -p "$results"
results=$(cd "$results" && pwd)
lines=$results/on_gpu.jsonl
log=$results/on_gpu.log
site=$(mktemp -d)
child=
failed=()
write_record() { echo "record: $("$python" benchmarks/gpu_record.py "$results" "$lines")"; }
finish() {
  [[ -n $child ]] && kill -TERM -- "-$child" 2>/dev/null && wait "$child"
  write_record
  rm -rf "$site"
}
[[ -s $lines ]] && write_record  # of a call that was killed
: >"$lines"
: >"$log"
trap finish EXIT
trap 'exit 143' TERM HUP
trap 'exit 130' INT

# piece NAME SECONDS COMMAND: runs one under its limit and what is left of the call's, less `kept_s`
# for those that follow. Its stdout is lines of the record, its stderr goes to the log.
kept_s=0
piece() {
  local name=$1 most=$2 begin=$SECONDS left=$((end_s - SECONDS - kept_s)) status=0 said from
  shift 2
  from=$(wc -l <"$log")
  printf '{"part": "%s", "begun": "%s", "commit": "%s", "device": "%s"}\n' \
    "$name" "$(date -u +%FT%TZ)" "$commit" "$device" >>"$lines"
  ((most > left)) && most=$left
  ((most > ${PART_S:-most})) && most=$PART_S
  if ((left < 1)); then
    said='left out: no time'
  elif ! type "$1" >/dev/null 2>&1; then
    said="left out: there is no $1 here"
  else
    timeout -k 15 "$most" "$@" >>"$lines" 2>>"$log" &
    child=$!
    wait "$child"
    status=$?
    child=
    case $status in
      0) said=passed ;;
      124 | 137) said='cut short' ;;
      *) said=failed ;;
    esac
  fi
  # after a line that was cut short, on a line of its own
  printf '\n{"part": "%s", "status": "%s", "rc": %d, "s": %d}\n' \
    "$name" "$said" $status $((SECONDS - begin)) >>"$lines"
  printf '%-16s %4d s  %s\n' "$name" $((SECONDS - begin)) "$said"
  [[ $said == passed ]] && return
  failed+=("$name")
  [[ $said == left* ]] || tail -n "+$((from + 1))" "$log" | tail -n 12 | awk '{ print "  " $0 }'
  return 1
}

# What a program prints belongs to the log: quiet COMMAND.
quiet=(bash -c 'exec "$@" >&2' quiet)

# build PART SECONDS ARCHITECTURES: installs into a folder of its own.
given=${PYTHONPATH:+:$PYTHONPATH}
built=
build() {
  local flags=(--config-settings=cmake.define.FASTAMP_CUDA=ON) target=$site/$1
  flags+=("--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=$3")
  export PYTHONPATH=$target$given PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
  piece "$1" "$2" "${quiet[@]}" "$python" -m pip install -v --no-index --no-deps \
    --no-build-isolation --target "$target" "${flags[@]}" . && parts "$1-works" 60 built && built=$1
}

tests() { piece "$1" "$2" "$python" benchmarks/gpu_tests.py --limit "$2" "${@:3}"; }
parts() { piece "$1" "$2" "$python" benchmarks/gpu_parts.py "${@:3}"; }
bits() { piece "$1" "$2" "$python" benchmarks/gpu_bits.py; }
sanitize() {
  local report=$results/$1.txt
  # each tensor in memory of its own, so that no neighbour hides a write past its end
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 piece "$1" 120 compute-sanitizer --tool "$1" --error-exitcode 9 \
    --log-file "$report" "$python" benchmarks/gpu_bits.py --small
  [[ -e $report ]] && tail -n 3 "$report"
}
ranks() {
  local gpus parallel small=(--layers 2 --width 64 --heads 2 --block-size 64 --steps 60)
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  for parallel in ddp fsdp; do
    piece "nccl-$parallel" 45 "${quiet[@]}" "$python" -m torch.distributed.run \
      --nproc-per-node "$gpus" examples/train_gpt.py "${small[@]}" --batch-size 8 \
      --precision bf16-mixed --parallel "$parallel"
  done
}

for part in "${wanted[@]}"; do
  if [[ $part == shipped ]]; then
    # beside a driver a build is for the cards that are there, unless it is told others
    all=$(sed -n 's/.*set(CMAKE_CUDA_ARCHITECTURES \(.*\))$/\1/p' CMakeLists.txt)
    build shipped 330 "${all// /;}" && bits shipped-bits 90
    continue
  fi
  if [[ -z $built || $part == build ]]; then
    build build 240 native || break
    [[ $part == build ]] && continue
  fi
  case $part in
    facts) parts facts 60 facts ;;
    bits) bits bits 90 ;;
    launches) parts launches 60 launches ;;
    captures) tests captures 90 tests/step/test_captures.py ;;
    kernels) piece kernels 90 "$python" benchmarks/gpu.py --lines ;;
    step) parts step 180 bench step --first 3 --limit 180 ;;
    tests) kept_s=75; tests tests 240; kept_s=0 ;;
    memcheck | racecheck) sanitize "$part" ;;
    soak) piece soak 120 "$python" benchmarks/gpu_soak.py --minutes 1 ;;
    nccl) ranks ;;
    nvml) parts nvml 30 nvml ;;
    failed) parts failed 30 failed-kernel ;;
    rows) parts rows 480 bench step --skip 3 --limit 480 ;;
    jobs) parts jobs 480 bench train small-gpt mlp rl --limit 480 ;;
  esac
done
echo "$SECONDS s; not passed: ${failed[*]-none}"
((${#failed[@]} == 0))
