"""Training: a model trained in one call, with checkpoints that resume exactly."""

from fastamp.train.checkpointer import Checkpointer
from fastamp.train.config import TrainConfig
from fastamp.train.model_call import ModelCall
from fastamp.train.precision import compute_effective_precision
from fastamp.train.result import Curve, TrainResult
from fastamp.train.run import fine_tune
from fastamp.train.state_file import CheckpointError

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Curve",
    "ModelCall",
    "TrainConfig",
    "TrainResult",
    "compute_effective_precision",
    "fine_tune",
]
