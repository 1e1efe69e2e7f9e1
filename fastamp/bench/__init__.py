"""The benchmark: ``python -m fastamp.bench``, and `compare` for a program of one's own."""

from fastamp.bench.comparison import Comparison, Ratio, compare

__all__ = ["Comparison", "Ratio", "compare"]
