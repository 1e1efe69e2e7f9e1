"""Jobs that people have, end to end: a naive loop, a good one with torch alone, and fastamp's.

Takes some six minutes for all jobs on two CPU cores. Where Accelerate, Lightning, torchdata or SPDL
are installed, they are raced too, which takes several minutes more.
"""

import argparse
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from fastamp._progress import progress
from fastamp.bench import photos
from fastamp.bench.arms import Arm, Run
from fastamp.bench.environment import no_speed_reason
from fastamp.bench.in_frameworks import Epoch
from fastamp.bench.job_peers import PEERS, begin_peer, list_peers
from fastamp.bench.jobs import JOBS
from fastamp.bench.loops import (
    AGREE_STEPS,
    ARMS,
    PARTS,
    Data,
    Loop,
    check_losses,
    find_data,
    list_parts,
    list_workers,
)
from fastamp.bench.race import Interval, Plan, Race, run_race, show
from fastamp.bench.record import Measurement, Report, Task, judge
from fastamp.bench.tasks import Training, copy_model, draw, find_make, make_loader, make_training
from fastamp.train.options import refuse
from fastamp.train.random_state import seed_all

MAIN = Plan(rounds=4000, warmup=2, half_width=0.01, limit_s=20.0)
REPAIRS = PEER_PLAN = Plan(rounds=4000, warmup=1, half_width=0.02, limit_s=10.0)
VISIT_S = 0.15  # of a visit of the stock loop, about
LEAST_STEPS, MOST_STEPS = 4, 256  # of a visit
WORKER_STEPS = 8  # of a visit with workers, at least: each pass waits for its first batch
EPOCHS = 4  # times as many steps in the main race, where a visit has only WORKER_STEPS
# Four short epochs for each choice of workers and precision, after one; the fastest one counts.
TRIALS = Plan(rounds=5, warmup=1)
CLEARLY = 0.95  # workers or a lower precision have to take less than this share of the time
# How many times as fast as the stock loop fastamp's should be, and as the naive loop.
TARGETS = {"cpu": {"mlp": 1.6, "tabular": 2.0, "rl": 2.0}, "cuda": {"groups": 1.3}}
OVER_NAIVE = {"gpt": 1.5}

METRICS = """speedup/JOB/ARM, of fastamp, naive and other people's loops over the stock loop, as in
speedup/mlp/fastamp, speedup/mlp/Lightning;
over_naive/JOB/ARM, of stock and fastamp over the naive loop; over_naive/JOB/PART/ARM, of the naive
loop with that part alone (loader, step, timing, precision), as in over_naive/mlp/loader/fastamp"""


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    named = " ".join(f"{name}: {_text(name)}" for name in JOBS)
    text = "jobs, or FILE.py:make, package.module:make (default: all of these; images needs Pillow)"
    add("names", nargs="*", metavar="NAME", help=f"{text}. {named}")


def _text(name: str) -> str:
    return " ".join(str(JOBS[name].__doc__).split()) if name in JOBS else "a task of the user's"


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    why = photos.why_none()
    names = list(
        dict.fromkeys(args.names or [name for name in JOBS if name != "images" or not why])
    )
    for name in names:  # before any work
        args.task = name  # for the text of an error
        if name == "images" and why:
            refuse("NAME", name, why)
        find_make(name)
    return {"jobs": names, "seed": args.seed}, partial(_run, args, names)


class Found(NamedTuple):
    """What was measured of one job."""

    steps: int  # of a visit
    main: Race  # of the stock loop with the naive one and fastamp's
    repairs: Race  # of the naive loop with each part alone
    peers: Race | None  # of the stock loop with other people's
    details: dict[str, Any]


def _run(args: argparse.Namespace, names: list[str]) -> Report:
    found = {}
    with progress(len(names)) as tick:
        for name in names:
            args.task = name
            found[name] = _measure(name, args.device, args.seed)
            gc.collect()  # the memory and processes of loaders
            tick()
    measurements = [m for name in names for m in _judge(args.device, name, found[name])]
    metrics = {each.name: each.interval for each in measurements if each.interval}
    rows = [_row(name, each, metrics) for name, each in found.items()]
    for name, part in product(names, PARTS):
        rows.append({"job": f"{name}: {part}"} | _over_naive(f"{name}/{part}", metrics))
    for name, peer in product(names, PEERS):
        if (key := _key(name, peer)) in metrics:
            rows.append({"job": f"{name}: {peer}", "over stock": _cell(metrics, key)})
    races = {name: each.main for name, each in found.items()}
    with_peers = {f"{name}, peers": each.peers for name, each in found.items() if each.peers}
    notes = [
        "ms a step: medians; times as fast: medians over rounds, with 95 % intervals",
        "over stock: fastamp's loop, or the one that the row names",
        "rows of a part: the naive loop with this part replaced",
        *(f"{name}: {_text(name)} {_describe(each)}" for name, each in found.items()),
    ]
    return Report(
        table=rows,
        races=races
        | {f"{name}, repairs": each.repairs for name, each in found.items()}
        | with_peers,
        measurements=measurements,
        notes=notes,
        details={name: each.details for name, each in found.items()},
        sentence=say_in_words(metrics, names),
    )


def say_in_words(metrics: dict[str, Interval], names: list[str]) -> str:
    """Return what fastamp brings to each job, in one sentence."""
    ratios = {name: metrics[f"speedup/{name}/fastamp"] for name in names}
    unclear = [name for name, ratio in ratios.items() if ratio.says_nothing]
    known = {n: ratio for n, ratio in ratios.items() if n not in unclear}
    changed = {n: ratio for n, ratio in known.items() if ratio.low > 1 or ratio.high < 1}
    made = [f"{name} {ratio.value:.2f}x" for name, ratio in changed.items()]
    parts = [f"makes {_join(made)} as fast" if made else ""]
    same = _join([name for name in names if name not in changed and name not in unclear])
    parts += [f"changes nothing that can be measured in {same}" if same else ""]
    parts += [f"cannot be judged in {_join(unclear)}, whose times vary too much" if unclear else ""]
    return f"Compared with a good loop of torch alone, fastamp {_join([*filter(None, parts)])}."


def _join(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _measure(name: str, device: str, seed: int) -> Found:
    training = make_training(find_make(name), device, seed)
    check_task(training, device, seed)
    data = find_data(training)
    make = partial(Loop, training=training, device=device, seed=seed)
    chosen = _choose(make, data, device, training.dtype)
    seen: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}  # the first ones, of the loops of one race

    def begin(arm: str, steps: int, closing: ExitStack) -> Epoch | None:
        """Train one visit of a loop, and return its epoch function; None if a peer fails."""
        parts = list_parts("stock" if arm in PEERS else arm)
        workers = chosen["workers"][parts["loader"]]
        loop = make(parts, dtype=chosen["dtype"], steps=steps, workers=workers)
        seed_all(seed, 0)  # of dropout
        epoch: Epoch | None = loop.epoch
        if arm in PEERS:
            epoch = begin_peer(arm, name, loop, closing, workers)
        else:
            loop.epoch()
        if epoch is not None:
            losses[arm] = [float(loss) for loss in loop.losses[:AGREE_STEPS]]
        return epoch

    def race(arms: list[str], steps: int, plan: Plan) -> Any:
        """Check that the losses of loops agree, and race them; None where there is only one."""
        losses.clear()
        with ExitStack() as closing:
            begun = {arm: begin(arm, steps, closing) for arm in arms}
            epochs = {arm: epoch for arm, epoch in begun.items() if epoch is not None}
            check_losses(name, losses, is_same=data.is_repeatable(), dtype=chosen["dtype"])
            seen.update(losses)
            return run_race(epochs, plan, device=device, seed=seed) if len(epochs) > 1 else None

    has_own = data.dataset is not None
    main = race(["stock", "naive", "fastamp"], chosen["steps"], MAIN)
    repairs = _list_repairs(chosen["dtype"], has_own=has_own)
    mended = race(["naive", *repairs], chosen["repair_steps"], REPAIRS)
    peers = race(["stock", *list_peers()], chosen["repair_steps"], PEER_PLAN) if has_own else None
    details = chosen | {"dtype": str(chosen["dtype"]), "losses": seen}
    return Found(chosen["steps"], main, mended, peers, details)


def check_task(training: Training, device: str, seed: int) -> None:
    """Take one step; raises a BrokenTask where the contract is broken."""
    run = Run(Arm(name="check"), device, replace(training, model=copy_model(training)))
    run.train_step(next(draw(make_loader(training, seed, device=device), device)))


def _list_repairs(dtype: torch.dtype | None, *, has_own: bool) -> list[str]:
    """Return the repairs that this job can have: naive loops with one part replaced."""
    arms = []
    for part, known in PARTS.items():
        if (part != "precision" or dtype is not None) and (part != "loader" or has_own):
            arms += [f"{part}: {arm}" for arm in known[1:]]
    return arms


def _choose(
    make: Callable[..., Loop], data: Data, device: str, wanted: torch.dtype | None
) -> dict[str, Any]:
    """Choose the steps of a visit, each loader's workers and the precision, by short trials."""

    def measure(
        arm: str, steps: int, ways: list[tuple[dict[str, Any], torch.dtype | None]]
    ) -> list[float]:
        """Return each way's seconds a step: the best of trials in turn, so that drift is shared."""
        loops = [make(list_parts(arm), dtype=d, steps=steps, workers=w) for w, d in ways]
        race = run_race({str(i): loop.epoch for i, loop in enumerate(loops)}, TRIALS, device=device)
        return [min(race.times_s(place)) / steps for place in race.arms]

    [step_s] = measure("stock", LEAST_STEPS, [({}, wanted)])
    steps = min(max(round(VISIT_S / step_s), LEAST_STEPS), MOST_STEPS)
    longer = max(steps, WORKER_STEPS)
    workers = {}
    for arm in ARMS:
        known = list_workers(data, arm)
        trials = measure(arm, longer, [(w, wanted) for w in known]) if len(known) > 1 else [0.0]
        trials[0] *= CLEARLY  # no workers, unless some are clearly faster
        workers[arm] = known[trials.index(min(trials))]
    repair_steps = longer if any(workers.values()) else steps
    steps = EPOCHS * repair_steps if repair_steps == WORKER_STEPS else repair_steps
    dtype = wanted
    if wanted is None and no_speed_reason(device, "bf16") is None:
        ways = [(workers["stock"], each) for each in (torch.bfloat16, None)]
        low, full = measure("stock", repair_steps, ways)
        dtype = torch.bfloat16 if low < CLEARLY * full else None
    return {"steps": steps, "repair_steps": repair_steps, "workers": workers, "dtype": dtype}


def _ratios(name: str, found: Found) -> Iterator[tuple[str, str, str, Interval]]:
    """Yield each ratio's name, arm, base and interval."""
    main, repairs, peers = found.main, found.repairs, found.peers
    for arm in ("fastamp", "naive"):
        yield _key(name, arm), arm, "stock", main.ratio(arm)
    if peers is not None:
        for arm in peers.arms[1:]:
            yield _key(name, arm), arm, "stock", peers.ratio(arm)
    for arm in ("stock", "fastamp"):
        yield f"over_naive/{name}/{arm}", arm, "naive", main.ratio(arm, "naive")
    for arm in repairs.arms[1:]:
        yield f"over_naive/{name}/{arm.replace(': ', '/')}", arm, "naive", repairs.ratio(arm)


def _key(name: str, arm: str) -> str:
    return f"speedup/{name}/{arm}"


def _row(name: str, found: Found, metrics: dict[str, Interval]) -> dict[str, str]:
    times_ms = {arm: 1e3 * found.main.quartiles_s(arm)[1] / found.steps for arm in ARMS}
    row = {"job": name, **{f"{arm} ms": show(time, ".3f") for arm, time in times_ms.items()}}
    row["over stock"] = _cell(metrics, _key(name, "fastamp"))
    return row | _over_naive(name, metrics)


def _over_naive(name: str, metrics: dict[str, Interval]) -> dict[str, str]:
    arms = ("stock", "fastamp")
    return {f"{arm} over naive": _cell(metrics, f"over_naive/{name}/{arm}") for arm in arms}


def _cell(metrics: dict[str, Interval], key: str) -> str:
    return metrics[key].text(".2f", "x") if key in metrics else "-"


def _describe(found: Found) -> str:
    """Say what the trials chose."""
    kinds = {arm: options for arm, options in found.details["workers"].items() if options}
    texts = [
        f"{arm} with {options['num_workers']} {options.get('worker', 'process')} workers"
        for arm, options in kinds.items()
    ]
    low = found.details["dtype"] != "None"
    texts += [f"stock and fastamp in {found.details['dtype'].removeprefix('torch.')}"] * low
    return f"({'; '.join([*texts, f'{found.steps} steps in a visit'])})"


def _judge(device: str, name: str, found: Found) -> Iterator[Measurement]:
    """Hold a built-in job to its targets; no job may become slower."""
    least = {_key(name, "fastamp"): TARGETS[device].get(name, 1.0)} if name in JOBS else {}
    if name in OVER_NAIVE and device == "cpu":
        least[f"over_naive/{name}/fastamp"] = OVER_NAIVE[name]
    for key, arm, base, ratio in _ratios(name, found):
        if key in least:
            why = f"{arm} over the {base} loop"
            yield judge(key, ratio, (least[key], math.inf), "x", why, arm=arm, base=base)
        else:
            yield Measurement(name=key, arm=arm, base=base, interval=ratio, unit="x")
