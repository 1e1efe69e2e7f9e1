"""The model: a small decoder-only GPT over bytes."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256  # one token per byte value
INIT_STD = 0.02  # as in GPT-2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model; `block_size` is the longest input in bytes."""

    layers: int
    heads: int
    width: int
    block_size: int


GPT2_SMALL = Shape(layers=12, heads=12, width=768, block_size=1024)


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, time, width] for [batch, time, width]."""
        heads = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        hidden: torch.Tensor = self.down(functional.gelu(self.up(self.mlp_norm(x))))
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

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, time, 256] for bytes [batch, time]."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        device = tokens.device.type
        if torch.is_autocast_enabled(device):
            # Autocast leaves embeddings in float32, and with them all that is added to them.
            x = x.to(torch.get_autocast_dtype(device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
