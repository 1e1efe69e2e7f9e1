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
    """The options of `fastamp.fine_tune`, with defaults that work; numbers may be NumPy's.

    Args:
        epochs: passes over the data.
        max_steps: steps to train, in place of `epochs`. A run that has ended or was interrupted
            continues with more of either, at the learning rate of the longer schedule.
        batch_size: samples in a batch, on every rank; a loader or an iterable has its own.
        lr: the highest learning rate of the schedule.
        weight_decay: of the optimizer.
        optimizer: "adamw" or "adam", fused where torch supports it, "sgd" or "adagrad"; or a
            callable that makes one of the parameters that require a gradient, those of the loss
            last, and ignores `lr` and `weight_decay`. A run resumes only at its first rates.
        schedule: of the learning rate: "cosine" or "linear", which end at 0, or "constant".
        warmup_steps: steps in which the learning rate grows from near 0.
        use_amp: see `fastamp.compute_effective_precision`.
        precision: with `use_amp`: "32-true", which leaves dtypes alone, "bf16-mixed", or
            "16-mixed", which scales the loss. It and `max_norm` skip a step that is not finite.
        max_norm: largest norm of all gradients together; None does not clip.
        accumulate: batches in a step, together in memory. The last step of an epoch has the rest.
        device: where the model moves; None is a GPU if there is one, under torchrun the rank's own.
        seed: of all random numbers, with the rank; the program's generators are restored.
        num_workers: processes that load a Dataset which is not in memory.
        eval_every: steps between evaluations; None is every epoch. The end is always evaluated.
        evaluate: called at each evaluation with the model in evaluation mode, under autocast,
            without gradients. Returns named numbers, {"auc": 0.9} is "val/auc"; the first rank's.
        metric: what `keep_best`, `patience` compare: "loss" of `val_data`, or a name of `evaluate`.
        mode: "min" if a lower `metric` is better, "max" if a higher one is; NaN never is. None is
            "min" for "loss", and an error for another `metric` that is compared.
        patience: the run ends after this many evaluations in a row without a better `metric`.
        on_evaluation: called after each evaluation with its step and numbers; True ends the run.
        log_every: steps between flushes to `tracker`, which wait for the device.
        checkpoint_dir: folder of this run's checkpoints, ~ is the home folder; None writes none.
        checkpoint_every: steps between checkpoints; None is every epoch, the only way for data
            without a `state_dict`, as torch's DataLoader. One is always written at the end.
        keep: how many of the newest checkpoints to keep.
        keep_best: the model has the weights of the best `metric` at the end. Each new best is
            saved, and its checkpoint kept; without `checkpoint_dir` a copy is on the host.
        resume: from the newest checkpoint, see `max_steps`; False: one there is a ValueError.
        progress: logs a line when the run begins and when it ends, and shows a bar on a terminal,
            if tqdm is installed. Without it only a run that is resumed logs a line.
        tracker: receives "train/loss", "train/lr", "val/loss" and a watched scaler's, from step 1.
        loss_fn: of predictions and target, see `ModelCall.loss`. A module's parameters, of ArcFace,
            are trained and saved, too; over ranks they are a ValueError: put it into the model.
        model_call: how to call the model and compute its loss, in place of `loss_fn`.

    Example:
        >>> fastamp.TrainConfig(max_steps=100, lr=3e-4, precision="bf16").effective_precision
        'bf16-mixed'
    """

    epochs: int = 3
    max_steps: int | None = None
    batch_size: int = 32
    lr: float = 1e-3
    weight_decay: float = 0.01
    optimizer: str | Callable[[list[nn.Parameter]], Optimizer] = "adamw"
    schedule: str = "cosine"
    warmup_steps: int = 0
    use_amp: bool | None = None
    precision: str | int = "32-true"
    max_norm: float | None = 1.0
    accumulate: int = 1
    device: str | torch.device | None = None
    seed: int = 0
    num_workers: int = 0
    eval_every: int | None = None
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None = None
    metric: str = "loss"
    mode: str | None = None
    patience: int | None = None
    on_evaluation: Callable[[int, dict[str, float]], object] | None = None
    log_every: int = 10
    checkpoint_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    keep_best: bool = False
    resume: bool = True
    progress: bool = True
    tracker: MetricsTracker | None = None
    loss_fn: Callable[[Tensor, Any], Tensor] | None = None
    model_call: ModelCall | None = None

    def __post_init__(self) -> None:
        """Check every field; NumPy's numbers become Python's, which a checkpoint can hold."""
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            value = value.item() if isinstance(value, np.generic) else value
            kinds = [get_origin(kind) or kind for kind in get_args(field.type) or (field.type,)]
            expected = " or ".join(kind.__name__.replace("NoneType", "None") for kind in kinds)
            is_valid = isinstance(value, tuple(kinds))
            if options := _NAMES.get(name):
                expected = f"one of {', '.join(options)}" + " or a callable" * (Callable in kinds)
                key = ALIASES.get(str(value), str(value)) if name == "precision" else value
                is_valid = key in options if isinstance(key, str) else is_valid
            elif int in kinds or float in kinds:
                expected += " of at least 0" if name in _MAY_BE_0 else " above 0"
                low = 0 if name in _MAY_BE_0 else sys.float_info.min  # torch's end at 2**63
                is_valid = type(value) in {int, *kinds} and (value is None or low <= value < 2**63)
            if not is_valid:
                msg = f"{name}: expected {expected}, got {value!r}"
                raise ValueError(msg)
            is_float = float in kinds and value is not None
            object.__setattr__(self, name, float(value) if is_float else value)
        problem = ""
        if self.loss_fn is not None and self.model_call is not None:
            problem = "loss_fn: expected None beside a model_call, which has its own"
        elif self.checkpoint_every is not None and self.checkpoint_dir is None:
            problem = "checkpoint_every: expected a checkpoint_dir beside it, got None"
        elif self.metric != "loss" and self.evaluate is None:
            problem = f"metric: expected 'loss' without evaluate, got {self.metric!r}"
        elif self.metric != "loss" and self.mode is None and (self.keep_best or self.patience):
            problem = f"mode: expected 'min' or 'max' beside metric={self.metric!r}, got None"
        if problem:
            raise ValueError(problem)

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
