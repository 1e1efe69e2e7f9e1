"""A small decoder-only GPT as a task, on the bytes of real text."""

import os
import sysconfig
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

import fastamp

VOCABULARY = 256  # one token per byte value
INIT_STD = 0.02  # as in GPT-2

VALIDATION_PART = 10  # the last tenth of a text is held out
# Third-party code, and tests, which some distributions leave out of the standard library.
EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
MAX_NORM = 1.0
LEARNING_RATE = 1e-3  # at a width of 256; in inverse proportion to the width, as in muP
VALIDATION_WINDOWS = 64


class Shape(NamedTuple):
    """The sizes of a model; `block_size` is the longest input in bytes."""

    layers: int
    heads: int
    width: int
    block_size: int


GPT2_SMALL = Shape(layers=12, heads=12, width=768, block_size=1024)
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


class Block(nn.Module):
    """Causal self-attention, then an MLP, each after a layer norm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, time, width] for [batch, time, width]."""
        heads = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return x + hidden


class GPT(nn.Module):
    """Predicts the next byte from the bytes before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.block_size, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            # Tokens keep torch's N(0, 1): told apart from the start, they are learnt in few steps.
            if parameter.ndim > 1 and name != "token.weight":
                # Each layer adds two branches to the residual stream: their sum keeps its size.
                branch = name.endswith(("attention_out.weight", "down.weight"))
                std = INIT_STD / (2 * shape.layers) ** 0.5 if branch else INIT_STD
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, time, 256] for bytes [batch, time]."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        device = tokens.device.type
        if torch.is_autocast_enabled(device):
            # Autocast leaves embeddings in float32, and with them all that is added to them.
            x = x.to(torch.get_autocast_dtype(device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


Corpus: TypeAlias = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]  # no byte is in both


def load_corpus(files: list[Path]) -> Corpus:
    """Read files, one after the other; return bytes to train on, and the tail for validation."""
    data = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    cut = len(data) - len(data) // VALIDATION_PART
    return data[:cut], data[cut:]


@cache
def read_library() -> Corpus:
    """Return the sources of the running interpreter's standard library, in a fixed order."""
    found = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = set(folders) - EXCLUDED
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return load_corpus(sorted(found, key=Path.as_posix))


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


def make_tiny(_device: str, seed: int) -> tuple[Any, ...]:
    """A GPT of one layer, whose steps load what torch needs for its kernels."""
    text = np.zeros(64, np.uint8)
    return make_model(seed, Shape(layers=1, heads=1, width=16, block_size=16), 1, (text, text))


def make_model(
    seed: int, shape: Shape, batch_size: int, corpus: Corpus | None = None
) -> tuple[Any, ...]:
    """Return a GPT of a shape as a task."""
    texts = corpus or read_library()
    train, held_out = (fastamp.TokenDataset(text, shape.block_size) for text in texts)
    spread = Subset(held_out, range(0, len(held_out), -(-len(held_out) // VALIDATION_WINDOWS)))
    windows = [*DataLoader(spread, batch_size)]
    torch.manual_seed(seed)
    model, rate = GPT(shape), LEARNING_RATE * 256 / shape.width
    options = {
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=rate, fused=True),
        "evaluate": partial(_evaluate, windows=windows),
        "batch_size": batch_size,
        "max_norm": MAX_NORM,
    }
    return model, train, _loss, options


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _evaluate(model: GPT, windows: list[list[Tensor]]) -> dict[str, Any]:
    """Score the model's own forward pass; loss and accuracy are computed in float32."""
    losses, shares, device = [], [], next(model.parameters()).device
    for batch in windows:
        tokens, targets = (part.to(device) for part in batch)
        logits = model(tokens).float()
        with torch.autocast(tokens.device.type, enabled=False):
            losses.append(functional.cross_entropy(logits.mT, targets, reduction="none"))
        shares.append((logits.argmax(dim=2) == targets).double().mean(dim=1))
    return {"accuracy": torch.cat(shares).tolist(), "loss": torch.cat(losses).mean().item()}
