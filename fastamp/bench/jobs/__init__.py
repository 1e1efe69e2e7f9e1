"""The built-in jobs by name, each a `make(device, seed)` with the contract of users' tasks."""

from collections.abc import Callable
from typing import Any

from fastamp.bench.jobs.language import make_gpt

JOBS: dict[str, Callable[[str, int], tuple[Any, ...]]] = {"gpt": make_gpt}
