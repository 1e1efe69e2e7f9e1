"""The arms, and the one training step they share: they differ in precision and in the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import fastamp
from fastamp.bench.environment import DTYPES
from fastamp.train.gpt import GPT, Shape
from fastamp.train.text import Batch

MAX_NORM = 1.0
LEARNING_RATE = 1e-3  # at a width of 256; in inverse proportion to the width, as in muP


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
