"""Gradients of every kind for the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np


def values_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def parameters_with(*grads: torch.Tensor | None) -> list[torch.Tensor]:
    """Make parameters that carry these gradients."""
    made = []
    for grad in grads:
        like = torch.zeros(1) if grad is None else grad
        shape = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        parameter = torch.nn.Parameter(shape)
        parameter.grad = grad
        made.append(parameter)
    return made


def random(
    size: int | tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(device, dtype)


def odd_gradients(device: str) -> dict[str, torch.Tensor]:
    """Every kind of gradient that torch can make, all with finite values."""
    base = random((6, 8, 5, 7), torch.float32, device)
    index = torch.tensor([[0, 3, 3], [1, 2, 2]])
    sparse = torch.sparse_coo_tensor(
        index, torch.tensor([1.0, 2.0, 3.0]), (4, 5), check_invariants=True
    )
    return {
        "transposed": random((40, 30), torch.float32, device).t(),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "with gaps": random((50, 30), torch.float32, device)[::2, 1::3],
        "unaligned": random(1003, torch.bfloat16, device)[1:],
        "0-dim": torch.tensor(-3.5, device=device),
        "empty": torch.empty(0, 3, device=device),
        "float64": random(100, torch.float64, device),
        "complex64": torch.complex(base, base.flip(0)),
        "conjugate": torch.complex(base, base).conj(),
        "negative": torch.complex(base, base).conj().imag,
        "uncoalesced": sparse.to(device),
    }


KINDS = list(odd_gradients("cpu"))
