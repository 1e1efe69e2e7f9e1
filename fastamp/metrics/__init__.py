"""The tracker: scalars of a run in bounded memory, read without waiting for the device."""

from fastamp.metrics.series import ScalarStats
from fastamp.metrics.tracker import MetricsTracker

__all__ = ["MetricsTracker", "ScalarStats"]
