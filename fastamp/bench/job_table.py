"""Jobs that people have, end to end: a naive loop, a good one with torch alone, and fastamp's.

Takes some six minutes for all jobs on two CPU cores.
"""

import argparse
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp._progress import progress
from fastamp.bench import photos
from fastamp.bench.environment import DTYPES, no_speed_reason
from fastamp.bench.feeds import Data, find_data, list_ways, make_feed
from fastamp.bench.jobs import JOBS
from fastamp.bench.options import refuse
from fastamp.bench.race import Interval, Plan, Race, run_race, show
from fastamp.bench.record import Measurement, Report, Task, judge
from fastamp.bench.tasks import (
    Training,
    expect,
    find_make,
    make_optimizers,
    make_training,
    with_copy,
    with_fused,
)
from fastamp.bench.trainer import Config, Trainer
from fastamp.train.random_state import seed_all

AGREE_STEPS = 4  # the first losses, before small differences grow
# Tolerances of losses: same samples, one precision; two precisions; other crops or filters.
SAME, PRECISE, ALIKE = 1e-3, 3e-2, 0.1
ARMS = ("naive", "stock", "fastamp")
PARTS = ("loader", "step", "timing", "precision")
NAIVE = Config(name="naive", loader="naive", step="naive", timing="naive")
MAIN = Plan(rounds=4000, warmup=2, half_width=0.01, limit_s=20.0)
REPAIRS = Plan(rounds=4000, warmup=1, half_width=0.02, limit_s=10.0)
VISIT_S = 0.15  # of a visit of the stock loop, about
LEAST_STEPS, MOST_STEPS = 4, 256  # of a visit
WORKER_STEPS = 8  # of a visit with workers, at least: each pass waits for its first batch
EPOCHS = 4  # times as many steps in the main race, where a visit has only WORKER_STEPS
# Four short epochs for each choice of workers and precision, after one; the fastest one counts.
TRIALS = Plan(rounds=5, warmup=1)
CLEARLY = 0.95  # workers or a lower precision have to take less than this share of the time

METRICS = """speedup/JOB/fastamp, over the stock loop, as in speedup/mlp/fastamp;
over_naive/JOB/ARM, of stock and fastamp over the naive loop; over_naive/JOB/PART/ARM, of the naive
loop with that part alone (loader, step, timing, precision), as in over_naive/mlp/loader/fastamp"""


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    named = " ".join(f"{name}: {_text(name)}" for name in JOBS)
    text = "jobs, or FILE.py:make, package.module:make (default: all of these; images needs Pillow)"
    add("names", nargs="*", metavar="NAME", help=f"{text}. {named}")


def _text(name: str) -> str:
    return JOBS[name].text() if name in JOBS else "a task of the user's"


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

    main: Race  # of the stock loop with the naive one and fastamp's
    repairs: Race  # of the naive loop with each part alone
    details: dict[str, Any]  # what `_choose` chose, and the first losses


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
    races = {name: each.main for name, each in found.items()}
    notes = [
        "ms a step: medians; times as fast: medians over rounds, with 95 % intervals",
        "over stock: fastamp's loop",
        "rows of a part: the naive loop with this part replaced",
        *(f"{name}: {_text(name)} {_describe(each)}" for name, each in found.items()),
    ]
    return Report(
        table=rows,
        races=races | {f"{name}, repairs": each.repairs for name, each in found.items()},
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
    data = find_data(training)
    make = partial(make_loop, training=training, device=device, seed=seed)
    chosen = _choose(make, data, device, training.dtype)
    stock, naive, ours = loops = list_loops(chosen["base"], chosen["precision"])
    seen: dict[str, list[float]] = {}

    def race(configs: list[Config], steps: int, plan: Plan) -> Race:
        """Check that the losses of loops agree, and race them."""
        losses, visits = {}, {}
        for config in configs:
            loop = make(config, steps=steps, workers=chosen["workers"].get(config.loader, {}))
            seed_all(seed, 0)  # of dropout
            loop.visit()
            visits[config.name] = loop.visit
            losses[config.name] = [float(loss) for loss in loop.losses[:AGREE_STEPS]]
        precisions = {config.name: config.precision for config in configs}
        check_losses(losses, precisions, is_same=data.is_repeatable())
        seen.update(losses)
        return run_race(visits, plan, device=device, seed=seed)

    has_own = data.dataset is not None
    main = race([stock, naive, ours], chosen["steps"], MAIN)
    repairs = race([naive, *list_repairs(loops, has_own=has_own)], chosen["repair_steps"], REPAIRS)
    details = chosen | {"dtype": str(DTYPES.get(chosen["precision"])), "losses": seen}
    return Found(main, repairs, details)


def _choose(
    make: Callable[..., Trainer], data: Data, device: str, dtype: torch.dtype | None
) -> dict[str, Any]:
    """Choose the steps of a visit, each loop's loader, and the precision, by short trials."""
    precision = next((name for name, known in DTYPES.items() if known is dtype), "fp32")

    def measure(steps: int, ways: list[tuple[Config, dict[str, Any]]]) -> list[float]:
        """Return each way's seconds a step: the best of trials in turn, so that drift is shared."""
        loops = [make(config, steps=steps, workers=workers) for config, workers in ways]
        race = run_race({str(i): loop.visit for i, loop in enumerate(loops)}, TRIALS, device=device)
        return [min(race.times_s(place)) / steps for place in race.arms]

    ways = {
        config.name: [(replace(config, loader=key), w) for key, w in list_ways(data, config.name)]
        for config in list_loops("stock", precision)
    }
    step_s = min(measure(LEAST_STEPS, [way for way in ways["stock"] if not way[1]]))
    steps = min(max(round(VISIT_S / step_s), LEAST_STEPS), MOST_STEPS)
    longer = max(steps, WORKER_STEPS)
    best = {}
    for arm, known in ways.items():
        trials = measure(longer, known) if len(known) > 1 else [step_s]
        # No workers, unless some are clearly faster.
        trials = [
            time_s * (1 if way[1] else CLEARLY) for time_s, way in zip(trials, known, strict=True)
        ]
        best[arm] = known[trials.index(min(trials))]
    workers = {arm: chosen for arm, (_, chosen) in best.items()}
    repair_steps = longer if any(workers.values()) else steps
    steps = EPOCHS * repair_steps if repair_steps == WORKER_STEPS else repair_steps
    stock, options = best["stock"]
    if dtype is None and no_speed_reason(device, "bf16") is None:
        pair = [(replace(stock, precision=each), options) for each in ("bf16", "fp32")]
        low, full = measure(repair_steps, pair)
        precision = "bf16" if low < CLEARLY * full else "fp32"
    return {
        "steps": steps,
        "repair_steps": repair_steps,
        "base": stock.loader,
        "workers": workers,
        "precision": precision,
    }


def _judge(device: str, name: str, found: Found) -> Iterator[Measurement]:
    """Yield each ratio, and hold a built-in job's to its target; no job may become slower."""
    main, repairs, row = found.main, found.repairs, JOBS.get(name)
    about: dict[str, Any] = {"arm": "fastamp", "base": "stock"}
    key, ratio = f"speedup/{name}/fastamp", main.ratio("fastamp")
    if row is None:
        yield Measurement(name=key, interval=ratio, unit="x", **about)
    else:
        least = row.on_cpu if device == "cpu" else row.on_cuda
        yield judge(key, ratio, (least, math.inf), "x", "fastamp over the stock loop", **about)
    naive = {arm: main.ratio(arm, "naive") for arm in ("stock", "fastamp")}
    naive |= {arm: repairs.ratio(arm) for arm in repairs.arms[1:]}
    for arm, ratio in naive.items():
        key = f"over_naive/{name}/{arm.replace(': ', '/')}"
        yield Measurement(name=key, arm=arm, base="naive", interval=ratio, unit="x")


def _row(name: str, found: Found, metrics: dict[str, Interval]) -> dict[str, str]:
    steps = found.details["steps"]
    times_ms = {arm: 1e3 * found.main.quartiles_s(arm)[1] / steps for arm in ARMS}
    row = {"job": name, **{f"{arm} ms": show(time, ".3f") for arm, time in times_ms.items()}}
    row["over stock"] = metrics[f"speedup/{name}/fastamp"].text(".2f", "x")
    return row | _over_naive(name, metrics)


def _over_naive(name: str, metrics: dict[str, Interval]) -> dict[str, str]:
    found = {arm: metrics.get(f"over_naive/{name}/{arm}") for arm in ("stock", "fastamp")}
    return {
        f"{arm} over naive": "-" if ratio is None else ratio.text(".2f", "x")
        for arm, ratio in found.items()
    }


def _describe(found: Found) -> str:
    """Say what the trials chose."""
    kinds = {arm: options for arm, options in found.details["workers"].items() if options}
    texts = [
        f"{arm} with {options['num_workers']} {options.get('worker', 'process')} workers"
        for arm, options in kinds.items()
    ]
    if found.details["base"] == "indexed":
        texts.append("stock indexes the tensors by hand, faster than a DataLoader")
    low, steps = found.details["dtype"] != "None", f"{found.details['steps']} steps in a visit"
    texts += [f"stock and fastamp in {found.details['dtype'].removeprefix('torch.')}"] * low
    return f"({'; '.join([*texts, steps])})"


def list_loops(base: str, precision: str) -> list[Config]:
    """Return the good loop of torch alone, by its loader, the naive loop, and fastamp's."""
    stock = Config(name="stock", loader=base, precision=precision, timing="stock")
    parts: dict[str, Any] = dict.fromkeys(PARTS[:3], "fastamp")
    return [stock, NAIVE, replace(stock, name="fastamp", **parts)]


def list_repairs(loops: list[Config], *, has_own: bool) -> list[Config]:
    """Return the naive loops in which one part is replaced by that of the stock loop, or ours."""
    stock, naive, ours = loops
    both = [(part, config) for part in PARTS for config in (stock, ours)]
    return [
        replace(naive, name=f"{part}: {config.name}", **{part: getattr(config, part)})
        for part, config in both[0 if has_own else 2 : -1]  # both have one precision
        if getattr(config, part) != getattr(naive, part)
    ]


def check_losses(
    losses: dict[str, list[float]], precisions: dict[str, str], *, is_same: bool
) -> None:
    """Compare the first losses of all loops with those of the first loop.

    Raises:
        BrokenTask: they differ by more than rounding, or, where loops read other crops of the same
            images, their means differ by more than a tenth.
    """
    base = next(iter(losses))
    for arm, values in losses.items():
        pair = [torch.tensor(values), torch.tensor(losses[base])]
        rtol = SAME if precisions[arm] == precisions[base] else PRECISE
        if not is_same:
            pair, rtol = [losses.mean() for losses in pair], ALIKE
        wanted = f"the first losses of the {base} loop in all loops, such as {losses[base]}"
        got = f"{values} in the {arm} loop: does the task draw random numbers?"
        expect(torch.allclose(pair[0], pair[1], rtol, rtol), "loss", wanted, got)


def make_loop(config: Config, training: Training, device: str, **options: Any) -> Trainer:
    """Return a trainer whose visits are short epochs; the options are those of `make_feed`.

    It has the optimizer that people give it: torch's default in a naive step, else fused where
    torch can.
    """
    fused = None if config.step == "naive" else True

    def optimizer(model: nn.Module) -> list[Optimizer]:
        return [with_fused(each, fused) for each in make_optimizers(training, model)]

    feed = make_feed(config.loader, training, device, **options)
    return Trainer(config, replace(with_copy(training), optimizer=optimizer), device, feed)
