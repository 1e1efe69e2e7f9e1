"""The arms of the main job: how each takes a step, and its time, memory and scores.

They differ in precision and in the step. The timed steps are the training, and all arms of a round
take their step on the same batch. The peak memory of an arm is measured in a process of its own
that trains nothing else.
"""

import copy
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import fastamp
from fastamp.bench.environment import DTYPES, find
from fastamp.bench.race import Plan, Race, run_race
from fastamp.train.gpt import GPT, Shape
from fastamp.train.options import progress
from fastamp.train.text import Batch, Bytes, Corpus, training_batches, validation_batches

MAX_NORM = 1.0
LEARNING_RATE = 1e-3  # at a width of 256; in inverse proportion to the width, as in muP
WARMUP_STEPS = 4  # at most: kernels, optimizer state and the allocator's pools are made
VALIDATION_WINDOWS = 64
MEMORY_STEPS = 2  # the first step makes the optimizer's state, the second runs beside it
MEMORY_KINDS = {
    "cpu": "resident set, less that before the model is built",
    "cuda": "GPU memory that torch allocates",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every arm of one benchmark has in common."""

    device: str
    precision: str
    shape: Shape
    batch_size: int
    steps: int
    seed: int
    memory_batch_size: int  # of the processes that show the peak memory

    @property
    def dtype(self) -> torch.dtype:
        """What autocast computes in."""
        return DTYPES[self.precision]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train: autocast's dtype (None: no autocast), the step (a key of STEPS), TF32."""

    name: str
    dtype: torch.dtype | None = None
    step: str = "stock"
    tf32: bool = False


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model predicts: the mean loss in nats, and the share of bytes predicted."""

    loss: float
    accuracy: float
    window_accuracies: list[float]


def make_arms(job: Job) -> list[Arm]:
    """Return FP32 (on CUDA strict and with TF32), stock AMP, and AMP with fastamp's step."""
    gpu = [Arm(name="fp32-strict"), Arm(name="fp32-tf32", tf32=True)]
    fp32 = gpu if job.device == "cuda" else [Arm(name="fp32")]
    ours = Arm(name="amp+fastamp", dtype=job.dtype, step="fastamp")
    return [*fp32, Arm(name="amp", dtype=job.dtype), ours]


def make_model(job: Job) -> GPT:
    """Return the model with the weights that every arm starts from, on the CPU."""
    torch.manual_seed(job.seed)
    return GPT(job.shape)


class Run:
    """One arm: its model, which it trains in place, its optimizer, scaler and losses."""

    def __init__(self, arm: Arm, job: Job, model: GPT) -> None:
        self.arm = arm
        self.device = job.device
        self.model = model.to(job.device)
        self.parameters = list(self.model.parameters())
        rate = LEARNING_RATE * 256 / job.shape.width
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, fused=True)
        make = fastamp.GradScaler if arm.step == "fastamp" else torch.amp.GradScaler
        self.scaler = make(job.device, enabled=arm.dtype is torch.float16)
        self.losses: list[torch.Tensor] = []
        self._seen = self._count()

    def autocast(self) -> torch.autocast:
        """Return the context of the forward pass, after the choice of TF32 for all that follows."""
        dtype = self.arm.dtype
        if self.device == "cuda":
            torch.set_float32_matmul_precision("high" if self.arm.tf32 else "highest")
        return torch.autocast(self.device, dtype=dtype, enabled=dtype is not None)

    def train_step(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """Take one optimizer step; without loss scaling the scaler passes everything through."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            logits = self.model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch.autograd.backward(self.scaler.scale(loss))
        STEPS[self.arm.step](self)  # the only line in which the steps differ
        self.scaler.update()
        self.losses.append(loss.detach())  # read when all is done: nothing waits for it

    def skipped(self) -> bool:
        """Say whether a step since the last call changed no parameter; waits for the device."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> float:
        """Return a number that grows with every skipped step."""
        if isinstance(self.scaler, fastamp.GradScaler):
            return self.scaler.skipped_steps
        return -self.scaler.get_scale()  # torch lowers the scale


def _naive_step(run: Run) -> None:
    run.scaler.unscale_(run.optimizer)
    if torch.isfinite(clip_grad_norm_(run.parameters, MAX_NORM)).item():  # the host waits
        run.scaler.step(run.optimizer)


def _stock_step(run: Run) -> None:
    run.scaler.unscale_(run.optimizer)
    clip_grad_norm_(run.parameters, MAX_NORM)
    run.scaler.step(run.optimizer)


def _fastamp_step(run: Run) -> None:
    run.scaler.step(run.optimizer, max_norm=MAX_NORM)


STEPS = {"naive": _naive_step, "stock": _stock_step, "fastamp": _fastamp_step}


def evaluate(run: Run, batches: Iterable[Batch]) -> Score:
    """Score the arm's own forward pass; loss and accuracy are computed in float32."""
    losses, shares = [], []
    with torch.no_grad():
        for tokens, targets in batches:
            with run.autocast():
                logits = run.model(tokens).float()
            losses.append(functional.cross_entropy(logits.mT, targets, reduction="none"))
            shares.append((logits.argmax(dim=2) == targets).double().mean(dim=1))
    windows = torch.cat(shares)
    loss, accuracy = torch.cat(losses).mean().item(), windows.mean().item()
    return Score(loss=loss, accuracy=accuracy, window_accuracies=windows.tolist())


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured, by arm: peaks in bytes, losses, and one score for each seed."""

    parameters: int
    peaks: dict[str, int | None]  # None where the platform counts none
    race: Race
    losses: dict[str, list[float]]
    scores: dict[str, list[Score]]


def train_arms(job: Job, corpus: Corpus, *, seeds: int) -> Results:
    """Measure every arm with the job's seed; with the seeds after it, train and score only."""
    arms, sizes = make_arms(job), (job.shape.block_size, job.batch_size)
    spread = validation_batches(corpus.validation, *sizes, VALIDATION_WINDOWS, job.device)
    windows = list(spread)
    trained: list[tuple[Race, dict[str, Run]]] = []
    with progress(len(arms) + seeds * job.steps) as tick:
        peaks = {}
        for arm in arms:
            peaks[arm.name] = peak_memory(job, arm, corpus.train)
            tick()
        for seed in range(job.seed, job.seed + seeds):
            model = make_model(replace(job, seed=seed))
            runs = {arm.name: Run(arm, job, copy.deepcopy(model)) for arm in arms}
            draws = training_batches(corpus.train, *sizes, seed, job.device)
            batches = list(islice(draws, job.steps))
            race = run_race(
                {name: partial(_step, run, batches) for name, run in runs.items()},
                # A training is as long for every seed and every machine: it never stops early.
                # Three blocks are left after the warm-up if there are enough steps.
                Plan(rounds=job.steps, warmup=min(WARMUP_STEPS, max(job.steps - 6, 1))),
                device=job.device,
                seed=seed,
                skipped=partial(_has_skipped, runs),
                tick=tick,
            )
            trained.append((race, runs))
    race, runs = trained[0]
    return Results(
        parameters=sum(parameter.numel() for parameter in runs[race.arms[0]].parameters),
        peaks=peaks,
        race=race,
        losses={name: torch.stack(run.losses).tolist() for name, run in runs.items()},
        scores={name: [evaluate(each[name], windows) for _, each in trained] for name in runs},
    )


def _has_skipped(runs: dict[str, Run], name: str) -> bool:
    return runs[name].skipped()


def _step(run: Run, batches: list[Batch]) -> None:
    run.train_step(*batches[len(run.losses)])


def peak_memory(job: Job, arm: Arm, data: Bytes) -> int | None:
    """Train two steps of one arm in a fresh process and return the peak over them, in bytes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak_of_this_process, job, arm, data).result()


def _peak_of_this_process(job: Job, arm: Arm, data: Bytes) -> int | None:
    tiny = Shape(layers=1, heads=1, width=16, block_size=16)
    _first_steps(replace(job, shape=tiny, memory_batch_size=1), arm, data)  # loads the kernels
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        _first_steps(job, arm, data)
        return torch.cuda.max_memory_allocated()
    before = _resident_nbytes("VmRSS")
    with suppress(OSError):  # where this is refused the peak counts from the start: never too low
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    _first_steps(job, arm, data)
    after = _resident_nbytes("VmHWM")
    return None if before is None or after is None else after - before


def _first_steps(job: Job, arm: Arm, data: Bytes) -> None:
    run = Run(arm, job, make_model(job))
    sizes = (job.shape.block_size, job.memory_batch_size)
    draws = training_batches(data, *sizes, job.seed, job.device)
    for batch in islice(draws, MEMORY_STEPS):
        run.train_step(*batch)


def _resident_nbytes(key: str) -> int | None:
    """Return what is resident now, VmRSS, or was at its peak, VmHWM."""
    found = find(rf"{key}:\s+(\d+) kB", "/proc/self/status")
    return None if found is None else int(found) * 1024
