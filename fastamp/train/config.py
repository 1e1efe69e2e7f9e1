"""The options of a training run, checked when the config is made."""

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastamp.metrics import MetricsTracker
from fastamp.train.model_call import ModelCall
from fastamp.train.optimizer import OPTIMIZERS, SCHEDULES
from fastamp.train.precision import ALIASES, compute_effective_precision

AUTOCAST = {"32-true": None, "16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_NUMBERS = ("lr", "weight_decay", "max_norm")


def _integer(least: int) -> tuple[str, Callable[[Any], bool]]:
    expected = f"an integer from {least} to 2**63 - 1"  # torch's have 64 bits
    return expected, lambda value: type(value) is int and least <= value < 2**63


def _kind(kind: Any, expected: str = "") -> tuple[str, Callable[[Any], bool]]:
    return expected or kind.__name__, lambda value: isinstance(value, kind)


def _one_of(names: Collection[str]) -> tuple[str, Callable[[Any], bool]]:
    return f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names


def _number(expected: str, least: float = sys.float_info.min) -> tuple[str, Callable[[Any], bool]]:
    is_number = _kind((int, float), expected)[1]
    return expected, lambda value: is_number(value) and least <= value <= sys.float_info.max


# What is expected of a field, and what says whether a value is that.
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(["epochs", "max_steps", "batch_size", "accumulate", "patience"], _integer(1)),
    **dict.fromkeys(["eval_every", "log_every", "checkpoint_every", "keep"], _integer(1)),
    **dict.fromkeys(["seed", "num_workers", "warmup_steps"], _integer(0)),
    **dict.fromkeys(["evaluate", "on_evaluation", "loss_fn"], _kind(Callable)),
    **dict.fromkeys(["use_amp", "keep_best", "resume", "progress"], _kind(bool)),
    **dict.fromkeys(["lr", "max_norm"], _number("a number above 0")),
    "weight_decay": _number("a number of at least 0", 0),
    "optimizer": (
        f"a callable or one of {', '.join(OPTIMIZERS)}",
        lambda value: callable(value) or (isinstance(value, str) and value in OPTIMIZERS),
    ),
    "precision": (
        f"a name for one of {', '.join(AUTOCAST)} (a model of 16-bit parameters is in 32-true)",
        lambda value: ALIASES.get(str(value), str(value)) in AUTOCAST,
    ),
    "schedule": _one_of(SCHEDULES),
    "mode": _one_of(("min", "max")),
    "metric": _kind(str),
    "model_call": _kind(ModelCall),
    "tracker": _kind(MetricsTracker),
    "checkpoint_dir": _kind(str | os.PathLike, "a path"),
}
_OPTIONAL = {"max_norm"}  # beside the fields whose default is None


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of `fastamp.fine_tune`; every field has a default that works.

    Numbers may be NumPy's. A step is one step of the optimizer, of `accumulate` batches.

    Raises:
        ValueError: a field has a wrong value; the message names both.

    Example:
        >>> config = fastamp.TrainConfig(max_steps=100, lr=3e-4, precision="bf16-mixed")
        >>> config.effective_precision
        'bf16-mixed'
        >>> fastamp.TrainConfig(lr=-1)
        Traceback (most recent call last):
        ValueError: lr: expected a number above 0, got -1
    """

    epochs: int = 3
    """Passes over the data."""
    max_steps: int | None = None
    """Steps to train, in place of `epochs`. With more of either, a run that has ended or was
    interrupted continues: from there on the learning rate follows the longer schedule."""
    batch_size: int = 32
    """Samples in a batch, on every rank; a loader or an iterable has its own."""
    lr: float = 1e-3
    """The highest learning rate of the schedule."""
    weight_decay: float = 0.01
    """Of the optimizer."""
    optimizer: str | Callable[[list[nn.Parameter]], Optimizer] = "adamw"
    """"adamw" or "adam", fused where torch supports it, "sgd" or "adagrad"; or a callable that
    makes an optimizer of the list of the parameters that require a gradient, those of the loss
    last, and ignores `lr` and `weight_decay`. A run resumes only at its first rates."""
    schedule: str = "cosine"
    """Of the learning rate: "cosine" or "linear", which end at 0, or "constant". Skipped steps do
    not count."""
    warmup_steps: int = 0
    """Steps in which the learning rate grows from near 0."""
    use_amp: bool | None = None
    """See `fastamp.compute_effective_precision`."""
    precision: str | int = "32-true"
    """With `use_amp`, chooses "32-true", which leaves dtypes alone, "bf16-mixed" or "16-mixed",
    which scales the loss. A step whose gradients are not finite is skipped in "16-mixed", and in
    the others if there is a `max_norm`."""
    max_norm: float | None = 1.0
    """Largest norm of all gradients together; None does not clip."""
    accumulate: int = 1
    """Batches in a step, which are in memory together. The last step of an epoch has the rest."""
    device: str | torch.device | None = None
    """Where the model moves; None is a GPU if there is one. Under torchrun a GPU without a number
    is the rank's own."""
    seed: int = 0
    """Seeds all random numbers, together with the rank; the program's own generators are restored
    at the end."""
    num_workers: int = 0
    """Processes that load a Dataset which is not in memory."""
    eval_every: int | None = None
    """Steps between evaluations; None evaluates after every epoch. The end is always evaluated."""
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None = None
    """Called at each evaluation with the model in evaluation mode, without gradients; returns named
    numbers, as {"auc": 0.9}, which `tracker` gets as "val/auc". Over ranks every rank calls it, and
    the first one's numbers count."""
    metric: str = "loss"
    """The number that `keep_best` and `patience` compare: "loss", of `val_data`, or a name that
    `evaluate` returns."""
    mode: str = "min"
    """"min" if a lower `metric` is better, "max" if a higher one is."""
    patience: int | None = None
    """The run ends after this many evaluations in a row without a better `metric`; NaN is none."""
    on_evaluation: Callable[[int, dict[str, float]], object] | None = None
    """Called after each evaluation with the step and the numbers, "loss" among them if there is
    `val_data`; if it returns True, the run ends."""
    log_every: int = 10
    """Steps between flushes to `tracker`, which wait for the device."""
    checkpoint_dir: str | os.PathLike[str] | None = None
    """Folder of this run's checkpoints, with ~ for the home folder; None writes none."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None writes one after every epoch, the only way for data without a
    `state_dict`, as torch's DataLoader. One is always written at the end."""
    keep: int = 3
    """How many of the newest checkpoints to keep."""
    keep_best: bool = False
    """Writes a checkpoint at each new best `metric`, and keeps the best one with the newest. At the
    end the model has the best weights. Without `checkpoint_dir` a copy of them stays in the host's
    memory."""
    resume: bool = True
    """Resumes from the newest checkpoint; a run that has finished is a ValueError, unless
    `max_steps` or `epochs` is larger now. With False a folder that has checkpoints is a
    ValueError."""
    progress: bool = True
    """Logs a line when the run begins and when it ends, and shows a bar on a terminal, if tqdm is
    installed. Without it only a run that is resumed logs a line."""
    tracker: MetricsTracker | None = None
    """Receives every scalar: "train/loss", "train/lr", "val/loss", and those of a scaler that it
    watches. Steps count from 1."""
    loss_fn: Callable[[Tensor, Any], Tensor] | None = None
    """The loss of predictions and target, see `ModelCall.loss`. If it is a module with parameters,
    as ArcFace or learned weights of tasks, they are trained by the optimizer, and are in the
    checkpoints. Over ranks this is a ValueError: put it into the model."""
    model_call: ModelCall | None = None
    """How to call the model and compute its loss, in place of `loss_fn`."""

    def __post_init__(self) -> None:
        """Check every field; NumPy's numbers become Python's, which a checkpoint can hold."""
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            value = value.item() if isinstance(value, np.generic) else value
            expected, is_valid = _FIELDS.get(name, ("", lambda _: True))
            is_optional = field.default is None or name in _OPTIONAL
            if not (is_valid(value) or (value is None and is_optional)):
                _refuse(name, expected + " or None" * is_optional, value)
            object.__setattr__(self, name, float(value) if name in _NUMBERS and value else value)
        if self.loss_fn is not None and self.model_call is not None:
            _refuse("loss_fn", "None beside a model_call, which has its own", self.loss_fn)

    @property
    def compares(self) -> bool:
        """Whether evaluations are compared by `metric`."""
        return self.keep_best or self.patience is not None

    @property
    def chosen_device(self) -> torch.device:
        """The device to train on."""
        default = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(default if self.device is None else self.device)
        if str(device) == "cuda" and "LOCAL_RANK" in os.environ:
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        return device

    @property
    def effective_precision(self) -> str:
        """The precision that `precision` and `use_amp` choose on the device."""
        use_gpu = self.chosen_device.type == "cuda"
        return compute_effective_precision(self.precision, self.use_amp, use_gpu=use_gpu)

    def lr_factor(self, n_taken: int, total: int | None) -> float:
        """Return the factor of the learning rate after `n_taken` of `total` steps."""
        if n_taken < self.warmup_steps:
            return (n_taken + 1) / self.warmup_steps
        if total is None:  # and the schedule is constant
            return 1.0
        share = (n_taken - self.warmup_steps) / max(total - self.warmup_steps, 1)
        return SCHEDULES[self.schedule](min(share, 1.0))


def _refuse(name: str, expected: str, value: Any) -> None:
    msg = f"{name}: expected {expected}, got {value!r}"
    raise ValueError(msg)
