"""Fake tensors of the device "mps", on the CPU. Like Metal, they have no float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

if TYPE_CHECKING:
    from typing_extensions import Self

MPS = torch.device("mps")
WIDE = {torch.float64, torch.complex128}


class Played(torch.Tensor):
    """A tensor that says that it is on "mps"."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Self:
        if held.dtype in WIDE:
            msg = "Metal has no float64"
            raise TypeError(msg)
        options = {"dispatch_device": True, "device_for_backend_keys": MPS}
        made = torch.Tensor._make_subclass(cls, held, held.requires_grad, **options)
        made.held = held
        return made

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Convert the dtype alone: for a move torch would look for the device's driver."""
        assert torch.device(kwargs.pop("device", MPS)) == MPS
        others = [each for each in args if each != MPS]
        return super().to(*others, **kwargs) if others or "dtype" in kwargs else self

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return MPS if func is torch.ops.prim.device.default else play(func, args, kwargs or {})


class PlayMps(TorchDispatchMode):
    """Lets tensors be made on "mps"."""

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Played.__torch_dispatch__(func, _, args, kwargs)


def play(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operator on the CPU tensors; give its results the device that torch would."""
    flat, _ = tree_flatten((args, kwargs))
    played = {id(each.held): each for each in flat if isinstance(each, Played)}
    on_mps = bool(played)
    if kwargs.get("device") is not None:
        on_mps = torch.device(kwargs["device"]).type == "mps"

    def take(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value.held if isinstance(value, Played) else value

    def give(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = played.get(id(value))
        return (Played(value) if on_mps else value) if known is None else known

    return tree_map(give, func(*tree_map(take, args), **tree_map(take, kwargs)))
