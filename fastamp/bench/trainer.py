"""The one training loop of the bench: a task, with torch's loader and step or with fastamp's.

Every arm calls a task's function itself, so that no two share a model, a loss or a loader.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch.nn.utils import clip_grad_norm_

import fastamp
from fastamp.bench import tasks
from fastamp.bench.environment import DTYPES, no_speed_reason
from fastamp.bench.options import refuse
from fastamp.bench.tasks import BrokenTask, Part
from fastamp.step.native import parameters_of
from fastamp.train.batches import count_samples
from fastamp.train.loop import modes_kept
from fastamp.train.random_state import seed_all

Region: TypeAlias = Callable[[str], AbstractContextManager[object]]  # such as a fastamp.Timer

PRECISIONS = ("fp32", *DTYPES)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train: a task's name, a precision, and whose loader and step."""

    name: str
    task: str  # for `find_make`, so that a fresh process can call it
    device: str = "cpu"
    seed: int = 0
    batch_size: int | None = None  # None is the task's own
    precision: str = "fp32"
    is_ours: bool = False  # fastamp's loader and step
    is_own: bool = False  # of --arm
    base: str = ""  # the arm that it is compared with
    metric: str = ""  # the name of their ratio


def read_arm(text: str) -> tuple[str, str]:
    """Return the name and the task of NAME=FILE.py:make, for argparse."""
    name, _, place = text.partition("=")
    if not name or not place or name in PRECISIONS:
        refuse(text, "is not NAME=FILE.py:make, with a name of its own")
    return name, tasks.with_absolute_path(place)


def choose_precisions(device: str) -> list[str]:
    """Return FP32, and the lower precisions that this machine has units for."""
    low = DTYPES if device == "cuda" else ("bf16",)
    return ["fp32", *(name for name in low if no_speed_reason(device, name) is None)]


def list_arms(
    task: str, precisions: list[str], own: Sequence[tuple[str, str]] = (), **options: Any
) -> list[Arm]:
    """Return torch's arm and fastamp's of each precision, and one for each (name, task) of `own`.

    An arm of one's own trains in the last precision with torch's loader and step, as it is written.
    `options` are the device, the seed and the batch size of all.
    """
    arms, base = [], ""
    for each in precisions:
        about = options | {"task": task, "precision": each}
        ours, theirs = f"fastamp {each}", f"torch {each}"
        arms.append(Arm(name=theirs, base=base, metric=f"precision/{each}", **about))
        arms.append(Arm(name=ours, base=theirs, metric=f"fastamp/{each}", is_ours=True, **about))
        base = arms[0].name
    about = options | {"precision": precisions[-1], "is_own": True, "base": theirs}
    return arms + [Arm(name=n, task=made, metric=f"speedup/{n}", **about) for n, made in own]


@dataclass(frozen=True, kw_only=True)
class Score:
    """What the task's `evaluate` returns of a model."""

    loss: float | None = None
    accuracies: list[float] = field(default_factory=list)  # of each part of the held-out data

    @property
    def accuracy(self) -> float:
        """The mean over the parts, NaN without any."""
        return fmean(self.accuracies or [math.nan])


_MOVE = Part("model", "its move to the device")
_BACKWARD = Part("loss", "its backward pass")
_STEP = Part("options['optimizer']", "its step")
_EVALUATE = Part("options['evaluate']", "its call on the model")
_NOT_TIMED = nullcontext()

# What a task may set for the whole process: how it is read, and how it is set.
SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
]


def switch(values: list[Any]) -> list[Any]:
    """Set the switches of the process to these values; return those before."""
    before = [read() for read, _ in SWITCHES]
    for (_, write), old, new in zip(SWITCHES, before, values or before, strict=True):
        if old != new:
            write(new)
    return before


class Trainer:
    """An arm that trains: its own task, optimizers, scaler, and loader, from which a visit draws.

    What the task sets for the whole process is in force in this arm alone.
    """

    def __init__(self, arm: Arm) -> None:
        self.arm, self.device, self.steps = arm, arm.device, 1
        self.losses: list[Any] = []
        self.sizes: list[int] = []  # of all batches so far, in samples
        self.dtype = DTYPES.get(arm.precision)
        scaler = fastamp.GradScaler if arm.is_ours else torch.amp.GradScaler
        self.scaler = scaler(self.device, enabled=self.dtype is torch.float16)
        self._scale = self.scaler.get_scale()
        self._switches: list[Any] = []  # as they are now
        with self._ours():
            make = tasks.find_make(arm.task)
            self.training = tasks.make_training(make, self.device, arm.seed, arm.batch_size)
            self.model = self.training.model
            with _MOVE:
                self.model.to(self.device)
            self.optimizers = tasks.make_optimizers(self.training)
            about: dict[str, Any] = {"device": self.device, "is_ours": arm.is_ours}
            loader = tasks.make_loader(self.training, arm.seed, **about)
        self.parameters = parameters_of(self.optimizers)
        self.workers = int(getattr(loader, "num_workers", 0))
        self._batches = tasks.draw(loader, self.device)

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """Set the arm's switches, keep what it changes, and put all back after it.

        An error of an arm of one's own names it.
        """
        before = switch(self._switches)
        try:
            yield
        except BrokenTask as error:
            line = f"--arm {self.arm.name}: {error.line}" if self.arm.is_own else error.line
            raise BrokenTask(line, error.trace) from None
        finally:
            self._switches = switch(before)

    def prepare(self) -> None:
        """Seed the next visit: all arms draw the same numbers in it, such as dropout's."""
        seed_all(self.arm.seed, 0, 1 + len(self.losses))

    def visit(self, region: Region = lambda _: _NOT_TIMED) -> None:
        """Take the steps of a visit, each on the next batch; the wait for it is "data"."""
        with self._ours():
            for _ in range(self.steps):
                with region("data"):
                    batch = next(self._batches)
                self.sizes.append(count_samples(batch))
                self.train_step(batch, region)

    def train_step(self, batch: Any, region: Region = lambda _: _NOT_TIMED) -> None:
        """Take one optimizer step; without loss scaling the scaler passes everything through.

        `region` names its parts: "forward", "backward", "step".
        """
        if not self.arm.is_ours:  # fastamp's step frees the gradients
            with region("step"):
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
        with region("forward"), self._autocast():
            loss = tasks.compute_loss(self.training, self.model, batch)
        with region("backward"), _BACKWARD:
            torch.autograd.backward(self.scaler.scale(loss))
        with region("step"), _STEP:
            self._step()
        self.losses.append(loss.detach())  # read at the end: no step waits for it

    def _step(self) -> None:
        """Unscale, clip, step and update, as torch's documentation has it or by fastamp."""
        scaler: Any = self.scaler
        max_norm = self.training.max_norm
        if self.arm.is_ours:  # fastamp.GradScaler steps several optimizers at once
            scaler.step(self.optimizers, max_norm=max_norm, zero_grad=True)
        else:
            if max_norm is not None:
                for optimizer in self.optimizers:
                    scaler.unscale_(optimizer)
                clip_grad_norm_(self.parameters, max_norm)
            for optimizer in self.optimizers:
                scaler.step(optimizer)
        scaler.update()

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device, dtype=self.dtype) if self.dtype else nullcontext()

    def has_skipped(self) -> bool:
        """Say whether a step since the last call changed no parameter: the scale fell; waits."""
        before, self._scale = self._scale, self.scaler.get_scale()
        return self._scale < before

    def evaluate(self) -> Score:
        """Score the model by the task's own function, if there is one, in its own precision."""
        score = self.training.evaluate
        if score is None:
            return Score()
        with self._ours(), torch.no_grad(), modes_kept(self.model), _EVALUATE:
            self.model.eval()
            with self._autocast():
                found: Any = score(self.model)
            found = found if isinstance(found, Mapping) else {"accuracy": found}
            parts = torch.as_tensor(found.get("accuracy", []), dtype=torch.float64).flatten()
            loss = None if found.get("loss") is None else float(found["loss"])
        return Score(loss=loss, accuracies=parts.tolist())
