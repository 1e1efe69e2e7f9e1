"""fastamp: faster PyTorch training loops, one line at a time."""

from fastamp._ops import backends
from fastamp.data import (
    ArrayDataset,
    BatchCollator,
    DataLoader,
    LoaderStats,
    TokenDataset,
    prefetch,
)
from fastamp.integrations.lightning import adapt
from fastamp.metrics import MetricsTracker, ScalarStats
from fastamp.step import GradScaler
from fastamp.step.clip import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)
from fastamp.step.precision import compute_effective_precision
from fastamp.timer import RegionStats, Timer
from fastamp.train import Adapter, TrainConfig, TrainResult, fine_tune

__all__ = [
    "Adapter",
    "ArrayDataset",
    "BatchCollator",
    "DataLoader",
    "GradScaler",
    "LoaderStats",
    "MetricsTracker",
    "RegionStats",
    "ScalarStats",
    "Timer",
    "TokenDataset",
    "TrainConfig",
    "TrainResult",
    "__version__",
    "adapt",
    "backends",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "compute_effective_precision",
    "fine_tune",
    "get_total_norm",
    "prefetch",
]

__version__ = "0.1.0"
