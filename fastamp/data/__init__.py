"""The data: a loader that gathers, leases, prefetches and resumes."""

from fastamp.data.augment import RandomCrop, RandomHorizontalFlip
from fastamp.data.collate import BatchCollator
from fastamp.data.copies import prefetch
from fastamp.data.datasets import ArrayDataset
from fastamp.data.images import ImageFolder
from fastamp.data.in_memory import in_memory
from fastamp.data.loader import DataLoader
from fastamp.data.passes import LoaderStats
from fastamp.data.runners import get_worker_info
from fastamp.data.sample_rng import sample_rng
from fastamp.data.sources import Source
from fastamp.data.tokens import TokenDataset

__all__ = [
    "ArrayDataset",
    "BatchCollator",
    "DataLoader",
    "ImageFolder",
    "LoaderStats",
    "RandomCrop",
    "RandomHorizontalFlip",
    "Source",
    "TokenDataset",
    "get_worker_info",
    "in_memory",
    "prefetch",
    "sample_rng",
]
