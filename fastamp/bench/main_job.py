"""A task in each precision, with torch's loader and step and with fastamp's. Default: a GPT."""

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fastamp.bench import apart, measure, targets
from fastamp.bench.environment import no_speed_reason
from fastamp.bench.jobs import JOBS, MAIN
from fastamp.bench.measure import Results, find_failures, peak_memory, race_task
from fastamp.bench.options import DEFAULT, number, refuse
from fastamp.bench.race import Interval
from fastamp.bench.record import WIDTH, Measurement, Report, Task
from fastamp.bench.targets import TARGETS, Peaks
from fastamp.bench.tasks import CONTRACT, EXAMPLE, find_make, with_absolute_path
from fastamp.bench.trainer import PRECISIONS, Arm, choose_precisions, list_arms, read_arm

MAIN_STEPS = 32  # of the first build of the main job
MEMORY_BATCH = {"cpu": 40, "cuda": None}  # of the main job: activations dominate there

VERBATIM = f"\n{CONTRACT}\n{EXAMPLE}"
TARGETS_HELP = f"""what to hold fastamp's last arm to, against torch in FP32: speedup:1.5 (times as
fast), memory:0.4 (the share that is saved), accuracy:0.01 (how much lower it may be); may be given
several times (default: these three for {MAIN}, none for other tasks)"""


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    named = " ".join(f"{name}: {make.__doc__}" for name, make in JOBS.items())
    text = f"FILE.py, FILE.py:make, package.module:make, or a built-in task {DEFAULT}. {named}"
    add("task", nargs="?", default=MAIN, metavar="TASK", help=text)
    text = "race another task beside it, in the last precision, with torch's loader and step"
    add("--arm", type=read_arm, action="append", default=[], metavar="NAME=FILE.py:make", help=text)
    text = "of torch.autocast (default: those that the machine has units for)"
    add("--precision", nargs="+", choices=PRECISIONS, metavar="PRECISION", help=text)
    text = "of every arm in the first build (default: as it takes)"
    add("--steps", type=number(int, 3), help=text)
    add("--batch-size", type=number(int, 1), help="samples in a step (default: the task's)")
    text = "measure the peak of memory of each arm, in a process of its own"
    add("--memory", action="store_true", help=text)
    add("--target", type=_target, action="append", default=[], metavar="TARGET", help=TARGETS_HELP)


def _target(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in TARGETS:
        refuse(text, "is none of speedup:X, memory:X and accuracy:X")
    return name, number(float, -1, 1e6)(value)


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    is_main, names = args.task == MAIN, [name for name, _ in args.arm]
    task = with_absolute_path(args.task)  # an import may change the folder
    find_make(task)  # fails at once if there is no such function
    for _, place in args.arm:
        find_make(place, "--arm")
    if len({*names}) < len(names):
        refuse(names, "names two arms alike", "--arm")
    args.steps = args.steps or (MAIN_STEPS if is_main else None)
    args.targets = dict(args.target) or (dict(TARGETS) if is_main else {})
    args.memory = args.memory or "memory" in args.targets
    precisions = list(dict.fromkeys(["fp32", *(args.precision or choose_precisions(args.device))]))
    args.memory_batch = args.batch_size or (MEMORY_BATCH[args.device] if is_main else None)
    facts = {"task": args.task, "precisions": precisions, "arms": names, "steps": args.steps}
    options = {"device": args.device, "seed": args.seed, "batch_size": args.batch_size}
    return facts | options, partial(_run, args, list_arms(task, precisions, args.arm, **options))


def announce(task: str, arms: list[Arm]) -> None:
    """Print at once what runs, and how long it takes."""
    plan, precisions = measure.PLAN, dict.fromkeys(arm.precision for arm in arms)
    own = "".join(f", {arm.name}" for arm in arms if arm.is_own)
    builds = f"{plan.builds[0]} to {plan.builds[-1]} builds in fresh processes"
    time = f"{plan.builds[0] * plan.build_s:.0f} to {plan.limit_s:.0f} s of training"
    said = f"{task}: torch and fastamp in {' and '.join(precisions)}{own}; {builds}, {time}"
    print(said, flush=True)


def _run(args: argparse.Namespace, arms: list[Arm]) -> Report:
    announce(args.task, arms)
    found = race_task(arms, args.steps)
    peaks: Peaks = {
        arm.name: apart.run_apart(peak_memory, replace(arm, batch_size=args.memory_batch))
        for arm in found.arms * args.memory
    }
    gains, failures = targets.measure_gains(found), find_failures(found)
    excused = ""
    if {arm.precision for arm in found.arms} == {"fp32"} and "fp32" not in (args.precision or []):
        excused = no_speed_reason(args.device, "bf16") or "no lower precision was raced"
    at = f" at batches of {args.memory_batch}" * bool(args.memory_batch)
    judged = targets.judge_targets(found, peaks, args.targets, at=at, excused=excused)
    last = judged[0].arm
    more = [Measurement(name="step_time", interval=found.race.time_s(last), arm=last, unit=" s")]
    if (peak := peaks.get(last)) is not None:
        about: dict[str, Any] = {"arm": last, "unit": " bytes", "is_counted": True}
        more.append(Measurement(name="peak_memory", interval=Interval.exact(peak), **about))
    more += targets.measure_accuracies(found)
    return Report(
        table=targets.make_rows(found),
        races={"training": found.race},
        measurements=[*gains, *judged, *more],
        notes=_notes(args, found, peaks),
        losses=found.losses,
        details={
            "parameters": found.parameters,
            "peak_memory_nbytes": peaks,
            "validation": {arm: asdict(score) for arm, score in found.scores.items()},
            "shares": found.shares,
        },
        failures=failures,
        sentence="" if failures else targets.say_in_words(found, gains),
    )


def _notes(args: argparse.Namespace, found: Results, peaks: Peaks) -> list[str]:
    size = " to ".join(map(str, sorted({min(found.batch_sizes), max(found.batch_sizes)})))
    count = f"{found.parameters / 1e6:.1f} M" if found.parameters > 50_000 else found.parameters
    steps = f"{len(found.batch_sizes)} steps of {size} samples in the first build"
    notes = [f"{count} parameters, {steps}, {found.visit_steps} in a visit; seed {args.seed}"]
    if peaks and "memory" not in args.targets:
        each = ", ".join(f"{a} {n / 2**20:.0f}" for a, n in peaks.items() if n is not None)
        notes.append(f"MiB, the peak over two steps: {each}")
    notes += [f"{arm}: n/a; {why}"[:WIDTH] for arm, why in found.left_out.items()]
    if not args.targets:  # whose verdicts stand there
        arm = f"torch {targets.find_fastest(found)}"
        shares = found.shares[arm].items()
        parts = ", ".join(f"{part} {share:.0%}" for part, share in shares if share >= 0.005)
        notes.append(f"where a step's time goes, {arm}: {parts}")
    return notes


class All:
    """The built-in tasks but the main job, one to two minutes each: what fastamp adds to them."""

    TASKS = tuple(name for name in JOBS if name != MAIN)

    @classmethod
    def add_options(cls, add: Callable[..., object]) -> None:
        """Add the options of this command alone."""
        text = f"tasks, as those of train (default: {', '.join(cls.TASKS)})"
        add("names", nargs="*", default=cls.TASKS, metavar="TASK", help=text)

    @staticmethod
    def prepare(args: argparse.Namespace) -> Task:
        """Return the job and the function that runs it."""
        tasks = {name: with_absolute_path(name) for name in args.names}
        for task in tasks.values():
            find_make(task)
        return {"tasks": [*tasks], "seed": args.seed}, partial(_run_all, args, tasks)


def _run_all(args: argparse.Namespace, tasks: dict[str, str]) -> Report:
    found: dict[str, Results] = {}
    gains: list[Measurement] = []
    said = []
    for name, task in tasks.items():
        options = {"device": args.device, "seed": args.seed}
        arms = list_arms(task, choose_precisions(args.device), **options)
        announce(name, arms)
        found[name] = each = race_task(arms)
        gains += targets.measure_gains(each, f"{name}/")
        # In the precision that is fastest there.
        [gain] = [g for g in gains if g.name == f"{name}/fastamp/{targets.find_fastest(each)}"]
        said.append(f"{name} {each.race.ratio(gain.arm, gain.base).value:.2f}x ({gain.verdict})")
    failed = [f"{name}: {why}" for name, each in found.items() for why in find_failures(each)]
    sentence = f"Times as fast as torch in the same precision: {', '.join(said)}."
    return Report(
        table=[{"task": n, **row} for n, each in found.items() for row in targets.make_rows(each)],
        races={name: each.race for name, each in found.items()},
        measurements=gains,
        notes=[f"{name}: {JOBS[name].__doc__}" for name in tasks if name in JOBS],
        failures=failed,
        sentence="" if failed else sentence,
    )
