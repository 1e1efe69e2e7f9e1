"""The main job: a small GPT trained on real text in FP32, in AMP, and in AMP with fastamp."""

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import numpy as np
import torch

from fastamp.bench import story
from fastamp.bench.arms import MEMORY_KINDS, MEMORY_STEPS, WARMUP_STEPS, Job, Results, train_arms
from fastamp.bench.environment import PRECISION, no_speed_reason
from fastamp.bench.race import Interval, bootstrap, show
from fastamp.bench.record import Report, Task, Verdict, judge
from fastamp.train.gpt import GPT2_SMALL, Shape
from fastamp.train.options import DEFAULT, number, refuse, say
from fastamp.train.text import Corpus, load_corpus

# 11.2 M parameters. Many thin layers: the activations, which AMP halves, outweigh the parameters
# and Adam's state, which it does not. Heads of 128, for which torch's bf16 attention is fastest.
CPU_SHAPE = Shape(layers=14, heads=2, width=256, block_size=128)
# Many short steps, for many blocks; the memory is that of a batch whose activations fill it.
CPU_STEPS = {"batch_size": 8, "steps": 48, "memory_batch_size": 40}
# Without units for it, a step in low precision has been seen to take 20 times one in FP32.
CPU_CUT = {"batch_size": 1, "steps": 9}
THOROUGH_SEEDS = 3


METRICS = """speedup, step_time, peak_memory, accuracy; with --arms speedup/ and the name of a
row and an arm, as in speedup/step/fastamp"""


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    arms = "race loops instead, to see what each repair brings: " + ", or ".join(story.CHOICES)
    add("--arms", choices=story.CHOICES, metavar="NAMES", help=arms)
    add("--data", metavar="PATH", help="file or folder of text (default: the standard library)")
    add("--precision", **PRECISION)
    for option, least, text in (
        ("--steps", 3, f"of every arm; the first, at most {WARMUP_STEPS + 1}, are warm-up"),
        ("--batch-size", 1, "windows of text in a step"),
        ("--block-size", 1, "bytes in a window"),
        ("--layers", 1, "blocks of the model"),
        ("--heads", 1, "attention heads, a divisor of the width"),
        ("--width", 1, "of the residual stream"),
    ):
        add(option, type=number(int, least), help=f"{text} (default: one that suits the device)")
    seeds = f"train with {THOROUGH_SEEDS} seeds, not one, to judge the accuracy"
    add("--thorough", action="store_true", help=seeds)
    saving = "share of FP32's peak memory, of all that a training process holds (on a GPU: that "
    saving += "torch allocates there)"
    for option, least, most, default, text in (
        ("--min-speedup", 0, 1e6, 1.5, "times as fast as FP32"),
        ("--min-memory-saving", -1, 1, 0.4, saving),
        ("--max-accuracy-gap", 0, 1, 0.01, "difference in next-byte accuracy"),
    ):
        bounded = number(float, least, most)
        add(option, type=bounded, default=default, help=f"target: {text} {DEFAULT}")


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and what does it; says on which text."""
    sizes = _sizes(args)
    steps = {name: sizes.pop(name) for name in ("batch_size", "steps", "memory_batch_size")}
    if sizes["width"] % sizes["heads"]:
        refuse("--heads", sizes["heads"], f"does not divide --width {sizes['width']}")
    shape = Shape(**sizes)
    job = Job(device=args.device, precision=args.precision, shape=shape, seed=args.seed, **steps)
    corpus = load_corpus(args.data, block_size=shape.block_size)
    train, held_out = len(corpus.train), len(corpus.validation)
    source = f"{corpus.source}: {train} bytes to train on, the last {held_out} to validate on"
    say(source)  # a pipe has the text before the work that follows
    shared = {**asdict(job), "data": corpus.sha256}
    if args.arms is not None:
        shared["arms"] = args.arms
        return shared, partial(story.run_story, job, corpus, args.arms.split(","))
    shared["seeds"] = THOROUGH_SEEDS if args.thorough else 1
    return shared, partial(_run, args, job, corpus, shared["seeds"])


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of the model and of a step: those asked for, or what suits the device."""
    if args.arms is not None:
        defaults = dict(story.SIZES[args.device])
    elif args.device == "cuda":
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        # About 0.6 GiB a window in FP32, beside 5 GiB for the four arms themselves.
        batch = next((size for size in (32, 16, 8, 4, 2) if size <= gib), 1)
        defaults = asdict(GPT2_SMALL) | {"batch_size": batch, "steps": 45}
    elif no_speed_reason(args.device, args.precision) is None:
        defaults = asdict(CPU_SHAPE) | CPU_STEPS
    else:
        defaults = asdict(CPU_SHAPE) | CPU_CUT
    defaults.setdefault("memory_batch_size", defaults["batch_size"])
    args.memory_batch_size = args.batch_size
    return {name: getattr(args, name) or default for name, default in defaults.items()}


def _run(args: argparse.Namespace, job: Job, corpus: Corpus, seeds: int) -> Report:
    found = train_arms(job, corpus, seeds=seeds)
    race, judged = found.race, found.race.arms[-1]
    metrics = {
        "speedup": race.ratio(judged),
        "step_time": race.time_s(judged),
        "accuracy": bootstrap(_windows(found, judged), mean=True),
    }
    peak = found.peaks[judged]
    if peak is not None:
        metrics["peak_memory"] = Interval.exact(peak)
    tokens = job.batch_size * job.shape.block_size
    tokens_per_s = {arm: tokens / race.time_s(arm).value for arm in race.arms}
    window = f"{job.shape.block_size} bytes"
    size = f"{found.parameters / 1e6:.1f} M parameters, {job.steps} steps of {job.batch_size}"
    memory = f"{MEMORY_STEPS} steps of {job.memory_batch_size} x {window} in a fresh process"
    notes = [
        f"{job.precision}, {size} x {window}, {race.warmup_rounds} not timed",
        f"memory: peak of the {MEMORY_KINDS[job.device]}, over {memory}",
        f"loss and accuracy: seed {job.seed}, on windows spread evenly over the held-out bytes",
    ]
    return Report(
        table=[_row(arm, found, rate) for arm, rate in tokens_per_s.items()],
        races={"training": race},
        metrics=metrics,
        verdicts=judge_targets(args, found, excused=_excused(args, job)),
        notes=notes,
        losses=found.losses,
        details={
            "parameters": found.parameters,
            "tokens_per_s": tokens_per_s,
            "peak_memory_nbytes": found.peaks,
            "validation": {arm: list(map(asdict, scores)) for arm, scores in found.scores.items()},
        },
    )


def _row(arm: str, found: Results, tokens_per_s: float) -> dict[str, str]:
    race, score, nbytes = found.race, found.scores[arm][0], found.peaks[arm]
    low, median, high = (show(time_s * 1e3, ".1f") for time_s in race.quartiles_s(arm))
    return {
        "arm": arm,
        "step ms": median,
        "[quartiles]": f"[{low}, {high}]",
        "speed-up [95 %]": race.ratio(arm).text(".2f", "x"),
        "skipped": str(race.skipped(arm)),
        "tokens/s": show(tokens_per_s, ".0f"),
        "peak MiB": show(math.nan if nbytes is None else nbytes / 2**20, ".0f"),
        "loss": show(score.loss, ".4f"),
        "accuracy": show(score.accuracy, ".4f"),
    }


def _excused(args: argparse.Namespace, job: Job) -> dict[str, str]:
    reason = no_speed_reason(job.device, job.precision)
    if reason is None:
        return {}
    excused = {"speed-up": reason}
    if job.device == "cpu" and args.batch_size is None:
        cut = f"the default batch is cut to {job.batch_size}, where parameters are most of the peak"
        enough = CPU_STEPS["memory_batch_size"]
        excused["memory saving"] = f"{reason}, so {cut}: try --batch-size {enough}"
    return excused


def judge_targets(
    args: argparse.Namespace, found: Results, *, excused: dict[str, str]
) -> list[Verdict]:
    """Hold the last arm, AMP with fastamp, to the targets, against the first, FP32."""
    base, judged = found.race.arms[0], found.race.arms[-1]
    blocks, most = f"{len(found.race.blocks())} blocks", args.max_accuracy_gap
    saving, peaks = _memory_saving(found, base, judged)
    gap, scores = _accuracy_gap(found, base, judged)
    rows = (
        ("speed-up", found.race.ratio(judged), (args.min_speedup, math.inf), "x", blocks),
        ("memory saving", saving, (args.min_memory_saving, math.inf), " %", peaks),
        ("accuracy gap", gap, (-most, most), "", scores),
    )
    arms = f"{judged} against {base}: "
    return [
        judge(name, figure, ends, unit, arms + excused.get(name, reason), excused=name in excused)
        for name, figure, ends, unit, reason in rows
    ]


def _memory_saving(found: Results, base: str, judged: str) -> tuple[Interval | None, str]:
    theirs, ours = found.peaks[base], found.peaks[judged]
    if not theirs or ours is None:
        return None, "this platform counts no peak"
    # Integers are divided once, so that a saving of 40 in 100 is the number 0.40 itself.
    saving = Interval.exact((theirs - ours) / theirs)
    return saving, f"a peak of {ours / 2**20:.0f} MiB against {theirs / 2**20:.0f} MiB"


def _accuracy_gap(found: Results, base: str, judged: str) -> tuple[Interval, str]:
    pairs = list(zip(found.scores[judged], found.scores[base], strict=True))
    for ours, theirs in pairs:
        if not math.isfinite(ours.loss - theirs.loss):
            return Interval.exact(math.inf), f"validation loss {ours.loss} against {theirs.loss}"
    shares = np.subtract(_windows(found, judged), _windows(found, base))
    gaps = ", ".join(f"{ours.accuracy:.4f} against {theirs.accuracy:.4f}" for ours, theirs in pairs)
    return bootstrap(shares.tolist(), mean=True), f"{len(pairs)} seed(s), {gaps}"


def _windows(found: Results, arm: str) -> list[float]:
    return [share for score in found.scores[arm] for share in score.window_accuracies]
