"""Jobs of language models on the bytes of real text: GPTs, trained whole, and `lora`."""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fastamp
from fastamp.bench.gpt import GPT, GPT2_SMALL, Shape
from fastamp.bench.text import Corpus, load_corpus

MAX_NORM = 1.0
LEARNING_RATE = 1e-3  # at a width of 256; in inverse proportion to the width, as in muP
VALIDATION_WINDOWS = 64
# 11.2 M parameters. Many thin layers: the activations, which a lower precision halves, outweigh the
# parameters and Adam's state, which it does not. Heads of 128, for which torch's bf16 attention is
# fastest.
MAIN_SHAPES = {
    "cpu": Shape(layers=14, heads=2, width=256, block_size=128),
    "cuda": GPT2_SMALL,
}
MAIN_BATCH = 8  # on a CPU: many short steps make many blocks
# Small, so that the loop's overhead shows beside the model's own work.
SHAPES = {
    "cpu": Shape(layers=2, heads=2, width=256, block_size=64),
    "cuda": Shape(layers=6, heads=6, width=384, block_size=256),
}
BATCH_SIZES = {"cpu": 8, "cuda": 64}
DEEP = Shape(layers=24, heads=2, width=128, block_size=64)
RANK = 8  # of LoRA's matrices, of which DEEP has 192


@cache
def _read(block_size: int) -> Corpus:
    return load_corpus(None, block_size=block_size)


def make_gpt(device: str, seed: int) -> tuple[Any, ...]:
    """A GPT of 11.2 M (on a GPU: GPT-2's shape) on the sources of the standard library."""
    batch_size = MAIN_BATCH
    if device == "cuda":
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        # About 0.6 GiB a window in FP32, beside six arms of 2 GiB.
        batch_size = next((size for size in (32, 16, 8, 4, 2) if size <= gib - 12), 1)
    return make_model(seed, MAIN_SHAPES[device], batch_size)


def make_small_gpt(device: str, seed: int) -> tuple[Any, ...]:
    """A GPT of two layers (on a GPU: six) on the sources of the standard library; 8 x 64 bytes."""
    return make_model(seed, SHAPES[device], BATCH_SIZES[device])


def make_model(
    seed: int, shape: Shape, batch_size: int, corpus: Corpus | None = None
) -> tuple[Any, ...]:
    """Return a GPT of a shape as a task."""
    corpus = corpus or _read(shape.block_size)
    train, held_out = (
        fastamp.TokenDataset(text, shape.block_size) for text in (corpus.train, corpus.validation)
    )
    spread = range(0, len(held_out), -(-len(held_out) // VALIDATION_WINDOWS))
    x, y = map(torch.stack, zip(*(held_out[window] for window in spread), strict=True))
    windows = [*zip(*(torch.split(part, batch_size) for part in (x, y)), strict=True)]
    torch.manual_seed(seed)
    model = GPT(shape)
    options = {
        "optimizer": partial(_make_optimizer, rate=LEARNING_RATE * 256 / shape.width),
        "evaluate": partial(_evaluate, windows=windows),
        "batch_size": batch_size,
        "max_norm": MAX_NORM,
    }
    return model, train, _loss, options


def _make_optimizer(model: GPT, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _evaluate(model: GPT, windows: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Score the model's own forward pass; loss and accuracy are computed in float32."""
    losses, shares, device = [], [], next(model.parameters()).device
    for batch in windows:
        tokens, targets = (part.to(device) for part in batch)
        logits = model(tokens).float()
        with torch.autocast(tokens.device.type, enabled=False):
            losses.append(functional.cross_entropy(logits.mT, targets, reduction="none"))
        shares.append((logits.argmax(dim=2) == targets).double().mean(dim=1))
    return {"accuracy": torch.cat(shares).tolist(), "loss": torch.cat(losses).mean().item()}


class _LoRA(nn.Module):
    """A frozen linear layer, and a product of two small matrices that is added to it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        change = functional.linear(functional.linear(x, self.down), self.up)
        result: Tensor = self.frozen(x) + change
        return result


def make_lora(_device: str, seed: int) -> tuple[Any, ...]:
    """A frozen GPT of 24 layers with LoRA: 192 small matrices; batches of 4 x 64 bytes."""
    model, data, loss, options = make_model(seed, DEEP, batch_size=4)
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        for name in ("qkv", "attention_out", "up", "down"):
            setattr(block, name, _LoRA(getattr(block, name)))
    return model, data, loss, options | {"optimizer": _make_lora_optimizer}


def _make_lora_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
