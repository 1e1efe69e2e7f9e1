"""The timer: regions measured with asynchronous events and one wait at the end."""

from fastamp.timer.timer import RegionStats, Timer

__all__ = ["RegionStats", "Timer"]
