"""The arms, and the one training step they share: they differ in precision and in the clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import fastamp
from fastamp.bench.model import GPT, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Arm", "Job", "Run", "Score", "evaluate", "make_arms", "make_model", "train_step"]

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


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train: autocast's dtype (None: no autocast), the clip, loss scaling or not."""

    name: str
    dtype: torch.dtype | None
    clip: Callable[[list[torch.nn.Parameter], float], torch.Tensor]
    scaled: bool


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model predicts: mean loss in nats, and the share of next bytes that are right."""

    loss: float
    accuracy: float
    correct: int
    total: int


def make_arms(precision: str) -> tuple[Arm, Arm, Arm]:
    """Return FP32, stock AMP, and AMP with fastamp's clip."""
    scaled = precision == "fp16"
    dtype = torch.float16 if scaled else torch.bfloat16
    return (
        Arm(name="fp32", dtype=None, clip=clip_grad_norm_, scaled=False),
        Arm(name="amp", dtype=dtype, clip=clip_grad_norm_, scaled=scaled),
        Arm(name="amp+fastamp", dtype=dtype, clip=fastamp.clip_grad_norm_, scaled=scaled),
    )


def make_model(job: Job) -> GPT:
    """Return the model with the weights that every arm starts from, on the CPU."""
    torch.manual_seed(job.seed)
    return GPT(job.shape)


class Run:
    """One arm's model, which it takes over, with its optimizer and its scaler."""

    def __init__(self, arm: Arm, job: Job, model: GPT) -> None:
        self.arm = arm
        self.device = job.device
        self.model = model.to(job.device)
        self.parameters = list(self.model.parameters())
        rate = LEARNING_RATE * 256 / job.shape.width
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, fused=True)
        self.scaler = torch.amp.GradScaler(job.device, enabled=arm.scaled)

    def autocast(self) -> torch.autocast:
        """Return the context of the forward pass; it changes nothing in an arm without a dtype."""
        dtype = self.arm.dtype
        return torch.autocast(self.device, dtype=dtype, enabled=dtype is not None)


def train_step(run: Run, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    """Take one optimizer step; without loss scaling the scaler passes everything through."""
    run.optimizer.zero_grad(set_to_none=True)
    with run.autocast():
        loss = functional.cross_entropy(run.model(tokens).flatten(0, 1), targets.flatten())
    torch.autograd.backward(run.scaler.scale(loss))
    run.scaler.unscale_(run.optimizer)
    run.arm.clip(run.parameters, MAX_NORM)  # the only line in which stock and fastamp differ
    run.scaler.step(run.optimizer)
    run.scaler.update()


def evaluate(run: Run, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Score:
    """Score the arm's own forward pass; loss and accuracy are computed in float32."""
    loss, correct, total = 0.0, 0, 0
    with torch.no_grad():
        for tokens, targets in batches:
            with run.autocast():
                logits = run.model(tokens.to(run.device))
            expected = targets.to(run.device).flatten()
            flat = logits.float().flatten(0, 1)
            loss += functional.cross_entropy(flat, expected, reduction="sum").item()
            correct += int((flat.argmax(dim=1) == expected).sum().item())
            total += expected.numel()
    return Score(loss=loss / total, accuracy=correct / total, correct=correct, total=total)
