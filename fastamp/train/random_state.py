"""The default random number generators of torch, NumPy and Python: seeded, saved and restored."""

import math
import random
from typing import Any

import numpy as np
import torch

from fastamp.train.check import ANY, check


def seed_all(seed: int, rank: int, step: int = 0) -> None:
    """Seed the generators, differently on every rank."""
    if rank or step:
        seed = int(np.random.SeedSequence((seed, rank, step)).generate_state(1, np.uint64)[0] >> 1)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what a dataset may draw from
    random.seed(seed)


def rng_state(device: torch.device, own: torch.Generator | None = None) -> dict[str, Any]:
    """Return the generators' states, and that of `own`, a generator."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the program's generator
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": numpy,
        "python": random.getstate(),
        "own": own and own.get_state(),
    }


def check_rng_state(state: Any, device: torch.device, own: torch.Generator | None = None) -> None:
    """Raise an error unless `set_rng_state` can restore a state; nothing changes."""
    numpy = {"bit_generator": "", "state": {"key": ANY, "pos": 0}, "has_gauss": 0, "gauss": ANY}
    parts = {"torch": ANY, "cuda": ANY, "numpy": numpy, "python": ANY, "own": ANY}
    check(state, parts, "state")
    torch.Generator().set_state(state["torch"])
    np.random.RandomState().set_state(state["numpy"])
    random.Random().setstate(state["python"])  # noqa: S311 - the program's generator
    # They do not look at a place in NumPy's key, and at numbers kept for the next draw.
    pos, gauss = state["numpy"]["state"]["pos"], state["python"][2]
    kept = [state["numpy"]["gauss"], 0.0 if gauss is None else gauss]
    if pos > 624 or not all(type(x) is float and math.isfinite(x) for x in kept):
        msg = f"NumPy's pos is {pos}, numbers kept for the next draw {kept}"
        raise ValueError(msg)
    for name in ("cuda", "own"):
        if not isinstance(state[name], (torch.Tensor, type(None))):
            msg = f"{name} is {state[name]!r}"
            raise TypeError(msg)
    if device.type == "cuda" and state["cuda"] is not None:
        torch.Generator(device).set_state(state["cuda"])
    if own is not None:
        torch.Generator(own.device).set_state(state["own"])


def set_rng_state(
    state: dict[str, Any], device: torch.device, own: torch.Generator | None = None
) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])
    if own is not None:
        own.set_state(state["own"])
