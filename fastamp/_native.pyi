# The compiled core, as its bindings (csrc/*/bind.cpp) define it.

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

class Gatherer:
    def __init__(
        self,
        columns: Sequence[tuple[Sequence[tuple[int, int]], int, int, int, int, Any]],
        depth: int,
        num_threads: int,
        owner: object,
    ) -> None: ...
    def submit(
        self, indices: Tensor, outputs: Sequence[Tensor], keys: Tensor | None = None
    ) -> None: ...
    def is_ready(self) -> bool: ...
    def wait(self) -> float: ...

class NormType:
    L1: NormType
    L2: NormType
    INF: NormType

class PackedTensors:
    @property
    def has_float16(self) -> bool: ...
    @property
    def num_chunks(self) -> int: ...
    @property
    def rest(self) -> list[int]: ...
    @property
    def tensors(self) -> Sequence[Tensor]: ...

class Ops:
    def __init__(self, address: int, size: int) -> None: ...
    def grad_stats(
        self,
        tensors: PackedTensors,
        norm_type: NormType,
        scale: Tensor | None,
        max_norm: float | None,
        only_finite: bool,
        skipped: Tensor | None,
        work: Tensor | None,
        stats: Tensor,
        num_threads: int,
    ) -> None: ...
    def rescale(self, tensors: PackedTensors, factor: Tensor, num_threads: int) -> None: ...
    def update(
        self,
        update: Update,
        step: ReadStep,
        stats: Tensor | None,
        factor: Tensor | None,
        found_inf: Tensor | None,
        zero_grad: bool,
        slots: Tensor | None,
        num_threads: int,
    ) -> list[Tensor]: ...

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

class ReadStep(PackedTensors): ...

class Rule:
    ADAM: Rule
    SGD: Rule
    ADAGRAD: Rule

class Update:
    num_slots: int
    def __init__(
        self, rule: Rule, decoupled: bool, cuda_device: int | None, host_is_apart: bool
    ) -> None: ...
    def read(self, groups: list[dict[str, Any]], states: dict[Tensor, Any]) -> ReadStep | str: ...
    def settle(self, slots: list[float], states: dict[Tensor, Any]) -> None: ...

NUM_STATS: int
built_with_cuda: bool
cpu_ops: Ops
cuda_ops: Ops
has_exchange_table: bool

def augment_image(images: Any, key: int, source: int, output: int) -> None: ...
def check_device(device_index: int) -> None: ...
def columns(
    samples: tuple[Any, ...], keys: tuple[Any, ...]
) -> tuple[tuple[Any, ...], ...] | None: ...
def make_region(path: str, begin: Any, always: bool) -> Region: ...
def pack(tensors: Sequence[Tensor], cuda_device: int | None) -> PackedTensors: ...
def stack(
    samples: Sequence[Any],
    dtype: torch.dtype,
    allocate: Callable[[tuple[int, ...], torch.dtype], Tensor],
    pad: Tensor | None = None,
    multiple: int = 1,
) -> Tensor | None: ...
