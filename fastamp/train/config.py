"""What a training run can be told, checked when it is written down."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fastamp.metrics import MetricsTracker
from fastamp.step.precision import compute_effective_precision
from fastamp.train.adapter import Adapter

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = ["TrainConfig"]

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}
SCHEDULES: dict[str, Callable[[float], float]] = {  # of the part of the way after the warm-up
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
    "linear": lambda part: 1 - part,
    "constant": lambda _: 1.0,
}
AUTOCAST = {"32-true": None, "16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
# Each integer and the least that it can be; those whose default is None may be None.
_INTEGERS = {"epochs": 1, "max_steps": 1, "batch_size": 1, "warmup_steps": 0, "accumulate": 1}
_INTEGERS |= {"seed": 0, "num_workers": 0, "eval_every": 1, "log_every": 1}
_INTEGERS |= {"checkpoint_every": 1, "keep": 1}
_LONGEST = 2**63 - 1  # what torch takes for an integer
_PARALLEL = (None, "ddp", "fsdp")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What `fastamp.fine_tune` does; every field has a default that works.

    A step is one step of the optimizer, of `accumulate` batches.

    Raises:
        ValueError: a field has a value that it cannot have; the message names both.
    """

    epochs: int = 3
    max_steps: int | None = None
    """Ends training, in place of `epochs`."""
    batch_size: int = 32
    """Of a Dataset or tensors, on every rank; a loader or an iterable has its own."""
    lr: float = 1e-3
    weight_decay: float = 0.01
    optimizer: str | Callable[[list[nn.Parameter]], Optimizer] = "adamw"
    """"adamw", "adam", "sgd" or "adagrad", fused where torch can; or what makes one of parameters,
    by itself: `lr` and `weight_decay` are nothing to it."""
    schedule: str = "cosine"
    """Of the learning rate: "cosine" and "linear" end at 0, or "constant". Skipped steps do not
    count."""
    warmup_steps: int = 0
    """In which the learning rate grows from near 0."""
    use_amp: bool | None = None
    """See `fastamp.compute_effective_precision`."""
    precision: str | int = "32-true"
    """Comes with `use_amp` to "32-true", which leaves dtypes alone, "bf16-mixed" or "16-mixed",
    which scales the loss. Gradients that are not finite are skipped in "16-mixed", and everywhere
    with a `max_norm`."""
    max_norm: float | None = 1.0
    """Longest norm of all gradients together; None does not clip."""
    accumulate: int = 1
    """Batches in a step. The last step of an epoch takes those that are left."""
    compile: bool = False
    """Runs the model through `torch.compile`."""
    device: str | torch.device | None = None
    """Where the model is moved; None is a GPU where there is one. Under torchrun a GPU without a
    number is the rank's own."""
    parallel: str | None = None
    """"ddp" or "fsdp", for the ranks of torchrun or of an initialised torch.distributed; None is
    "ddp" where there are ranks, and a process of its own where there are none."""
    seed: int = 0
    """Of all that is drawn, together with the rank; the program's own draws go on afterwards as if
    nothing had been."""
    num_workers: int = 0
    """Processes that load a Dataset which is not in memory."""
    eval_every: int | None = None
    """Steps between evaluations; None evaluates after every epoch. Both do at the end."""
    log_every: int = 10
    """Steps after which `tracker` is served, which waits for the device. Then, too, ranks exchange
    their losses, and whether one of them has received a signal."""
    checkpoint_dir: str | os.PathLike[str] | None = None
    """Folder of this run's checkpoints; None keeps none."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None writes one after every epoch. Both do at the end."""
    keep: int = 3
    """How many of the newest checkpoints stay."""
    resume: bool = True
    """Goes on from the newest checkpoint. False starts anew, and removes what it found in
    `checkpoint_dir` once it has written a checkpoint of its own."""
    tracker: MetricsTracker | None = None
    """Gets every scalar, too: "train/loss", "train/lr", "val/loss", and those of a scaler that it
    watches. Steps count from 1."""
    loss_fn: Callable[[Tensor, Any], Tensor] | None = None
    """Of predictions and target, see `Adapter.loss`."""
    adapter: Adapter | None = None
    """Tells how the model is called and what its loss is, in place of `loss_fn`."""

    def __post_init__(self) -> None:
        """Check every field."""
        for name, least in _INTEGERS.items():
            value, or_none = getattr(self, name), getattr(type(self), name) is None
            fine = type(value) is int and least <= value <= _LONGEST
            expected = f"an integer from {least} to 2**63 - 1{' or None' if or_none else ''}"
            self._check(name, expected, fine=fine or (or_none and value is None))
        for name, others in {"lr": (), "weight_decay": (0,), "max_norm": (None,)}.items():
            value = getattr(self, name)
            fine = isinstance(value, (int, float)) and 0 < value < math.inf
            expected = " or ".join([*map(str, others), "a number above 0"])
            self._check(name, expected, fine=fine or value in others)
            if value is not None:  # NumPy's are no plain values in a checkpoint
                object.__setattr__(self, name, float(value))
        known = callable(self.optimizer) or self.optimizer in OPTIMIZERS
        self._check("optimizer", f"a callable or one of {', '.join(OPTIMIZERS)}", fine=known)
        self._check("schedule", f"one of {', '.join(SCHEDULES)}", fine=self.schedule in SCHEDULES)
        self._check("parallel", "None, 'ddp' or 'fsdp'", fine=self.parallel in _PARALLEL)
        kinds: dict[str, Any] = {"loss_fn": Callable, "adapter": Adapter, "tracker": MetricsTracker}
        for name, kind in kinds.items():
            value = getattr(self, name)
            fine = value is None or isinstance(value, kind)
            self._check(name, f"{kind.__name__} or None", fine=fine)
        alone = self.loss_fn is None or self.adapter is None
        self._check("loss_fn", "None beside an adapter, which has its own", fine=alone)
        try:
            kind = self.chosen_device.type
        except RuntimeError:
            kind = "meta"
        is_there = kind != "meta" and (kind != "cuda" or torch.cuda.is_available())
        self._check("device", "a device that is there", fine=is_there)
        try:
            trained = self.effective_precision in AUTOCAST
        except ValueError as error:
            raise ValueError(str(error).replace("requested", "precision", 1)) from None
        expected = f"what comes to one of {', '.join(AUTOCAST)}; a model of 16-bit parameters"
        self._check("precision", f"{expected} is trained in 32-true", fine=trained)

    @property
    def chosen_device(self) -> torch.device:
        """Where training takes place."""
        if self.device is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        else:
            device = torch.device(self.device)
        if str(device) == "cuda" and "LOCAL_RANK" in os.environ:
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        return device

    @property
    def effective_precision(self) -> str:
        """What `precision` and `use_amp` come to on the device."""
        use_gpu = self.chosen_device.type == "cuda"
        return compute_effective_precision(self.precision, self.use_amp, use_gpu=use_gpu)

    def lr_factor(self, n_taken: int, total: int | None) -> float:
        """Return what the learning rate is multiplied by after so many steps of `total`."""
        if n_taken < self.warmup_steps:
            return (n_taken + 1) / self.warmup_steps
        if total is None:  # and the schedule is constant
            return 1.0
        part = (n_taken - self.warmup_steps) / max(total - self.warmup_steps, 1)
        return SCHEDULES[self.schedule](min(part, 1.0))

    def _check(self, name: str, expected: str, *, fine: bool) -> None:
        if not fine:
            msg = f"{name}: expected {expected}, got {getattr(self, name)!r}"
            raise ValueError(msg)
