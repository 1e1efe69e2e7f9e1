"""The options of a training run, checked when the config is made."""

import math
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args, get_origin

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastamp.metrics import MetricsTracker
from fastamp.train.model_call import ModelCall
from fastamp.train.optimizer import OPTIMIZERS, SCHEDULES
from fastamp.train.precision import ALIASES, compute_effective_precision

AUTOCAST = {"32-true": None, "16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_MAY_BE_0 = {"seed", "num_workers", "warmup_steps", "weight_decay"}
_NAMES: dict[str, Collection[str]] = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}
_NAMES |= {"mode": ("min", "max"), "precision": AUTOCAST}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of `fastamp.fine_tune`; every field has a default that works.

    A step has `accumulate` batches. Numbers may be NumPy's. A ValueError names a wrong value.

    Example:
        >>> config = fastamp.TrainConfig(max_steps=100, lr=3e-4, precision="bf16-mixed")
        >>> config.effective_precision
        'bf16-mixed'
    """

    epochs: int = 3
    """Passes over the data."""
    max_steps: int | None = None
    """Steps to train, in place of `epochs`. A run that has ended or was interrupted continues with
    more of either, at the learning rate of the longer schedule."""
    batch_size: int = 32
    """Samples in a batch, on every rank; a loader or an iterable has its own."""
    lr: float = 1e-3
    """The highest learning rate of the schedule."""
    weight_decay: float = 0.01
    """Of the optimizer."""
    optimizer: str | Callable[[list[nn.Parameter]], Optimizer] = "adamw"
    """"adamw" or "adam", fused where torch supports it, "sgd" or "adagrad"; or a callable that
    makes one of the parameters that require a gradient, those of the loss last, and ignores `lr`
    and `weight_decay`. A run resumes only at its first rates."""
    schedule: str = "cosine"
    """Of the learning rate: "cosine" or "linear", which end at 0, or "constant"."""
    warmup_steps: int = 0
    """Steps in which the learning rate grows from near 0."""
    use_amp: bool | None = None
    """See `fastamp.compute_effective_precision`."""
    precision: str | int = "32-true"
    """With `use_amp`: "32-true", which leaves dtypes alone, "bf16-mixed", or "16-mixed", which
    scales the loss. It, or `max_norm`, skips a step whose gradients are not finite."""
    max_norm: float | None = 1.0
    """Largest norm of all gradients together; None does not clip."""
    accumulate: int = 1
    """Batches in a step, which are in memory together. The last step of an epoch has the rest."""
    device: str | torch.device | None = None
    """Where the model moves; None is a GPU if there is one, under torchrun the rank's own."""
    seed: int = 0
    """Of all random numbers, with the rank; the program's generators are restored at the end."""
    num_workers: int = 0
    """Processes that load a Dataset which is not in memory."""
    eval_every: int | None = None
    """Steps between evaluations; None evaluates after every epoch. The end is always evaluated."""
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None = None
    """Called at each evaluation with the model in evaluation mode, without gradients; returns named
    numbers, as {"auc": 0.9}, which `tracker` gets as "val/auc". The first rank's ones count."""
    metric: str = "loss"
    """What `keep_best` and `patience` compare: "loss", of `val_data`, or a name of `evaluate`."""
    mode: str = "min"
    """"min" if a lower `metric` is better, "max" if a higher one is; NaN never is."""
    patience: int | None = None
    """The run ends after this many evaluations in a row without a better `metric`."""
    on_evaluation: Callable[[int, dict[str, float]], object] | None = None
    """Called after each evaluation with the step and the numbers; True ends the run."""
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
    """The model has the weights of the best `metric` at the end. Each new best is saved, and its
    checkpoint kept; without `checkpoint_dir` a copy is on the host."""
    resume: bool = True
    """From the newest checkpoint, see `max_steps`. With False one in the folder is a ValueError."""
    progress: bool = True
    """Logs a line when the run begins and when it ends, and shows a bar on a terminal, if tqdm is
    installed. Without it only a run that is resumed logs a line."""
    tracker: MetricsTracker | None = None
    """Receives "train/loss", "train/lr", "val/loss" and those of a watched scaler, from step 1."""
    loss_fn: Callable[[Tensor, Any], Tensor] | None = None
    """The loss of predictions and target, see `ModelCall.loss`. The parameters of a module, as of
    ArcFace, are trained and saved too; over ranks they are a ValueError: put it into the model."""
    model_call: ModelCall | None = None
    """How to call the model and compute its loss, in place of `loss_fn`."""

    def __post_init__(self) -> None:
        """Check every field; NumPy's numbers become Python's, which a checkpoint can hold."""
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            value = value.item() if isinstance(value, np.generic) else value
            kinds = [get_origin(kind) or kind for kind in get_args(field.type) or (field.type,)]
            expected = " or ".join(kind.__name__.replace("NoneType", "None") for kind in kinds)
            is_valid, is_number = isinstance(value, tuple(kinds)), False
            if options := _NAMES.get(name):
                expected = f"one of {', '.join(options)}" + " or a callable" * (Callable in kinds)
                key = ALIASES.get(str(value), str(value)) if name == "precision" else value
                is_valid = key in options if isinstance(key, str) else is_valid
            elif int in kinds or float in kinds:
                expected += " of at least 0" if name in _MAY_BE_0 else " above 0"
                is_number = type(value) is int or (type(value) is float and float in kinds)
                least = 0 if name in _MAY_BE_0 else sys.float_info.min
                in_range = is_number and least <= value < 2**63  # torch's integers have 64 bits
                is_valid = in_range or (value is None and is_valid)
            if not is_valid:
                msg = f"{name}: expected {expected}, got {value!r}"
                raise ValueError(msg)
            object.__setattr__(self, name, float(value) if float in kinds and is_number else value)
        if self.loss_fn is not None and self.model_call is not None:
            msg = "loss_fn: expected None beside a model_call, which has its own"
            raise ValueError(msg)

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
        n_after = (total or math.inf) - self.warmup_steps  # without an end only "constant"
        share = (n_taken - self.warmup_steps) / max(n_after, 1)
        return SCHEDULES[self.schedule](min(share, 1.0))
