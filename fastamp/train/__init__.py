"""Training: a model fine-tuned in one call, with checkpoints that resume exactly."""

from fastamp.train.adapter import Adapter, Outcome

__all__ = ["Adapter", "Outcome"]
