"""The main job: a small GPT trained on real text in FP32, in AMP, and in AMP with fastamp."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fastamp.bench import story
from fastamp.bench.compare import Interval, bootstrap
from fastamp.bench.data import load_corpus
from fastamp.bench.environment import no_speed_reason
from fastamp.bench.model import Shape
from fastamp.bench.options import DEFAULT, add_command, number, refuse
from fastamp.bench.race import WARMUP_STEPS, measure
from fastamp.bench.report import Cell, Figure, Report, Task, Verdict, heading, interval_cell, judge
from fastamp.bench.train import Job

if TYPE_CHECKING:
    import argparse

    from fastamp.bench.data import Corpus
    from fastamp.bench.options import Subparsers
    from fastamp.bench.race import Results

# 11.2 M parameters. Many thin layers: the activations, which AMP halves, outweigh the parameters
# and Adam's state, which it does not. Heads of 128, for which torch's bf16 attention is fastest.
CPU_SIZES = {"layers": 14, "heads": 2, "width": 256, "block_size": 128}
CPU_BATCH = 40
CPU_CUT = {"batch_size": 1, "steps": 9}
CUDA_SIZES = {"layers": 12, "heads": 12, "width": 768, "block_size": 1024}  # as GPT-2 small
THOROUGH_SEEDS = 3


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `amp` and its options."""
    add = add_command(
        subparsers,
        "amp",
        _prepare,
        help="FP32 against AMP, stock and with fastamp, on real text (the default)",
        description="Train a small GPT over bytes in FP32, in AMP, and in AMP with fastamp.",
        epilog="speedup, step_time, peak_memory, accuracy; with --arms speedup/ and the name of a "
        "row and an arm, as in speedup/step/fastamp",
    )
    arms = "race loops instead, to see what each repair brings: naive,stock,fastamp or two of them"
    add("--arms", type=story.parse_arms, metavar="NAMES", help=arms)
    add("--data", metavar="PATH", help="file or folder of text (default: the standard library)")
    add("--precision", choices=("bf16", "fp16"), default="bf16", help=f"of AMP {DEFAULT}")
    sizes = {
        "--steps": f"of every arm; the first, at most {WARMUP_STEPS + 1}, are warm-up",
        "--batch-size": "windows of text in a step",
        "--block-size": "bytes in a window",
        "--layers": "blocks of the model",
        "--heads": "attention heads, a divisor of the width",
        "--width": "of the residual stream",
    }
    for option, text in sizes.items():
        least = 3 if option == "--steps" else 1
        add(option, type=number(int, least), help=f"{text} (default: one that suits the device)")
    seeds = f"train with {THOROUGH_SEEDS} seeds, not one, to judge the accuracy"
    add("--thorough", action="store_true", help=seeds)
    saving = "share of FP32's peak memory, of all that a training process holds (on a GPU: that "
    saving += "torch allocates there)"
    gap = "difference in next-byte accuracy"
    for option, least, most, default, text in (
        ("--min-speedup", 0, 1e6, 1.5, "times as fast as FP32"),
        ("--min-memory-saving", -1, 1, 0.4, saving),
        ("--max-accuracy-gap", 0, 1, 0.01, gap),
    ):
        bounded = number(float, least, most)
        add(option, type=bounded, default=default, help=f"target: {text} {DEFAULT}")


def _prepare(args: argparse.Namespace) -> Task:
    job = _make_job(args)
    corpus = load_corpus(args.data, block_size=job.shape.block_size)
    train, held_out = len(corpus.train), len(corpus.validation)
    source = f"{corpus.source}: {train} bytes to train on, the last {held_out} to validate on"
    print(source, flush=True)  # a pipe has the text before the work that follows
    shared = {**asdict(job), "data": corpus.sha256}
    if args.arms is not None:
        shared["arms"] = args.arms
        return Task(job=shared, run=lambda: story.measure(job, corpus, args.arms))
    seeds = shared["seeds"] = THOROUGH_SEEDS if args.thorough else 1
    run = lambda: _report(args, job, corpus, measure(job, corpus, seeds=seeds))  # noqa: E731
    return Task(job=shared, run=run)


def _make_job(args: argparse.Namespace) -> Job:
    if args.arms is not None:
        defaults = story.SIZES[args.device]
    else:
        reason = no_speed_reason(args.device, args.precision)
        defaults = _default_sizes(args.device, fast=reason is None)
    sizes = {name: getattr(args, name) or default for name, default in defaults.items()}
    job = {name: sizes.pop(name) for name in ("batch_size", "steps")}
    shape = Shape(**sizes)
    if shape.width % shape.heads:
        refuse("--heads", shape.heads, f"does not divide --width {shape.width}")
    return Job(device=args.device, precision=args.precision, shape=shape, seed=args.seed, **job)


def _default_sizes(device: str, *, fast: bool) -> dict[str, int]:
    if device == "cuda":
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        # About 0.6 GiB a window in FP32, beside 5 GiB for the four arms themselves.
        batch_size = next((size for size in (32, 16, 8, 4, 2) if size <= gib), 1)
        return CUDA_SIZES | {"batch_size": batch_size, "steps": 45}
    # Without units for it, a step in low precision has been seen to take 20 times one in FP32.
    return CPU_SIZES | ({"batch_size": CPU_BATCH, "steps": 10} if fast else CPU_CUT)


def _excused(args: argparse.Namespace, job: Job) -> dict[str, str]:
    """Return why a target cannot be judged on this machine, by its name."""
    reason = no_speed_reason(job.device, job.precision)
    if reason is None:
        return {}
    excused = {"speed-up": reason}
    if job.device == "cpu" and args.batch_size is None:
        cut = f"the default batch is cut to {job.batch_size}, where parameters are most of the peak"
        excused["memory saving"] = f"{reason}, so {cut}: try --batch-size {CPU_BATCH}"
    return excused


def _report(args: argparse.Namespace, job: Job, corpus: Corpus, found: Results) -> Report:
    judged = found.arms[-1]
    peak, race = found.peaks[judged], found.race
    metrics = {
        "speedup": race.ratio(judged),
        "step_time": race.time_s(judged),
        "accuracy": bootstrap(_windows(found, judged), mean=True),
    }
    if peak.nbytes is not None:
        metrics["peak_memory"] = _exact(peak.nbytes)
    tokens = job.batch_size * job.shape.block_size
    arms = {
        name: {
            "tokens_per_s": tokens / race.time_s(name).value,
            "peak_memory_bytes": found.peaks[name].nbytes,
            "validation": [asdict(score) for score in found.scores[name]],
        }
        for name in found.arms
    }
    size = f"{found.parameters / 1e6:.1f} M parameters, {job.steps} steps of {job.batch_size}"
    notes = [
        f"{job.precision}, {size} x {job.shape.block_size} bytes, {race.warmup_rounds} not timed",
        f"memory: peak of the {peak.kind}, {peak.method}",
        f"loss and accuracy: seed {job.seed}, on windows spread evenly over the held-out bytes",
    ]
    return Report(
        table=_table(found.arms),
        races={"training": race},
        metrics=metrics,
        verdicts=judge_targets(args, found, excused=_excused(args, job)),
        notes=notes,
        losses=found.losses,
        details={"data": corpus.source, "parameters": found.parameters, "arms": arms},
    )


def _table(arms: list[str]) -> list[list[Cell]]:
    rows = [
        heading("arm,step ms,[quartiles],speed-up [95 %],skipped,tokens/s,peak MiB,loss,accuracy")
    ]
    for name in arms:
        timed, known = f"/races/training/arms/{name}", f"/details/arms/{name}"
        low, median, high = (
            Figure(f"{timed}/time_s/{end}", ".1f", 1e3) for end in ("low", "median", "high")
        )
        speedup = interval_cell(f"{timed}/speedup", ".2f", "x")
        figures = (
            Figure(f"{timed}/skipped", ".0f"),
            Figure(f"{known}/tokens_per_s", ".0f"),
            Figure(f"{known}/peak_memory_bytes", ".0f", 2**-20),
            Figure(f"{known}/validation/0/loss", ".4f"),
            Figure(f"{known}/validation/0/accuracy", ".4f"),
        )
        quartiles: Cell = ("[", low, ", ", high, "]")
        rows.append([(name,), (median,), quartiles, speedup, *((f,) for f in figures)])
    return rows


def judge_targets(
    args: argparse.Namespace, found: Results, *, excused: dict[str, str]
) -> list[Verdict]:
    """Hold the last arm, AMP with fastamp, to the targets, against the first, FP32."""
    base, judged = found.arms[0], found.arms[-1]
    blocks, most = len(found.race.blocks()), args.max_accuracy_gap
    saving, peaks = _memory_saving(found, base, judged)
    gap, scores = _accuracy_gap(found, base, judged)
    arms = f"{judged} against {base}: "
    verdicts = [
        judge(
            "speed-up", found.race.ratio(judged), (args.min_speedup, None), "x", f"{blocks} blocks"
        ),
        judge("memory saving", saving, (args.min_memory_saving, None), " %", peaks),
        judge("accuracy gap", gap, (-most, most), "", scores),
    ]
    return [
        replace(v, verdict="n/a", reason=arms + excused[v.name])
        if v.name in excused
        else replace(v, reason=arms + v.reason)
        for v in verdicts
    ]


def _memory_saving(found: Results, base: str, judged: str) -> tuple[Interval | None, str]:
    theirs, ours = found.peaks[base].nbytes, found.peaks[judged].nbytes
    if not theirs or ours is None:
        return None, "no peak was measured"
    kind = found.peaks[base].kind
    # Integers are divided once, so that a saving of 40 in 100 is the number 0.40 itself.
    saving = _exact((theirs - ours) / theirs)
    return saving, f"{kind}: peak of {ours / 2**20:.0f} MiB against {theirs / 2**20:.0f} MiB"


def _accuracy_gap(found: Results, base: str, judged: str) -> tuple[Interval, str]:
    pairs = list(zip(found.scores[judged], found.scores[base], strict=True))
    for ours, theirs in pairs:
        if not math.isfinite(ours.loss - theirs.loss):
            return _exact(math.inf), f"validation loss {ours.loss} against {theirs.loss}"
    shares = np.subtract(_windows(found, judged), _windows(found, base))
    gaps = ", ".join(f"{ours.accuracy:.4f} against {theirs.accuracy:.4f}" for ours, theirs in pairs)
    return bootstrap(shares.tolist(), mean=True), f"{len(pairs)} seed(s), {gaps}"


def _windows(found: Results, arm: str) -> list[float]:
    return [share for score in found.scores[arm] for share in score.window_accuracies]


def _exact(value: float) -> Interval:
    return Interval(value=value, low=value, high=value)
