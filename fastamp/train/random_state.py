"""The default random number generators of torch, NumPy and Python: seeded, saved and restored."""

import random
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only


def seed_all(seed: int, rank: int, step: int = 0) -> None:
    """Seed the generators, differently on every rank."""
    if rank or step:
        seed = int(np.random.SeedSequence((seed, rank, step)).generate_state(1, np.uint64)[0] >> 1)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what a dataset may draw from
    random.seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the generators' states, with those of the GPUs if CUDA is in use."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the program's generator
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = tree_map_only(np.ndarray, np.ndarray.tolist, numpy)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned, of the GPUs that are here."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])
    for index in range(min(len(state.get("cuda", ())), torch.cuda.device_count())):
        torch.cuda.set_rng_state(state["cuda"][index], index)
