"""The main job: a task in FP32, in less memory, in AMP, and in AMP with fastamp. Default: a GPT."""

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from fastamp.bench import until
from fastamp.bench.advice import advise
from fastamp.bench.arms import BUILT_IN, read
from fastamp.bench.environment import DTYPES, no_speed_reason
from fastamp.bench.gpt import GPT2_SMALL, Shape
from fastamp.bench.jobs import JOBS
from fastamp.bench.jobs.language import make_gpt
from fastamp.bench.measure import Job, Results, train_arms
from fastamp.bench.options import DEFAULT, number, refuse, say
from fastamp.bench.peaks import MEMORY_KINDS, MEMORY_STEPS
from fastamp.bench.race import UNTOLD, Interval, find_noise, show
from fastamp.bench.record import Measurement, Report, Task, compare, measure
from fastamp.bench.targets import (
    find_stock,
    is_noise,
    judge_arms,
    judge_targets,
    last_losses,
    measure_arm,
    say_in_words,
    say_noise,
)
from fastamp.bench.tasks import (
    CONTRACT,
    EXAMPLE,
    Make,
    Training,
    call_make,
    find_make,
    with_absolute_path,
)
from fastamp.bench.text import load_corpus
from fastamp.bench.trainer import LEAN
from fastamp.bench.where import show_profiles

# 11.2 M parameters. Many thin layers: the activations, which AMP halves, outweigh the parameters
# and Adam's state, which it does not. Heads of 128, for which torch's bf16 attention is fastest.
CPU_SHAPE = Shape(layers=14, heads=2, width=256, block_size=128)
# Many short steps make many blocks. Memory is measured with a batch whose activations dominate.
CPU_STEPS = {"batch_size": 8, "steps": 48, "memory_batch_size": 40}


METRICS = """speedup, over_amp (of fastamp over torch alone), step_time, peak_memory, accuracy; of
another arm as in speedup/lean; with --until: time_to_loss/lean"""
VERBATIM = f"\n{CONTRACT}\n{EXAMPLE}"


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    jobs = f"a built-in job ({', '.join(JOBS)}), or your own as FILE.py:make or package.module:make"
    add("--task", default="gpt", metavar="TASK", help=f"what to train: {jobs}; see below {DEFAULT}")
    add("--data", metavar="PATH", help="file or folder of text (default: the standard library)")
    precision = (
        "of AMP (default: the task's own, or bf16; on a CPU without bf16 units gpt has FP32 alone)"
    )
    add("--precision", choices=DTYPES, help=precision)
    for option, least, text in (
        ("--steps", 3, "of every arm in the first build; of the base with --until"),
        ("--batch-size", 1, "samples in a step"),
    ):
        add(option, type=number(int, least), help=f"{text} (default: one that suits the device)")
    text = f"race another arm: NAME=FILE.py:function of the model, or one of {', '.join(BUILT_IN)}"
    add("--arm", type=read, action="append", default=[], metavar="ARM", help=text)
    text = "the arm that --arm and the task's own arms change (default: the first, FP32)"
    add("--against", metavar="ARM", help=text)
    text = "with 5 seeds, measure how long each arm takes until its held-out loss is "
    add("--until-loss", type=number(float, -1e9, 1e9), metavar="X", help=f"{text}X")
    equal = "that of --against's arm at 90 %% of its steps"
    add("--until", choices=("equal",), help=f"{text}{equal}")
    saving = "share of FP32's peak memory that is saved, of all that a training process holds "
    saving += "(on a GPU: that torch allocates there)"
    for option, least, most, default, text in (
        ("--min-speedup", 0, 1e6, 1.5, "times as fast as FP32"),
        ("--min-memory-saving", -1, 1, 0.4, saving),
        (
            "--max-accuracy-gap",
            0,
            1,
            0.01,
            "how much lower the accuracy may be (GPT: of the next byte)",
        ),
    ):
        bounded = number(float, least, most)
        add(option, type=bounded, default=default, help=f"target: {text} {DEFAULT}")


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    facts: dict[str, Any] = {"steps": args.steps}
    if args.task == "gpt":
        # Without units for a low precision, a step in it has taken 20 times as long as in FP32.
        has_units = args.device != "cpu" or no_speed_reason("cpu", "bf16") is None
        args.precision = args.precision or ("bf16" if has_units else "fp32")
        make, memory_make, facts = _make_gpt_job(args)
    elif args.data is not None:
        refuse("--data", args.data, "is for --task gpt alone")
    else:
        task = with_absolute_path(args.task)  # it may change the folder
        find_make(task)  # fails at once if there is no such function
        make = memory_make = partial(call_make, task)
    memory_batch = facts.get("memory_batch_size")
    job = _make_job(args, make, memory_make, facts["steps"], memory_batch)
    training = job.make_training(args.seed)
    if training.has_loader and args.batch_size is not None:
        refuse("--batch-size", args.batch_size, "cannot be set: the task has a loader of its own")
    if args.precision is None and training.dtype is not None:
        known = {dtype: name for name, dtype in DTYPES.items()}
        job = replace(job, precision=known[training.dtype])
    shared = {"task": args.task, "device": args.device, "precision": job.precision}
    shared["batch_size"] = None if training.has_loader else training.batch_size
    if memory_batch == shared["batch_size"]:
        job = replace(job, memory_batch=None)
    shared |= {"seed": args.seed, **facts}
    if training.arms or job.against:
        shared |= {"arms": sorted(training.arms), "against": job.against}
    if args.until is None and args.until_loss is None:
        return shared, partial(_run, args, job, training, shared)
    steps = args.steps or until.STEPS
    shared |= {"steps": steps, "seeds": until.SEEDS, "until": args.until or args.until_loss}
    each = range(job.seed, job.seed + until.SEEDS)
    return shared, partial(until.run, job, steps, each, args.until_loss)


def _make_gpt_job(args: argparse.Namespace) -> tuple[Make, Make, dict[str, Any]]:
    """Return the GPT to time, with a larger batch that to take memory of, and its facts.

    Prints on which text it is trained.
    """
    shape, sizes = _sizes(args)
    corpus = load_corpus(args.data, block_size=shape.block_size)
    train, held_out = len(corpus.train), len(corpus.validation)
    source = f"{corpus.source}: {train} bytes to train on, the last {held_out} to validate on"
    say(source)  # flushed: a pipe gets it before the work that follows
    make = partial(make_gpt, shape=shape, corpus=corpus, batch_size=sizes["batch_size"])
    memory = sizes.get("memory_batch_size", sizes["batch_size"])
    facts = {"steps": args.steps or sizes["steps"], "shape": asdict(shape), "data": corpus.sha256}
    facts["memory_batch_size"] = args.batch_size or memory
    return make, partial(make, batch_size=memory), facts


def _make_job(
    args: argparse.Namespace,
    make: Make,
    memory_make: Make,
    steps: int | None,
    memory_batch: int | None,
) -> Job:
    if args.until and args.until_loss is not None:
        refuse("--until-loss", args.until_loss, "cannot be used with --until")
    job = Job(
        make=make,
        memory_make=memory_make,
        device=args.device,
        precision=args.precision or "bf16",
        seed=args.seed,
        steps=steps,
        batch_size=args.batch_size,
        added=tuple(args.arm),
        memory_batch=memory_batch,
    )
    names = [config.name for config in job.list_arms()]
    if args.against not in {None, *names}:
        refuse("--against", args.against, f"is none of {', '.join(names)}")
    return replace(job, against=None if args.against == names[0] else args.against)


def _sizes(args: argparse.Namespace) -> tuple[Shape, dict[str, int]]:
    """Return the shape of the GPT and the sizes of a step that suit the device."""
    if args.device == "cuda":
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        # About 0.6 GiB a window in FP32, beside 6 GiB for the five arms themselves.
        batch = next((size for size in (32, 16, 8, 4, 2) if size <= gib), 1)
        return GPT2_SMALL, {"batch_size": batch, "steps": 45}
    sizes = dict(CPU_STEPS)
    if args.precision == "fp32":  # memory has no target then, and is that of the steps
        sizes.pop("memory_batch_size", None)
    return CPU_SHAPE, sizes


def _run(args: argparse.Namespace, job: Job, training: Training, shared: dict[str, Any]) -> Report:
    found = train_arms(job, training)
    race, judged = found.race, found.race.arms[-1]
    own = [arm for arm in race.arms if arm in training.arms]
    speedup, *judged_too = judge_targets(args, found, excused=_excused(job))
    time_s = race.time_s(judged)
    step_time = Measurement(name="step_time", interval=time_s, arm=judged, unit=" s")
    block_size = shared.get("shape", {}).get("block_size")
    unit, each = ("samples", 1) if block_size is None else ("tokens", block_size)
    size = statistics.fmean(found.batch_sizes) * each
    rates = {arm: size / race.quartiles_s(arm)[1] for arm in race.arms}
    stock = find_stock(found)
    profile = found.profiles[stock]
    raced = [part for part in profile.parts if part != "data"]  # batches are drawn off the clock
    over_amp = race.ratio(judged, stock)
    ratios = {"step": over_amp, "precision": race.ratio(race.arms[0], stock)}
    gains = {part: profile.gain(ratio, *raced) for part, ratio in ratios.items()}
    step_gain, limit = gains["step"], profile.limit("step")
    added = measure("over_amp", over_amp, judged, stock)
    if is_noise(step_gain, limit):
        gains["step"] = Interval.exact(1.0)
        added = replace(added, verdict=UNTOLD, reason=say_noise(step_gain, limit))
    advice = [] if find_noise({"": race}) else advise(profile, gains=gains)
    return Report(
        table=[_row(arm, found, unit, rate, job.against) for arm, rate in rates.items()],
        races={"training": race},
        measurements=[
            *(each for each in compare("speedup", race)[:-1] if each.arm not in own),
            *(speedup, added, step_time, *measure_arm(found, judged), *judged_too),
            *judge_arms(found, own, job.against or race.arms[0]),
        ],
        notes=_notes(job, found, shared),
        losses=found.losses,
        details={
            "parameters": found.parameters,
            f"{unit}_per_s": rates,
            "peak_memory_nbytes": found.peaks,
            "memory": {arm: _memory_mib(found, arm) for arm in found.nbytes},
            "validation": {arm: list(map(asdict, scores)) for arm, scores in found.scores.items()},
            "profiles": {arm: asdict(profile) for arm, profile in found.profiles.items()},
            "advice": [asdict(each) for each in advice],
        },
        closing=show_profiles(found.profiles)
        + [f"what would help: {each.text()}" for each in advice],
        failures=found.failures,
        sentence="" if found.failures else say_in_words(found, advice, step_gain, limit),
    )


def _notes(job: Job, found: Results, shared: dict[str, Any]) -> list[str]:
    each, scored = "samples", "by the task's own function"
    if "shape" in shared:
        each = f"x {shared['shape']['block_size']} bytes"
        scored = "on windows spread evenly over the held-out bytes"
    elif not any(found.scores.values()):
        scored = "the mean of the last quarter of the training steps; the task has no accuracy"
    sizes = sorted({*found.batch_sizes})
    size = f"{sizes[0]} to {sizes[-1]}" if sizes[1:] else str(sizes[0])
    taken = len(found.batch_sizes)
    steps = f"{taken} steps of {size} {each} in the first build, {found.visit_steps} in a visit"
    memory = f"{MEMORY_STEPS} steps of {found.memory_batch or size} {each}"
    count = f"{found.parameters / 1e6:.1f} M" if found.parameters > 50_000 else found.parameters
    lean = "bfloat16 weights, exact, with 8-bit moments and no autocast; it is not judged"
    notes = {LEAN: lean} | {arm: f"n/a; {why}" for arm, why in found.left_out.items()}
    if job.precision == "fp32":
        notes = {"bf16": f"n/a; {no_speed_reason(job.device, 'bf16')}; --precision bf16 races it"}
    if found.race.comparisons > 1:
        percent = f"{100 * found.race.confidence:.4g} %"
        notes["intervals"] = f"{found.race.comparisons} comparisons, each at {percent}: all "
        notes["intervals"] += "together hold at 95 %"
    waits = "without the wait for data, which is in where the time goes"
    waits = "with the wait for data: an arm changes the loader" if found.is_data_timed else waits
    parts = (
        f"{arm} {' + '.join(f'{nbytes / found.parameters:.1f}' for nbytes in each.values())}"
        for arm, each in found.nbytes.items()
    )
    return [
        f"{job.precision}, {count} parameters, {steps}",
        *(f"{name}: {text}" for name, text in notes.items()),
        f"bytes a parameter of weights, gradients and optimizer: {', '.join(parts)}",
        f"step, speed-up and rate are {waits}",
        f"memory: peak of the {MEMORY_KINDS[job.device]}, over {memory} in a fresh process",
        f"loss and accuracy: seed {job.seed}, {scored}",
    ]


def _memory_mib(found: Results, arm: str) -> dict[str, float]:
    """Return the parts of an arm's peak; "the rest" is mostly activations."""
    parts, peak = found.nbytes[arm], found.peaks[arm]
    rest = {} if peak is None else {"the rest": max(peak - sum(parts.values()), 0)}
    return {part: nbytes / 2**20 for part, nbytes in (parts | rest).items()}


def _row(arm: str, found: Results, unit: str, rate: float, against: str | None) -> dict[str, str]:
    race, nbytes = found.race, found.peaks[arm]
    times_s = [time_s * found.worth.get(arm, 1.0) for time_s in race.quartiles_s(arm)]
    spec = ".1f" if times_s[1] > 1e-2 else ".3f"
    low, median, high = (show(time_s * 1e3, spec) for time_s in times_s)
    accuracy = found.scores[arm][0].accuracy if found.scores[arm] else math.nan
    peak = "peak MiB" + (f" at {found.memory_batch}" if found.memory_batch else "")
    beside = {f"of {against}": race.ratio(arm, against).text(".2f", "x")} if against else {}
    return {
        "arm": arm,
        "step ms": median,
        "[quartiles]": f"[{low}, {high}]",
        f"speed-up [{100 * race.confidence:.4g} %]": race.ratio(arm).text(".2f", "x"),
        **beside,
        "skipped": str(race.skipped(arm)),
        f"{unit}/s": show(rate, ".0f"),
        peak: show(math.nan if nbytes is None else nbytes / 2**20, ".0f"),
        "loss": show(last_losses(found, arm)[0], ".4f"),
        "accuracy": show(accuracy, ".4f"),
    }


def _excused(job: Job) -> dict[str, str]:
    if job.precision == "fp32":
        reason = f"all arms train in FP32: {no_speed_reason(job.device, 'bf16')}"
        return {"speedup": reason, "memory saving": reason}
    lack = no_speed_reason(job.device, job.precision)
    return {} if lack is None else {"speedup": lack}
