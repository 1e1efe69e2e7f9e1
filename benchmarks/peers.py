"""The loaders of other projects that are installed here, each with two threads.

Each is a function of the indices of every batch and of what makes a batch of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_collate

Fetch = Callable[[list[int]], Any]


def load_by_torchdata(indices: Iterable[list[int]], fetch: Fetch) -> Iterator[Any]:
    """Yield the batches of one epoch through torchdata's nodes."""
    from torchdata import nodes  # noqa: PLC0415 - optional

    mapper = nodes.ParallelMapper(nodes.SamplerWrapper(indices), fetch, 2, method="thread")
    return iter(nodes.Loader(mapper))


def load_by_spdl(indices: Iterable[list[int]], fetch: Fetch) -> Iterator[Any]:
    """Yield the batches of one epoch through SPDL's pipeline."""
    from spdl.pipeline import PipelineBuilder  # noqa: PLC0415 - optional

    builder = PipelineBuilder().add_source(indices)
    builder.pipe(fetch, concurrency=2, output_order="input")
    pipeline = builder.add_sink(4).build(num_threads=2)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def load_by_grain(indices: Iterable[list[int]], fetch: Fetch) -> Iterator[Any]:
    """Yield the batches of one epoch through Grain's dataset."""
    import grain  # noqa: PLC0415 - optional

    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    data = grain.MapDataset.source(list(indices)).map(fetch)
    return iter(data.to_iter_dataset(options))


PEERS = {"torchdata": load_by_torchdata, "spdl": load_by_spdl, "grain": load_by_grain}
INSTALLED = [name for name in PEERS if importlib.util.find_spec(name)]


class PeerLoader:
    """A peer's loader of a dataset: an epoch at every call of `iter`."""

    def __init__(self, peer: str, dataset: Any, batch_size: int, shuffle: bool) -> None:  # noqa: FBT001 - as torch's
        sampler = (RandomSampler if shuffle else SequentialSampler)(dataset)
        self._indices = BatchSampler(sampler, batch_size, drop_last=True)
        self._dataset = dataset
        self._load = PEERS[peer]

    def __iter__(self) -> Iterator[Any]:
        return self._load(self._indices, self._fetch)

    def _fetch(self, indices: list[int]) -> Any:
        return default_collate([self._dataset[i] for i in indices])
