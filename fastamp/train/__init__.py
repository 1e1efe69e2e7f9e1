"""Training: a model fine-tuned in one call, with checkpoints that resume exactly."""

from fastamp.train.adapter import Adapter, Outcome
from fastamp.train.checkpoint import CheckpointError
from fastamp.train.config import TrainConfig
from fastamp.train.loop import fine_tune
from fastamp.train.result import Curve, TrainResult

__all__ = [
    "Adapter",
    "CheckpointError",
    "Curve",
    "Outcome",
    "TrainConfig",
    "TrainResult",
    "fine_tune",
]
