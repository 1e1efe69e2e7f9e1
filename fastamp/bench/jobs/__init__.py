"""The built-in jobs by name, each a `make(device, seed)` with the contract of users' tasks."""

from collections.abc import Callable
from typing import Any

from fastamp.bench.jobs.language import make_gpt, make_lora
from fastamp.bench.jobs.networks import make_mlp, make_rl, make_tabular
from fastamp.bench.jobs.vision import make_cnn, make_groups, make_images

JOBS: dict[str, Callable[[str, int], tuple[Any, ...]]] = {
    "gpt": make_gpt,
    "mlp": make_mlp,
    "tabular": make_tabular,
    "cnn": make_cnn,
    "lora": make_lora,
    "groups": make_groups,
    "images": make_images,
    "rl": make_rl,
}
