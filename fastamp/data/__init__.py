"""The data: a loader that gathers, leases, prefetches and resumes."""

from fastamp.data.augment import RandomCrop, RandomHorizontalFlip
from fastamp.data.collate import BatchCollator
from fastamp.data.datasets import ArrayDataset
from fastamp.data.images import ImageFolder
from fastamp.data.in_memory import in_memory
from fastamp.data.loader import DataLoader
from fastamp.data.prefetch import prefetch
from fastamp.data.sample_rng import sample_rng
from fastamp.data.shard import ShardSampler
from fastamp.data.sources import Source
from fastamp.data.stats import LoaderStats
from fastamp.data.structure import map_tensors
from fastamp.data.tokens import TokenDataset
from fastamp.data.workers import WorkerInfo, get_worker_info

__all__ = [
    "ArrayDataset",
    "BatchCollator",
    "DataLoader",
    "ImageFolder",
    "LoaderStats",
    "RandomCrop",
    "RandomHorizontalFlip",
    "ShardSampler",
    "Source",
    "TokenDataset",
    "WorkerInfo",
    "get_worker_info",
    "in_memory",
    "map_tensors",
    "prefetch",
    "sample_rng",
]
