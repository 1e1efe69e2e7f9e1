"""The default random number generators of torch, NumPy and Python: seeded, saved and restored."""

import random
from collections.abc import Iterator, Sequence
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


def all_devices(*, begins: bool = False) -> list[torch.device]:
    """Return every accelerator; none if the process has not used one yet, unless it `begins` to."""
    for module in (torch.cuda, torch.xpu):
        if module.is_initialized() or (begins and module.is_available()):
            kind = module.__name__.rpartition(".")[2]
            return [torch.device(kind, index) for index in range(module.device_count())]
    return [torch.device("mps")] if torch.backends.mps.is_available() else []


def rng_state(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the generators' states, with those of accelerators."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the program's generator
    return {
        "torch": torch.get_rng_state(),
        "devices": [_generator(device).get_state() for device in devices if device.type != "cpu"],
        "numpy": tree_map_only(np.ndarray, np.ndarray.tolist, numpy),
        "python": random.getstate(),
    }


def set_rng_state(state: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Restore what `rng_state` returned; accelerators without a state stay."""
    torch.set_rng_state(state["torch"])
    for device, one in _pairs(state, devices):
        _generator(device).set_state(one)
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])


def _pairs(
    state: dict[str, Any], devices: Sequence[torch.device]
) -> Iterator[tuple[torch.device, torch.Tensor]]:
    return zip((d for d in devices if d.type != "cpu"), state["devices"], strict=False)


def _generator(device: torch.device) -> torch.Generator:
    """Return the default generator of an accelerator."""
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        return module._get_default_mps_generator()  # type: ignore[no-any-return]
    module.init()
    index: Any = device.index
    return module.default_generators[module.current_device() if index is None else index]  # type: ignore[no-any-return]
