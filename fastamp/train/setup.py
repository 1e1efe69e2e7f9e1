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

    from fastamp.train.ranks import Ranks

__all__ = ["Skipped", "as_found", "make_optimizer", "modes_of", "prepare", "seed_all", "set_modes"]


@contextmanager
def as_found(model: nn.Module, config: TrainConfig, ranks: Ranks) -> Iterator[None]:
    """Seed all that is drawn, and restore the generators and the modules' modes."""
    device = config.chosen_device
    modes, before = modes_of(model), rng_state(device)
    seed_all(config.seed, ranks.rank, 0)
    try:
        if not model.training:
            model.train()
        yield
    finally:
        set_modes(modes)
        set_rng_state(before, device)


def seed_all(seed: int, rank: int, step: int) -> None:
    """Seed the default generators; every rank draws something else."""
    if rank or step:
        seed = int(np.random.SeedSequence((seed, rank, step)).generate_state(1, np.uint64)[0] >> 1)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what a dataset may draw from
    random.seed(seed)


def modes_of(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return which modules are in training mode."""
    return [(module, module.training) for module in model.modules()]


def set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    """Restore what `modes_of` returned."""
    for module, training in modes:
        module.training = training


def prepare(model: nn.Module, config: TrainConfig, ranks: Ranks) -> tuple[nn.Module, nn.Module]:
    """Return what is called in place of the model, in training and in evaluation.

    Here, and nowhere else, it is moved, sharded and wrapped.
    """
    device = config.chosen_device
    model.to(device)
    ranks.shard(model, device)
    called: Any = torch.compile(model) if config.compile else model
    return ranks.wrap(called, device), called


def make_optimizer(model: nn.Module, config: TrainConfig, ranks: Ranks) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that are trained."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        msg = f"model: {type(model).__name__} has no parameter that requires a gradient"
        raise ValueError(msg)
    if not isinstance(config.optimizer, str):
        made: Any = config.optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            msg = f"optimizer: expected a callable that returns an Optimizer, it returned {made!r}"
            raise TypeError(msg)
        return made
    make: Any = OPTIMIZERS[config.optimizer]
    options = {"lr": config.lr, "weight_decay": config.weight_decay}
    try:
        # Without the scaler's help torch's fused SGD and Adagrad take no DTensors.
        fused = ranks.mode != "fsdp" or config.max_norm is not None
        return make(parameters, **options, fused=fused)  # type: ignore[no-any-return]
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
