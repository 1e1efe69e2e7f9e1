"""The step: unscale, check, clip and update with one read of the gradients."""

from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

from fastamp._ops import StepReport
from fastamp.step.clip import clip_grad_norm_, get_total_norm
from fastamp.step.lean import to_torch
from fastamp.step.nonfinite import NonFinite, nonfinite_parameters
from fastamp.step.optimizer_step import optimizer_step
from fastamp.step.optimizers import SGD, AdamW, Lion
from fastamp.step.scaler import GradScaler

__all__ = [
    "SGD",
    "AdamW",
    "GradScaler",
    "Lion",
    "NonFinite",
    "StepReport",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "nonfinite_parameters",
    "optimizer_step",
    "to_torch",
]
