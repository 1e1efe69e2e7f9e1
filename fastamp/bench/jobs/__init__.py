"""The built-in jobs: one function each, with the contract of users' tasks, and one row of JOBS."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fastamp.bench.jobs.language import make_gpt, make_lora
from fastamp.bench.jobs.networks import make_mlp, make_rl, make_tabular
from fastamp.bench.jobs.vision import make_cnn, make_groups, make_images


class JobRow(NamedTuple):
    """A job, and how many times as fast as the good loop of torch alone fastamp's should be."""

    make: Callable[[str, int], tuple[Any, ...]]
    on_cpu: float = 1.0
    on_cuda: float = 1.0

    def text(self) -> str:
        """Return what the job trains, in a line."""
        return " ".join(str(self.make.__doc__).split())


JOBS = {
    "gpt": JobRow(make_gpt),
    "mlp": JobRow(make_mlp, on_cpu=1.1),
    "tabular": JobRow(make_tabular, on_cpu=1.2),
    "cnn": JobRow(make_cnn),
    "lora": JobRow(make_lora),
    "groups": JobRow(make_groups, on_cuda=1.3),
    "images": JobRow(make_images),
    "rl": JobRow(make_rl, on_cpu=1.3),
}
