"""The timer: regions measured with asynchronous events and one wait at the end."""

from fastamp.timer.timer import RankStats, RegionStats, Timer

__all__ = ["RankStats", "RegionStats", "Timer"]
