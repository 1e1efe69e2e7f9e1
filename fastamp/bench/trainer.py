"""The one training loop of the bench: a task, with torch's loader and step or with fastamp's."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch.nn.utils import clip_grad_norm_

import fastamp
from fastamp.bench.arms import Arm, read_switches, switched
from fastamp.bench.environment import DTYPES
from fastamp.bench.tasks import (
    BrokenTask,
    Part,
    Training,
    compute_loss,
    count_samples,
    draw,
    expect,
    find_make,
    make_loader,
    make_optimizers,
    make_training,
)
from fastamp.step.native import parameters_of
from fastamp.train.loop import modes_kept
from fastamp.train.random_state import seed_all

Region: TypeAlias = Callable[[str], AbstractContextManager[object]]  # such as a fastamp.Timer


@dataclass(frozen=True, kw_only=True)
class Score:
    """What the task's `evaluate` returns of a model; NaN or None is what it does not return."""

    loss: float | None
    accuracy: float
    window_accuracies: list[float]  # of each part of the held-out data


_MOVE = Part("model", "its move to the device")
_BACKWARD = Part("loss", "its backward pass")
_STEP = Part("options['optimizer']", "its step")
_EVALUATE = Part("options['evaluate']", "its call on the model")
_NOT_TIMED = nullcontext()


class Trainer:
    """A task and its arm: the model, which it trains in place, optimizers, scaler and losses."""

    def __init__(self, arm: Arm, training: Training, device: str) -> None:
        self.arm, self.training, self.device = arm, training, device
        self.model = training.model
        with _MOVE:
            self.model.to(device)
        self.optimizers = make_optimizers(training, self.model)
        self.parameters = parameters_of(self.optimizers)
        self.dtype = DTYPES.get(arm.precision)
        make = fastamp.GradScaler if arm.is_ours else torch.amp.GradScaler
        self.scaler = make(device, enabled=self.dtype is torch.float16)
        self.losses: list[Any] = []
        self._seen = self._count_skipped()

    def train(self, batches: Iterable[Any], region: Region = lambda _: _NOT_TIMED) -> None:
        """Take a step on each batch; `region` names its parts: "forward", "backward", "step"."""
        for batch in batches:
            self.train_step(batch, region)

    def train_step(self, batch: Any, region: Region) -> None:
        """Take one optimizer step; without loss scaling the scaler passes everything through."""
        if not self.arm.is_ours:  # fastamp's step frees the gradients
            with region("step"):
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
        with region("forward"), self.autocast():
            loss = compute_loss(self.training, self.model, batch)
        with region("backward"), _BACKWARD:
            torch.autograd.backward(self.scaler.scale(loss))
        with region("step"), _STEP:
            (_fastamp_step if self.arm.is_ours else _torch_step)(self)
            self.scaler.update()
        self.losses.append(loss.detach())  # read at the end: no step waits for it

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass."""
        return torch.autocast(self.device, dtype=self.dtype) if self.dtype else nullcontext()

    def has_skipped(self) -> bool:
        """Say whether a step since the last call changed no parameter; waits for the device."""
        before, self._seen = self._seen, self._count_skipped()
        return self._seen > before

    def _count_skipped(self) -> float:
        """Return a number that grows with every skipped step."""
        if isinstance(self.scaler, fastamp.GradScaler):
            return self.scaler.skipped_steps
        return -self.scaler.get_scale()  # torch lowers the scale

    def evaluate(self) -> list[Score]:
        """Score the model by the task's own function, if there is one, in its own precision."""
        score = self.training.evaluate
        if score is None:
            return []
        with torch.no_grad(), modes_kept(self.model), _EVALUATE:
            self.model.eval()
            with self.autocast():
                found: Any = score(self.model)
            found = found if isinstance(found, Mapping) else {"accuracy": found}
            parts = torch.as_tensor(found.get("accuracy", math.nan), dtype=torch.float64).flatten()
            loss = None if found.get("loss") is None else float(found["loss"])
        wanted = "a number, or a list of them"
        expect(parts.numel() > 0, "options['evaluate']", wanted, "an empty list")
        return [Score(loss=loss, accuracy=parts.mean().item(), window_accuracies=parts.tolist())]


def _torch_step(trainer: Trainer) -> None:
    if trainer.training.max_norm is not None:
        for optimizer in trainer.optimizers:
            trainer.scaler.unscale_(optimizer)
        clip_grad_norm_(trainer.parameters, trainer.training.max_norm)
    for optimizer in trainer.optimizers:
        trainer.scaler.step(optimizer)


def _fastamp_step(trainer: Trainer) -> None:
    scaler: Any = trainer.scaler  # fastamp.GradScaler, which steps several at once
    scaler.step(trainer.optimizers, max_norm=trainer.training.max_norm, zero_grad=True)


class Runner:
    """An arm that runs: its own task, and its own loader, from which a visit draws its batches.

    What the task sets for the whole process is in force in this arm alone.
    """

    def __init__(self, arm: Arm, device: str, seed: int, batch_size: int | None = None) -> None:
        self.arm, self.seed, self.steps = arm, seed, 1
        self.sizes: list[int] = []  # of all batches so far, in samples
        self._switches = read_switches()
        with self._ours():
            training = make_training(find_make(arm.task), device, seed, batch_size)
            self.trainer = Trainer(arm, training, device)
            loader = make_loader(training, seed, device=device, is_ours=arm.is_ours)
        self.workers = int(getattr(loader, "num_workers", 0))
        self._batches = draw(loader, device)

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """Set the arm's switches; an error of an arm of one's own names it."""
        try:
            with switched(self._switches):
                yield
        except BrokenTask as error:
            line = f"--arm {self.arm.name}: {error.line}" if self.arm.is_own else error.line
            raise BrokenTask(line, error.trace) from None

    def prepare(self) -> None:
        """Seed the next visit: all arms draw the same numbers in it, such as dropout's."""
        seed_all(self.seed, 0, 1 + len(self.trainer.losses))

    def visit(self, region: Region = lambda _: _NOT_TIMED) -> None:
        """Take the steps of a visit, each on the next batch; the wait for it is "data"."""
        with self._ours():
            self.trainer.train(islice(self._draw(region), self.steps), region)

    def _draw(self, region: Region) -> Iterator[Any]:
        while True:
            with region("data"):
                batch = next(self._batches)
            self.sizes.append(count_samples(batch))
            yield batch

    def score(self) -> list[Score]:
        """Score the model as it is."""
        with self._ours():
            return self.trainer.evaluate()
