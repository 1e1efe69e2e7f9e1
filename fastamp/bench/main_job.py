"""A task in each precision, with torch's loader and step and with fastamp's. Default: a GPT."""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from fastamp._progress import progress
from fastamp.bench import measure
from fastamp.bench.arms import (
    PRECISIONS,
    Arm,
    choose_precisions,
    list_arms,
    name_of,
    read,
)
from fastamp.bench.environment import no_speed_reason
from fastamp.bench.jobs import JOBS, MAIN, describe
from fastamp.bench.jobs.vision import why_none
from fastamp.bench.measure import Results, last_loss, race_task
from fastamp.bench.options import DEFAULT, number, refuse, say
from fastamp.bench.peaks import MEMORY_KINDS, peak_memory
from fastamp.bench.race import Interval
from fastamp.bench.record import Measurement, Report, Task
from fastamp.bench.targets import (
    TARGETS,
    Peaks,
    find_fastest,
    find_precisions,
    judge_targets,
    make_rows,
    measure_accuracy,
    measure_gains,
    measure_own,
    say_in_words,
)
from fastamp.bench.tasks import CONTRACT, EXAMPLE, find_make, with_absolute_path
from fastamp.bench.where import show_shares

MAIN_STEPS = 48  # of the first build of the main job
MEMORY_BATCH = {"cpu": 40, "cuda": None}  # of the main job: activations dominate there

METRICS = """speedup (fastamp in the lowest precision over torch in FP32), precision/bf16,
fastamp/bf16 (over torch in the same precision), step_time, peak_memory, accuracy; of an arm of
--arm: speedup/NAME, accuracy/NAME"""
VERBATIM = f"\n{CONTRACT}\n{EXAMPLE}"


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    named = " ".join(f"{name}: {describe(name)}" for name in JOBS)
    text = f"FILE.py, FILE.py:make, package.module:make, or a built-in task {DEFAULT}. {named}"
    add("task", nargs="?", default=MAIN, metavar="TASK", help=text)
    text = "race another task beside it, in the last precision, with torch's loader and step"
    add("--arm", type=read, action="append", default=[], metavar="NAME=FILE.py:make", help=text)
    text = "of torch.autocast (default: those that the machine has units for)"
    add("--precision", nargs="+", choices=PRECISIONS, metavar="PRECISION", help=text)
    add(
        "--steps",
        type=number(int, 3),
        help="of every arm in the first build (default: as it takes)",
    )
    add("--batch-size", type=number(int, 1), help="samples in a step (default: the task's)")
    text = "measure the peak of memory of each arm, in a process of its own"
    add("--memory", action="store_true", help=text)
    text = (
        "what to hold fastamp's last arm to, against torch in FP32: speedup:1.5 (times as fast), "
    )
    text += (
        "memory:0.4 (the share that is saved), accuracy:0.01 (how much lower it may be); may be "
    )
    text += f"given several times (default: these three for {MAIN}, none for other tasks)"
    add("--target", type=_target, action="append", default=[], metavar="TARGET", help=text)


def _target(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in TARGETS:
        message = f"{text!r} is none of speedup:X, memory:X and accuracy:X"
        raise argparse.ArgumentTypeError(message)
    return name, number(float, -1, 1e6)(value)


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    is_main = args.task == MAIN
    if args.task == "images" and (why := why_none()):
        refuse("task", args.task, why)
    task = with_absolute_path(args.task)  # it may change the folder
    find_make(task)  # fails at once if there is no such function
    names = [name for name, _ in args.arm]
    for name, place in args.arm:
        find_make(place)
        if names.count(name) > 1:
            refuse("--arm", name, "names two arms")
    args.steps = args.steps or (MAIN_STEPS if is_main else None)
    args.targets = dict(args.target) or (dict(TARGETS) if is_main else {})
    args.memory = args.memory or "memory" in args.targets
    precisions = list(dict.fromkeys(["fp32", *(args.precision or choose_precisions(args.device))]))
    args.memory_batch = args.batch_size or (MEMORY_BATCH[args.device] if is_main else None)
    facts = {"task": args.task, "device": args.device, "precisions": precisions, "arms": names}
    facts |= {"steps": args.steps, "batch_size": args.batch_size, "seed": args.seed}
    return facts, partial(_run, args, list_arms(task, precisions, args.arm))


def announce(task: str, arms: list[Arm]) -> None:
    """Print at once what runs, and how long it takes."""
    plan, precisions = measure.PLAN, dict.fromkeys(arm.precision for arm in arms)
    own = "".join(f", {arm.name}" for arm in arms if arm.is_own)
    builds = f"{plan.builds[0]} to {plan.builds[-1]} builds in fresh processes"
    time = f"{plan.builds[0] * plan.build_s:.0f} to {plan.limit_s:.0f} s of training"
    say(f"{task}: torch and fastamp in {' and '.join(precisions)}{own}; {builds}, {time}")


def _run(args: argparse.Namespace, arms: list[Arm]) -> Report:
    announce(args.task, arms)
    found = race_task(arms, args.device, args.seed, steps=args.steps, batch_size=args.batch_size)
    peaks: Peaks = {}
    if args.memory:
        with progress(len(found.arms)) as tick:
            for arm in found.arms:
                size = args.memory_batch
                peaks[arm.name] = peak_memory(arm, args.device, args.seed, size)
                tick()
    gains = measure_gains(found)
    excused = ""
    if find_precisions(found) == ["fp32"] and "fp32" not in (args.precision or []):
        excused = no_speed_reason(args.device, "bf16") or "no lower precision was raced"
    batch = args.memory_batch if args.memory_batch not in found.batch_sizes else None
    judged = judge_targets(found, peaks, args.targets, batch=batch, excused=excused)
    last = judged[0].arm
    step_time = Measurement(name="step_time", interval=found.race.time_s(last), arm=last, unit=" s")
    return Report(
        table=make_rows(found),
        races={"training": found.race},
        measurements=[
            *gains,
            *judged,
            step_time,
            *_measure_peaks(peaks, last),
            *measure_accuracy(found, last),
            *measure_own(found),
        ],
        notes=_notes(args, found, peaks),
        losses=found.losses,
        details=_details(found, peaks),
        failures=found.failures,
        sentence="" if found.failures else say_in_words(found, gains, peaks),
    )


def _measure_peaks(peaks: Peaks, judged: str) -> list[Measurement]:
    peak = peaks.get(judged)
    if peak is None:
        return []
    about: dict[str, Any] = {"arm": judged, "unit": " bytes", "is_counted": True}
    return [Measurement(name="peak_memory", interval=Interval.exact(peak), **about)]


def _details(found: Results, peaks: Peaks) -> dict[str, Any]:
    return {
        "parameters": found.parameters,
        "loss": {arm.name: last_loss(found, arm.name) for arm in found.arms},
        "peak_memory_nbytes": peaks,
        "validation": {arm: list(map(asdict, scores)) for arm, scores in found.scores.items()},
        "shares": found.shares,
        "left_out": found.left_out,
    }


def _notes(args: argparse.Namespace, found: Results, peaks: Peaks) -> list[str]:
    sizes = sorted({*found.batch_sizes})
    size = f"{sizes[0]} to {sizes[-1]}" if sizes[1:] else str(sizes[0])
    count = f"{found.parameters / 1e6:.1f} M" if found.parameters > 50_000 else found.parameters
    steps = f"{len(found.batch_sizes)} steps of {size} samples in the first build"
    notes = [f"{count} parameters, {steps}, {found.visit_steps} in a visit; seed {args.seed}"]
    if peaks and "memory" not in args.targets:
        each = ", ".join(f"{a} {n / 2**20:.0f}" for a, n in peaks.items() if n is not None)
        notes.append(f"MiB, {MEMORY_KINDS[args.device]}: {each}")
    notes += [f"{arm}: n/a; {why}" for arm, why in found.left_out.items()]
    if not args.targets:  # whose verdicts stand there
        arm = name_of(find_fastest(found))
        notes.append(show_shares(arm, found.shares[arm]))
    return notes
