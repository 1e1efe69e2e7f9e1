"""Jobs of language models: `gpt`, a small GPT trained on the bytes of real text."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from fastamp.train.gpt import GPT, Shape
from fastamp.train.text import (
    Batch,
    Bytes,
    Corpus,
    load_corpus,
    training_batches,
    validation_batches,
)

MAX_NORM = 1.0
LEARNING_RATE = 1e-3  # at a width of 256; in inverse proportion to the width, as in muP
VALIDATION_WINDOWS = 64
SMALL = Shape(layers=2, heads=2, width=256, block_size=64)


class Draws:
    """Batches drawn at random from a text, the same in every pass, without end."""

    def __init__(self, text: Bytes, block_size: int, batch_size: int, seed: int) -> None:
        self.args = text, block_size, batch_size, seed

    def __iter__(self) -> Iterator[Batch]:
        return training_batches(*self.args)


def make_gpt(
    device: str,
    seed: int,
    *,
    shape: Shape = SMALL,
    batch_size: int = 8,
    corpus: Corpus | None = None,
) -> tuple[Any, ...]:
    """Make the GPT, its batches and its score; without a corpus, of the standard library."""
    if corpus is None:
        corpus = load_corpus(None, block_size=shape.block_size)
    sizes = (shape.block_size, batch_size)
    torch.manual_seed(seed)
    model = GPT(shape)
    windows = partial(validation_batches, corpus.validation, *sizes, VALIDATION_WINDOWS, device)
    options = {
        "optimizer": partial(_make_optimizer, rate=LEARNING_RATE * 256 / shape.width),
        "evaluate": partial(_evaluate, windows=windows),
        "batch_size": batch_size,
        "max_norm": MAX_NORM,
    }
    return model, Draws(corpus.train, *sizes, seed), _loss, options


def _make_optimizer(model: GPT, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _evaluate(model: GPT, windows: Callable[[], Iterator[Batch]]) -> dict[str, Any]:
    """Score the model's own forward pass; loss and accuracy are computed in float32."""
    losses, shares = [], []
    for tokens, targets in windows():
        logits = model(tokens).float()
        with torch.autocast(tokens.device.type, enabled=False):
            losses.append(functional.cross_entropy(logits.mT, targets, reduction="none"))
        shares.append((logits.argmax(dim=2) == targets).double().mean(dim=1))
    return {"accuracy": torch.cat(shares).tolist(), "loss": torch.cat(losses).mean().item()}
