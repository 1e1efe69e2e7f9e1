"""A job in Accelerate, Fabric, Lightning and the Hugging Face Trainer, stock and with fastamp.

The stock arm has torch's loader and the framework's own step; both have the same optimizer and
begin with the same samples. A visit is an epoch, with all that the framework does around it.
"""

import argparse
import importlib.util
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from fastamp._progress import progress
from fastamp.bench.feeds import find_data
from fastamp.bench.in_frameworks import FRAMEWORKS
from fastamp.bench.job_loops import AGREE_STEPS, check_losses, make_loop
from fastamp.bench.jobs import JOBS
from fastamp.bench.race import Plan, run_race, show
from fastamp.bench.record import Report, Task, judge
from fastamp.bench.tasks import expect, find_make, make_training
from fastamp.bench.trainer import Config
from fastamp.train.options import refuse
from fastamp.train.random_state import seed_all

PLAN = Plan(rounds=4000, warmup=2, half_width=0.01, limit_s=20.0)
MOST_STEPS = 128  # of an epoch

METRICS = "speedup/FRAMEWORK, of fastamp over the framework alone, as in speedup/lightning"

PACKAGES = {"fabric": "lightning"}  # where they are not named as the framework


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    add("names", nargs="*", metavar="NAME", help=f"of {', '.join(FRAMEWORKS)} (default: all)")
    add("--task", default="mlp", help="the job: one of `jobs`, or FILE.py:make (default: mlp)")


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    names = list(dict.fromkeys(args.names or FRAMEWORKS))
    for name in names:
        if name not in FRAMEWORKS:
            refuse("NAME", name, f"is none of {', '.join(FRAMEWORKS)}")
    find_make(args.task)
    return {"frameworks": names, "task": args.task, "seed": args.seed}, partial(_run, args, names)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the frameworks' messages about the machine, and their advice."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _run(args: argparse.Namespace, names: list[str]) -> Report:
    training = make_training(find_make(args.task), args.device, args.seed)
    data = find_data(training)
    expect(data.dataset is not None, "dataset", "one with a length", "batches alone")
    steps = min(MOST_STEPS, len(data.dataset) // data.batch_size)
    config = Config(name="stock", precision="fp16" if args.device == "cuda" else "fp32")
    make = partial(make_loop, config, training, args.device, steps=steps, seed=args.seed)
    races, rows = {}, []
    with progress(len(names)) as tick, _quiet():
        for name in names:
            if importlib.util.find_spec(PACKAGES.get(name, name)) is None:
                continue
            arms, losses = {}, {}
            with ExitStack() as closing:
                for arm in ("stock", "fastamp"):
                    loop = make()
                    seed_all(args.seed, 0)  # of dropout
                    arms[arm] = FRAMEWORKS[name](loop, closing, ours=arm == "fastamp")
                    arms[arm]()
                    losses[f"{name}, {arm}"] = [float(loss) for loss in loop.losses[:AGREE_STEPS]]
                check_losses(
                    losses,
                    dict.fromkeys(losses, config.precision),
                    is_same=data.is_repeatable(),
                )
                races[name] = run_race(arms, PLAN, device=args.device, seed=args.seed)
            times = {arm: 1e3 * races[name].quartiles_s(arm)[1] / steps for arm in arms}
            rows.append(
                {"framework": name}
                | {f"{arm} ms": show(time_ms, ".3f") for arm, time_ms in times.items()}
                | {"times as fast [95 %]": races[name].ratio("fastamp").text(".2f", "x")}
            )
            tick()
    why = {n: f"not installed, pip install {PACKAGES.get(n, n)}" for n in names}
    why |= dict.fromkeys(races, "fastamp over the framework alone")
    figures = {name: race.ratio("fastamp") for name, race in races.items()}
    measurements = [
        judge(f"speedup/{name}", figures.get(name), (1.0, math.inf), "x", why[name])
        for name in names
    ]
    about = JOBS[args.task].text() if args.task in JOBS else "the user's"
    notes = [f"ms a step, with what the framework does around an epoch; {args.task}: {about}"]
    return Report(
        table=rows or [{"framework": "none"}],
        races=races,
        measurements=measurements,
        notes=notes,
    )
