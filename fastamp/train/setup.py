"""What a run is made of, and what it puts back: model, optimizer, modes and generators."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastamp.train.checkpoint import rng_state, set_rng_state
from fastamp.train.config import OPTIMIZERS, TrainConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

__all__ = ["Skipped", "as_found", "make_optimizer", "modes_of", "prepare", "set_modes"]


@contextmanager
def as_found(model: nn.Module, config: TrainConfig) -> Iterator[None]:
    """Seed all that is drawn, and restore the generators and the modules' modes."""
    device = config.chosen_device
    modes, before = modes_of(model), rng_state(device)
    torch.manual_seed(config.seed)
    np.random.seed(config.seed % 2**32)  # noqa: NPY002 - what a dataset may draw from
    random.seed(config.seed)
    try:
        if not model.training:
            model.train()
        yield
    finally:
        set_modes(modes)
        set_rng_state(before, device)


def modes_of(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return which modules are in training mode."""
    return [(module, module.training) for module in model.modules()]


def set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    """Restore what `modes_of` returned."""
    for module, training in modes:
        module.training = training


def prepare(model: nn.Module, config: TrainConfig) -> nn.Module:
    """Return what is called in place of the model: here, and nowhere else, it would be wrapped."""
    model.to(config.chosen_device)
    return torch.compile(model) if config.compile else model  # type: ignore[return-value]


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that are trained."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        msg = f"model: {type(model).__name__} has no parameter that requires a gradient"
        raise ValueError(msg)
    if not isinstance(config.optimizer, str):
        return config.optimizer(parameters)
    make: Any = OPTIMIZERS[config.optimizer]
    options = {"lr": config.lr, "weight_decay": config.weight_decay}
    try:
        return make(parameters, **options, fused=True)  # type: ignore[no-any-return]
    except RuntimeError:  # torch has none for this device or dtype
        return make(parameters, **options)  # type: ignore[no-any-return]


class Skipped:
    """Whether a step was skipped: on its way to the host, and read when nobody waits for it."""

    def __init__(self, found_inf: Tensor) -> None:
        self._flag, self._event = found_inf.to("cpu", non_blocking=True), None
        if found_inf.is_cuda:
            self._event = torch.cuda.current_stream(found_inf.device).record_event()

    def __bool__(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return bool(self._flag)
