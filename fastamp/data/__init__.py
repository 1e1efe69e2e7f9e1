"""The data: a loader that gathers, leases, prefetches and resumes."""

from fastamp.data.collate import BatchCollator
from fastamp.data.datasets import TokenDataset
from fastamp.data.loader import DataLoader
from fastamp.data.prefetch import prefetch
from fastamp.data.stats import LoaderStats

__all__ = ["BatchCollator", "DataLoader", "LoaderStats", "TokenDataset", "prefetch"]
