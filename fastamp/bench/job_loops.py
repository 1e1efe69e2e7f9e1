"""The loops of `jobs`: the good one of torch alone, the naive one, fastamp's, and repairs of parts.

All start from the same weights and read the same samples; their first losses have to agree.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.bench.feeds import make_feed
from fastamp.bench.tasks import Training, expect, make_optimizers, with_copy, with_fused
from fastamp.bench.trainer import Config, Trainer

AGREE_STEPS = 4  # the first losses, before small differences grow
# Tolerances of losses: same samples, one precision; two precisions; other crops or filters.
SAME, PRECISE, ALIKE = 1e-3, 3e-2, 0.1
ARMS = ("naive", "stock", "fastamp")
PARTS = ("loader", "step", "precision")
NAIVE = Config(name="naive", loader="naive", step="naive")


def list_loops(base: str, precision: str) -> list[Config]:
    """Return the good loop of torch alone, by its loader, the naive loop, and fastamp's."""
    stock = Config(name="stock", loader=base, precision=precision)
    return [stock, NAIVE, replace(stock, name="fastamp", loader="fastamp", step="fastamp")]


def list_repairs(loops: list[Config], *, has_own: bool) -> list[Config]:
    """Return the naive loops in which one part is replaced by that of the stock loop, or ours."""
    stock, naive, ours = loops
    both = [(part, config) for part in PARTS for config in (stock, ours)]
    return [
        replace(naive, name=f"{part}: {config.name}", **{part: getattr(config, part)})
        for part, config in both[0 if has_own else 2 : -1]  # both have one precision
        if getattr(config, part) != getattr(naive, part)
    ]


def check_losses(
    losses: dict[str, list[float]], precisions: dict[str, str], *, is_same: bool
) -> None:
    """Compare the first losses of all loops with those of the first loop.

    Raises:
        BrokenTask: they differ by more than rounding, or, where loops read other crops of the same
            images, their means differ by more than a tenth.
    """
    base = next(iter(losses))
    for arm, values in losses.items():
        pair = [torch.tensor(values), torch.tensor(losses[base])]
        rtol = SAME if precisions[arm] == precisions[base] else PRECISE
        if not is_same:
            pair, rtol = [losses.mean() for losses in pair], ALIKE
        wanted = f"the first losses of the {base} loop in all loops, such as {losses[base]}"
        got = f"{values} in the {arm} loop: does the task draw random numbers?"
        expect(torch.allclose(pair[0], pair[1], rtol, rtol), "loss", wanted, got)


def make_loop(config: Config, training: Training, device: str, **options: Any) -> Trainer:
    """Return a trainer whose visits are short epochs; the options are those of `make_feed`.

    It has the optimizer that people give it: torch's default in a naive step, else fused where
    torch can.
    """
    fused = None if config.step == "naive" else True

    def optimizer(model: nn.Module) -> list[Optimizer]:
        return [with_fused(each, fused) for each in make_optimizers(training, model)]

    feed = make_feed(config.loader, training, device, **options)
    return Trainer(config, replace(with_copy(training), optimizer=optimizer), device, feed)
