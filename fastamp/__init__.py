"""fastamp: faster PyTorch training loops, one line at a time."""

from fastamp._ops import backends
from fastamp.data import (
    ArrayDataset,
    BatchCollator,
    DataLoader,
    ImageFolder,
    LoaderStats,
    RandomCrop,
    RandomHorizontalFlip,
    Source,
    TokenDataset,
    get_worker_info,
    in_memory,
    prefetch,
    sample_rng,
)
from fastamp.metrics import MetricsTracker, ScalarStats
from fastamp.step import (
    AdamW,
    GradScaler,
    StepReport,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    nonfinite_parameters,
    optimizer_step,
    to_torch,
)
from fastamp.timer import RegionStats, Timer
from fastamp.train import (
    Checkpointer,
    CheckpointError,
    ModelCall,
    TrainConfig,
    TrainResult,
    compute_effective_precision,
    fine_tune,
)

__all__ = [
    "AdamW",
    "ArrayDataset",
    "BatchCollator",
    "CheckpointError",
    "Checkpointer",
    "DataLoader",
    "GradScaler",
    "ImageFolder",
    "LoaderStats",
    "MetricsTracker",
    "ModelCall",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RegionStats",
    "ScalarStats",
    "Source",
    "StepReport",
    "Timer",
    "TokenDataset",
    "TrainConfig",
    "TrainResult",
    "__version__",
    "backends",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "compute_effective_precision",
    "fine_tune",
    "get_total_norm",
    "get_worker_info",
    "in_memory",
    "nonfinite_parameters",
    "optimizer_step",
    "prefetch",
    "sample_rng",
    "to_torch",
]

__version__ = "0.1.0"
