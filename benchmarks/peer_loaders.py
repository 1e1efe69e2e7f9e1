"""A job trained by the stock loop with another loader: torchdata's nodes, SPDL.

They get the sampler of the stock loop, and threads in place of its workers.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, default_collate

from fastamp.bench.loader import Batches
from fastamp.bench.trainer import Trainer
from fastamp.data.structure import map_tensors

Epoch = Callable[[], object]


def _train_with(
    make: Callable[..., Any], loop: Trainer, _: ExitStack, *, num_workers: int = 0, **_options: Any
) -> Epoch:
    """Train as the stock loop does, with somebody else's loader."""
    loader = make(loop, loop.feed.data.collate_fn or default_collate, num_workers)
    loop.feed = loop.feed._replace(begin=partial(_move, loader, loop.device))
    return loop.visit


def _move(loader: Any, device: str) -> Iterator[Any]:
    move = partial(map_tensors, partial(torch.Tensor.to, device=device))
    yield from loader if device == "cpu" else map(move, loader)


def _fetch(loop: Trainer, join: Callable[[list[Any]], Any]) -> Callable[[list[int]], Any]:
    """Return a function that makes a batch: peers then pass no single samples between threads."""
    dataset = loop.feed.data.by_torch()
    return lambda rows: join([dataset[row] for row in rows])


def _make_torchdata(loop: Trainer, join: Callable[[list[Any]], Any], num_workers: int) -> Batches:
    """Return a pipeline of torchdata's nodes, with threads in place of workers."""
    nodes = importlib.import_module("torchdata.nodes")
    rows = nodes.Batcher(nodes.SamplerWrapper(loop.feed.sampler), loop.feed.data.batch_size)
    threads = {"num_workers": num_workers, "method": "thread"}
    loader: Batches = nodes.Loader(nodes.ParallelMapper(rows, _fetch(loop, join), **threads))
    return loader


def _make_spdl(loop: Trainer, join: Callable[[list[Any]], Any], num_workers: int) -> Batches:
    """Return SPDL's DataLoader, which always has a thread."""
    rows = BatchSampler(loop.feed.sampler, loop.feed.data.batch_size, drop_last=True)
    options: dict[str, Any] = {"num_threads": num_workers or 1, "output_order": "input"}
    spdl = importlib.import_module("spdl.dataloader")
    loader: Batches = spdl.DataLoader(rows, preprocessor=_fetch(loop, join), **options)
    return loader


LOADERS: dict[str, Callable[..., Epoch]] = {
    "torchdata": partial(_train_with, _make_torchdata),
    "spdl": partial(_train_with, _make_spdl),
}
