"""Training: a model trained in one call, with checkpoints that resume exactly."""

from fastamp.train.checkpoint import CheckpointError
from fastamp.train.config import TrainConfig
from fastamp.train.loop import fine_tune
from fastamp.train.model_call import ModelCall
from fastamp.train.result import Curve, TrainResult

__all__ = ["CheckpointError", "Curve", "ModelCall", "TrainConfig", "TrainResult", "fine_tune"]
