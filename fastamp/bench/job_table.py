"""Jobs that people have, end to end: a naive loop, a good one with torch alone, and fastamp's.

Takes a minute for each job on two CPU cores.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import fastamp
from fastamp._progress import progress
from fastamp.bench import apart, photos
from fastamp.bench.environment import DTYPES, no_speed_reason
from fastamp.bench.feeds import Data, find_data, list_ways, make_feed
from fastamp.bench.jobs import JOBS
from fastamp.bench.measure import find_failure
from fastamp.bench.options import refuse
from fastamp.bench.race import (
    UNTOLD,
    Build,
    Case,
    Interval,
    Plan,
    Race,
    collect,
    find_noise,
    run_build,
    show,
)
from fastamp.bench.record import Measurement, Report, Task, judge, measure
from fastamp.bench.targets import is_noise, say_noise
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
NAIVE = Config(name="naive", loader="naive", step="naive")
PLAN = Plan(warmup=2, build_s=2.5, limit_s=45.0)
VISIT_S = 0.15  # of a visit of the stock loop, about
LEAST_STEPS, MOST_STEPS = 4, 256  # of a visit
WORKER_STEPS = 8  # of a visit with workers, at least: each pass waits for its first batch
EPOCHS = 4  # times as many steps in the main race, where a visit has only WORKER_STEPS
# Four short epochs for each choice of workers and precision, after one; the fastest one counts.
TRIALS = Plan(rounds=5, warmup=1)
CLEARLY = 0.95  # workers or a lower precision have to take less than this share of the time

METRICS = """speedup/JOB/fastamp, over torch at its best, as in speedup/mlp/fastamp;
over_naive/JOB/ARM, of stock and fastamp over the naive loop"""


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


def _run(args: argparse.Namespace, names: list[str]) -> Report:
    races: dict[str, Race] = {}
    with progress(len(names)) as tick:
        for name in names:
            args.task = name
            races[name] = _race(name, args.device, args.seed)
            tick()
    measurements = [m for name in names for m in _judge(args.device, name, races[name])]
    metrics = {each.name: each for each in measurements}
    notes = [
        "ms a step: medians; times as fast: means over builds, with 95 % intervals",
        "over torch: fastamp's loop over the faster one of torch's own, naive or stock",
        *(f"{name}: {_text(name)} {_describe(race)}" for name, race in races.items()),
    ]
    failed = [
        f"{name}: {why}"
        for name, race in races.items()
        for why in next(filter(None, (build.found["failures"] for build in race.builds)), [])
    ]
    return Report(
        table=[_row(name, race, metrics) for name, race in races.items()],
        races=races,
        measurements=measurements,
        notes=notes,
        details={name: race.builds[0].found for name, race in races.items()},
        failures=failed,
        sentence="" if failed else say_in_words(metrics, names),
    )


def say_in_words(metrics: dict[str, Measurement], names: list[str]) -> str:
    """Return what fastamp brings to each job, in one sentence."""
    made: list[str] = []
    equal: list[str] = []
    unclear: list[str] = []
    for name in names:
        found = metrics[f"speedup/{name}/fastamp"]
        ratio = found.interval or Interval.exact(math.nan)
        said = UNTOLD if found.verdict == UNTOLD else ratio.verdict
        if said == UNTOLD:
            unclear.append(f"{name} ({ratio.text('.2f', 'x')})")
        elif said == "equal":
            equal.append(name)
        else:
            made.append(f"{name} {ratio.value:.2f}x")
    parts = [f"makes {_join(made)} as fast" if made else ""]
    parts += [f"changes {_join(equal)} by less than 2 %" if equal else ""]
    parts += [f"cannot be judged in {_join(unclear)}" if unclear else ""]
    return f"Compared with torch at its best, fastamp {_join([*filter(None, parts)])}."


def _join(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _race(name: str, device: str, seed: int) -> Race:
    """Race the loops of a job; the first build chooses what the good loop is."""
    chosen: list[dict[str, Any]] = []

    def build(_: list[str], number: int) -> dict[str, Build]:
        known = chosen[0] if chosen else None
        found = apart.run_apart(_build, name, known, PLAN, device, seed, number)
        chosen.append(found.found)
        return {name: found}

    return collect(build, [name], PLAN, is_apart=True)[name]


def _build(
    name: str, chosen: dict[str, Any] | None, plan: Plan, device: str, seed: int, number: int
) -> Build:
    """Build all loops, check that their first losses agree, and time them."""
    training = make_training(find_make(name), device, seed)
    data = find_data(training)
    make = partial(make_loop, training=training, device=device, seed=seed)
    chosen = chosen or _choose(make, data, device, training.dtype)
    loops: dict[str, Trainer] = {}
    for config in list_loops(chosen["base"], chosen["precision"]):
        workers = chosen["workers"].get(config.name, {})
        loop = make(config, steps=chosen["steps"], workers=workers)
        seed_all(seed, 0)  # of dropout
        loop.visit()
        loops[config.name] = loop
    losses = {arm: [float(x) for x in loop.losses[:AGREE_STEPS]] for arm, loop in loops.items()}
    finite = {arm: each for arm, each in losses.items() if all(map(math.isfinite, each))}
    if finite:  # others are failures
        precisions = {arm: loop.config.precision for arm, loop in loops.items()}
        check_losses(finite, precisions, is_same=data.is_repeatable())
    case = Case(arms={arm: loop.visit for arm, loop in loops.items()})
    build = run_build(case, plan, device=device, seed=seed * 1000 + number)
    curves = {arm: [float(loss) for loss in loop.losses] for arm, loop in loops.items()}
    build.found = chosen | {
        "dtype": str(DTYPES.get(chosen["precision"])),
        "losses": losses,
        "model_share": _time_model(loops["stock"]),
        "failures": [why for arm, each in curves.items() for why in find_failure(arm, each)],
    }
    return build


def _time_model(loop: Trainer) -> float:
    """Return the share of a visit in the forward and backward pass, which no arm replaces."""
    timer = fastamp.Timer(loop.device)
    start_s = perf_counter()
    loop.train(loop.feed.begin(), timer)
    regions = timer.summary()  # waits for the device
    elapsed_s = perf_counter() - start_s
    return (regions["forward"].total + regions["backward"].total) / elapsed_s


def _choose(
    make: Callable[..., Trainer], data: Data, device: str, dtype: torch.dtype | None
) -> dict[str, Any]:
    """Choose the steps of a visit, each loop's loader, and the precision, by short trials."""
    precision = next((name for name, known in DTYPES.items() if known is dtype), "fp32")

    def measure(steps: int, ways: list[tuple[Config, dict[str, Any]]]) -> list[float]:
        """Return each way's seconds a step: the best of trials in turn, so that drift is shared."""
        loops = [make(config, steps=steps, workers=workers) for config, workers in ways]
        case = Case(arms={str(i): loop.visit for i, loop in enumerate(loops)})
        rounds = run_build(case, TRIALS, device=device).rounds
        return [min(each[place].elapsed_s for each in rounds) / steps for place in case.arms]

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
    steps = longer if any(workers.values()) else steps
    steps = EPOCHS * steps if steps == WORKER_STEPS else steps
    stock, options = best["stock"]
    if dtype is None and no_speed_reason(device, "bf16") is None:
        pair = [(replace(stock, precision=each), options) for each in ("bf16", "fp32")]
        low, full = measure(steps, pair)
        precision = "bf16" if low < CLEARLY * full else "fp32"
    return {
        "steps": steps,
        "base": stock.loader,
        "workers": workers,
        "precision": precision,
    }


def _judge(device: str, name: str, race: Race) -> Iterator[Measurement]:
    """Yield each ratio, and hold a built-in job's to its target; no job may become slower."""
    best = "naive" if race.ratio("naive", "stock").value > 1 else "stock"
    key, ratio, row = f"speedup/{name}/fastamp", race.ratio("fastamp", best), JOBS.get(name)
    limit = _limit(race) if best == "stock" else math.inf
    found = measure(key, ratio, "fastamp", best)
    if is_noise(ratio, limit):
        yield replace(found, verdict=UNTOLD, reason=say_noise(ratio, limit))
    elif row is None:
        yield found
    else:
        least = row.on_cpu if device == "cpu" else row.on_cuda
        why = f"fastamp over the {best} loop"
        yield judge(key, ratio, (least, math.inf), "x", why, arm="fastamp", base=best)
    for arm in ("stock", "fastamp"):
        yield measure(f"over_naive/{name}/{arm}", race.ratio(arm, "naive"), arm, "naive")


def _limit(race: Race) -> float:
    """Return how many times as fast the stock loop were with its model alone (Amdahl).

    Workers beside the model slow it down, so with them nothing is known.
    """
    founds = [build.found for build in race.builds]
    if any(founds[0]["workers"].values()):
        return math.inf
    shares: list[float] = [found["model_share"] for found in founds]
    return 1 / median(shares)


def _row(name: str, race: Race, metrics: dict[str, Measurement]) -> dict[str, str]:
    steps, found = race.builds[0].found["steps"], metrics[f"speedup/{name}/fastamp"]
    times_ms = {arm: 1e3 * race.quartiles_s(arm)[1] / steps for arm in ARMS}
    row = {"job": name, **{f"{arm} ms": show(time, ".3f") for arm, time in times_ms.items()}}
    ratio = race.ratio("fastamp", found.base)
    row |= {"over torch": ratio.text(".2f", "x"), "which is": found.base}
    for arm in ("stock", "fastamp"):
        row[f"{arm} over naive"] = race.ratio(arm, "naive").text(".2f", "x")
    is_untold = find_noise({name: race}) or found.verdict == UNTOLD
    return row | {"verdict": UNTOLD if is_untold else ratio.verdict}


def _describe(race: Race) -> str:
    """Say what the trials chose."""
    found = race.builds[0].found
    kinds = {arm: options for arm, options in found["workers"].items() if options}
    texts = [
        f"{arm} with {options['num_workers']} {options.get('worker', 'process')} workers"
        for arm, options in kinds.items()
    ]
    if found["base"] == "indexed":
        texts.append("stock indexes the tensors by hand, faster than a DataLoader")
    low, steps = found["dtype"] != "None", f"{found['steps']} steps in a visit"
    texts += [f"stock and fastamp in {found['dtype'].removeprefix('torch.')}"] * low
    return f"({'; '.join([*texts, steps])})"


def list_loops(base: str, precision: str) -> list[Config]:
    """Return the good loop of torch alone, by its loader, the naive loop, and fastamp's."""
    stock = Config(name="stock", loader=base, precision=precision)
    return [stock, NAIVE, replace(stock, name="fastamp", loader="fastamp", step="fastamp")]


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
