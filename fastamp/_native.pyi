# The compiled core, as its bindings (csrc/*/bind.cpp) define it.

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

class Backend:
    device: torch.device
    is_apart: bool
    def __init__(
        self, ops: OpTable, is_apart: bool, device: torch.device, cuda_index: int | None
    ) -> None: ...
    def pack(self, tensors: Sequence[Tensor]) -> PackedTensors: ...
    def grad_stats(
        self,
        tensors: PackedTensors,
        scale: Tensor | None,
        max_norm: float | None,
        only_finite: bool,
        before: Tensor | None,
        skipped: Tensor | None,
    ) -> Tensor: ...
    def reduce(self, tensors: PackedTensors) -> tuple[Tensor, Tensor]: ...
    def rescale(self, tensors: PackedTensors, factor: Tensor) -> None: ...
    def read(
        self,
        update: Update,
        groups: Sequence[dict[str, Any]],
        states: dict[Tensor, Any],
        grads: list[Tensor] | None,
    ) -> ReadStep | tuple[str, str]: ...
    def apply(
        self,
        step: ReadStep,
        factor: Tensor | None,
        found_inf: Tensor | None,
        zero_grad: bool,
    ) -> None: ...
    def step(
        self,
        steps: list[tuple[Update, Sequence[dict[str, Any]], dict[Tensor, Any]]],
        measures: bool,
        scale: Tensor | None,
        max_norm: float | None,
        before: Tensor | None,
        skipped: Tensor | None,
        zero_grad: bool,
    ) -> Tensor | tuple[str, str] | None: ...

class OpTable:
    def __init__(self, address: int, size: int) -> None: ...

class PackedTensors:
    @property
    def rest(self) -> list[int]: ...

class ReadStep(PackedTensors): ...

class Update:
    def __init__(self, rule: str, is_lean: bool = False) -> None: ...

class Region:
    path: str
    children: dict[str, Region]
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...
    def add(self, duration_ns: int) -> None: ...
    def figures(self) -> tuple[Any, ...]: ...
    def find(self, name: object) -> Region | None: ...
    def innermost(self) -> Region: ...
    def reset(self) -> None: ...

built_with_cuda: bool
cpu_ops: OpTable
cuda_ops: OpTable | None
has_exchange_table: bool
rules: dict[str, tuple[tuple[tuple[str, str], ...], bool, bool, list[str]]]

def gather(arrays: list[Tensor], rows: Tensor, outs: list[Tensor], num_threads: int) -> None: ...
def check_device(device_index: int) -> None: ...
def make_region(path: str, begin: Any, always: bool) -> Region: ...
def stack(
    samples: Sequence[Any],
    dtype: torch.dtype,
    allocate: Callable[[tuple[int, ...], torch.dtype], Tensor],
    pad: Tensor | None = None,
) -> Tensor | None: ...
