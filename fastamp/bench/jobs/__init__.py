"""The built-in tasks: one function each, with the contract of users' tasks."""

from collections.abc import Callable
from typing import Any

from fastamp.bench.jobs.language import make_gpt, make_lora, make_small_gpt
from fastamp.bench.jobs.networks import make_mlp, make_rl
from fastamp.bench.jobs.vision import make_cnn, make_images

MAIN = "gpt"
JOBS: dict[str, Callable[[str, int], Any]] = {
    MAIN: make_gpt,
    "small-gpt": make_small_gpt,
    "mlp": make_mlp,
    "cnn": make_cnn,
    "lora": make_lora,
    "images": make_images,
    "rl": make_rl,
}


def describe(name: str) -> str:
    """Return what a built-in task trains, in a line."""
    return " ".join(str(JOBS[name].__doc__).split())
