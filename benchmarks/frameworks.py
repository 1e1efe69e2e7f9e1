"""A job in Accelerate, Fabric, Lightning and the Hugging Face Trainer.

`python benchmarks/frameworks.py lightning --task mlp`: ms a step of torch's good loop, of each
framework alone, and of each with fastamp's loader and step. They have one optimizer, precision,
order of samples and number of workers, and their first losses are compared. A visit is an epoch,
with all that the framework does around it.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from in_frameworks import FRAMEWORKS, Loop

from fastamp.bench.environment import DTYPES
from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import Case, Plan, run_race, show
from fastamp.bench.tasks import find_make, with_absolute_path
from fastamp.timer.timer import align
from fastamp.train.random_state import seed_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PLAN = Plan(warmup=2, build_s=3.0, limit_s=45.0)
AGREE_STEPS, RTOL = 4, 1e-3  # the first losses, before small differences grow
PACKAGES = {"fabric": "lightning"}  # where they are not named as the peer
COLUMNS = ["loop", "torch ms", "alone ms", "over torch [95 %]"]
COLUMNS += ["with fastamp ms", "over alone [95 %]"]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the frameworks' messages about the machine, and their advice."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def begin(
    arm: str, args: argparse.Namespace, closing: ExitStack
) -> tuple[Callable[[], object], list[float]]:
    """Train one epoch of an arm; return the function that trains the next ones, and its losses."""
    workers = {"num_workers": args.workers, "persistent_workers": True} if args.workers else {}
    loop = Loop(args.task, args.precision, args.device, args.seed, args.steps, workers)
    seed_all(args.seed, 0)  # of dropout
    name, _, ours = arm.partition(" with ")
    epoch: Callable[[], object] = loop.visit
    if name in FRAMEWORKS:
        epoch = FRAMEWORKS[name](loop, closing, ours=bool(ours), **workers)
    epoch()
    return epoch, [float(loss) for loss in loop.losses[:AGREE_STEPS]]


def race(name: str, args: argparse.Namespace) -> dict[str, str]:
    """Race torch's loop, a framework alone, and the same with fastamp; return a row."""
    named = ["torch", name, f"{name} with fastamp"]
    with ExitStack() as last:

        def make() -> Case:
            last.close()  # the build before
            arms, losses = {}, {}
            for arm in named:
                arms[arm], losses[arm] = begin(arm, args, last)
            for found in losses.values():
                torch.testing.assert_close(found, losses["torch"], rtol=RTOL, atol=RTOL)
            return Case(arms=arms)

        plan = replace(PLAN, rounds=args.rounds)
        found = run_race(make, plan, device=args.device, seed=args.seed)
    times = [show(1e3 * found.quartiles_s(arm)[1] / args.steps, ".3f") for arm in named]
    row = dict(zip(COLUMNS, [name, *times[:2], found.ratio(name).text(".2f", "x")], strict=False))
    return row | {COLUMNS[4]: times[2], COLUMNS[5]: found.ratio(named[2], name).text(".2f", "x")}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"of {', '.join(FRAMEWORKS)} (default: all)")
    add("--task", default="mlp", help=f"a task of the bench: a dataset {DEFAULT}")
    add("--device", choices=("cpu", "cuda"), default=here, help=DEFAULT)
    precision = "fp16" if here == "cuda" else "fp32"
    add("--precision", choices=("fp32", *DTYPES), default=precision, help=DEFAULT)
    add("--workers", type=number(int, 0), default=0, help=f"of each loader {DEFAULT}")
    add("--steps", type=number(int, 1), default=128, help=f"of an epoch, at most {DEFAULT}")
    add("--rounds", type=number(int, 8), default=PLAN.rounds, help="at most")
    add("--seed", type=number(int, 0), default=0)
    args = parser.parse_args(argv)
    if unknown := {*args.names} - {*FRAMEWORKS}:
        parser.error(f"{', '.join(unknown)}: none of {', '.join(FRAMEWORKS)}")
    try:
        find_make(args.task)
    except argparse.ArgumentError as error:
        parser.error(str(error))
    args.task = with_absolute_path(args.task)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each framework that is installed."""
    args = parse(argv)
    rows = []
    for name in args.names or FRAMEWORKS:
        if importlib.util.find_spec(PACKAGES.get(name, name)) is None:
            rows.append({"loop": name, "alone ms": "not installed"})
        else:
            with quiet():
                rows.append(race(name, args))
    print("\n".join(align([COLUMNS, *([row.get(c, "") for c in COLUMNS] for row in rows)])))


if __name__ == "__main__":
    main()
