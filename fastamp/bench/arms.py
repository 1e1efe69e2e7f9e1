"""The arms of the main job: their precision and step, and how each trains and is scored.

They differ in precision and in the step alone: all train the same task.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

import fastamp
from fastamp.bench.environment import DTYPES
from fastamp.bench.tasks import (
    Make,
    Part,
    Training,
    compute_loss,
    expect,
    make_optimizer,
    make_training,
)
from fastamp.step.native import parameters_of
from fastamp.train.loop import modes_kept


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every arm of one benchmark has in common."""

    device: str
    precision: str
    seed: int
    steps: int | None  # of every arm; None: as many as it takes
    make: Make  # can be pickled
    memory_make: Make  # the same, for the processes that measure peak memory
    batch_size: int | None = None  # in place of the task's own

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of autocast."""
        return DTYPES[self.precision]

    def make_training(self, seed: int, make: Make | None = None) -> Training:
        """Return the task, with the weights that every arm starts from."""
        training = make_training(make or self.make, self.device, seed)
        return replace(training, batch_size=self.batch_size or training.batch_size)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train: autocast's dtype (None: no autocast), the step (a key of STEPS), TF32."""

    name: str
    dtype: torch.dtype | None = None
    step: str = "stock"
    tf32: bool = False


@dataclass(frozen=True, kw_only=True)
class Score:
    """What the task's `evaluate` returns of a model; `loss` is None if it returns none."""

    loss: float | None
    accuracy: float
    window_accuracies: list[float]  # of each part of the held-out data


def make_arms(job: Job) -> list[Arm]:
    """Return FP32 (on CUDA strict and with TF32), stock AMP, and AMP with fastamp's step."""
    gpu = [Arm(name="fp32-strict"), Arm(name="fp32-tf32", tf32=True)]
    fp32 = gpu if job.device == "cuda" else [Arm(name="fp32")]
    ours = Arm(name="amp+fastamp", dtype=job.dtype, step="fastamp")
    return [*fp32, Arm(name="amp", dtype=job.dtype), ours]


_MOVE = Part("model", "its move to the device")
_BACKWARD = Part("loss", "its backward pass")
_STEP = Part("options['optimizer']", "its step")
_EVALUATE = Part("options['evaluate']", "its call on the model")


class Run:
    """One arm: the task's model, which it trains in place, its optimizer, scaler and losses."""

    def __init__(self, arm: Arm, device: str, training: Training) -> None:
        self.arm, self.device, self.training = arm, device, training
        with _MOVE:
            self.model = training.model.to(device)
        self.optimizer = make_optimizer(training, self.model)
        self.parameters = parameters_of([self.optimizer])
        make = fastamp.GradScaler if arm.step == "fastamp" else torch.amp.GradScaler
        self.scaler = make(device, enabled=arm.dtype is torch.float16)
        self.losses: list[torch.Tensor] = []
        self._seen = self._count()

    def autocast(self) -> torch.autocast:
        """Return the autocast of the forward pass; also switch TF32 for all that follows."""
        dtype = self.arm.dtype
        if self.device == "cuda":
            torch.set_float32_matmul_precision("high" if self.arm.tf32 else "highest")
        return torch.autocast(self.device, dtype=dtype, enabled=dtype is not None)

    def train_step(
        self,
        batch: Any,
        region: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext(),
    ) -> None:
        """Take one optimizer step; without loss scaling the scaler passes everything through."""
        with region("step"):
            self.optimizer.zero_grad(set_to_none=True)
        with region("forward"), self.autocast():
            loss = compute_loss(self.training, self.model, batch)
        with region("backward"), _BACKWARD:
            torch.autograd.backward(self.scaler.scale(loss))
        with region("step"), _STEP:
            STEPS[self.arm.step](self)  # the only line in which the steps differ
            self.scaler.update()
        self.losses.append(loss.detach())  # read at the end: no step waits for it

    def skipped(self) -> bool:
        """Say whether a step since the last call changed no parameter; waits for the device."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> float:
        """Return a number that grows with every skipped step."""
        if isinstance(self.scaler, fastamp.GradScaler):
            return self.scaler.skipped_steps
        return -self.scaler.get_scale()  # torch lowers the scale


def _stock_step(run: Run) -> None:
    if run.training.max_norm is not None:
        run.scaler.unscale_(run.optimizer)
        clip_grad_norm_(run.parameters, run.training.max_norm)
    run.scaler.step(run.optimizer)


def _fastamp_step(run: Run) -> None:
    run.scaler.step(run.optimizer, max_norm=run.training.max_norm)


STEPS = {"stock": _stock_step, "fastamp": _fastamp_step}


def evaluate(run: Run) -> Score | None:
    """Score an arm's model by the task's own function, in the arm's own precision."""
    score = run.training.evaluate
    if score is None:
        return None
    with torch.no_grad(), modes_kept(run.model), _EVALUATE:
        run.model.eval()
        with run.autocast():
            found: Any = score(run.model)
        found = found if isinstance(found, Mapping) else {"accuracy": found}
        parts = torch.as_tensor(found["accuracy"], dtype=torch.float64).flatten()
        loss = None if found.get("loss") is None else float(found["loss"])
    expect(parts.numel() > 0, "options['evaluate']", "a number, or a list of them", "an empty list")
    return Score(loss=loss, accuracy=parts.mean().item(), window_accuracies=parts.tolist())
