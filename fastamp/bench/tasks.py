"""What the bench trains: a model, its data and its loss, made by a function of the user's or ours.

A function that breaks the contract raises a BrokenTask, which names the part.
"""

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

import fastamp
from fastamp.bench.jobs import JOBS
from fastamp.bench.options import refuse
from fastamp.data.structure import map_tensors
from fastamp.step.native import parameters_of
from fastamp.train.model_call import ModelCall
from fastamp.train.optimizer import make_optimizer as make_by_name
from fastamp.train.random_state import seed_all

OPTIONS = {"optimizer", "evaluate", "batch_size", "max_norm"}
Make: TypeAlias = Callable[[str, int], Any]

EXAMPLE = """\
import torch
from torch import nn

def make(device, seed):  # all generators are seeded already
    x, y = torch.randn(4096, 64), torch.randint(10, (4096,))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    data = torch.utils.data.TensorDataset(x, y)  # what a DataLoader takes, or a loader
    def evaluate(model):  # called without gradients, in the arm's precision; higher is better
        return (model(x.to(device)).argmax(1) == y.to(device)).float().mean()
    options = {  # all of them may be left out, and so may the dict
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "evaluate": evaluate, "batch_size": 128, "max_norm": 1.0,
    }
    return model, data, nn.functional.cross_entropy, options
"""
CONTRACT = """\
A task is a function make(device, seed) that returns (model, dataset, loss) or (model, dataset,
loss, options). A batch that is a pair is used as loss(model(x), y), a dict as model(**batch). With
a loss of None the model's own loss is taken, as in fastamp.fine_tune. Every arm calls make itself,
and shares nothing with the others. A DataLoader is torch's arm as it is; in fastamp's arm a
fastamp.DataLoader takes its dataset, sampler and workers. An arm of your own is another such
function: --arm compiled=task.py:compiled.

For example:
"""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The parts of a task."""

    model: nn.Module  # with the weights that every arm starts from
    data: Any  # a dataset for a DataLoader, or a loader: any other iterable of batches
    loss: Callable[[Tensor, Any], Tensor] | None
    optimizer: Callable[[nn.Module], Any] | None = None  # None is AdamW with a rate of 1e-3
    # Returns the accuracy, higher is better: a number, or a list of one for each part of the data,
    # which gives an interval; or a dict with "accuracy", the validation "loss", or both.
    evaluate: Callable[[nn.Module], Any] | None = None
    batch_size: int = 32  # of a dataset
    max_norm: float | None = None  # None does not clip

    @property
    def has_loader(self) -> bool:
        """Say whether the data are batches already, rather than what a DataLoader takes."""
        is_dataset = isinstance(self.data, Dataset) or hasattr(self.data, "__getitem__")
        return isinstance(self.data, DataLoader) or not is_dataset


class BrokenTask(Exception):  # noqa: N818 - what is broken is the task
    """The task breaks its contract: one line that names the part, and a traceback."""

    def __init__(self, line: str, trace: str = "") -> None:
        super().__init__(line, trace)  # so that it can be pickled
        self.line, self.trace = line, trace

    def __str__(self) -> str:
        return self.line


class Part(AbstractContextManager[Any]):
    """A part of the contract: a context in which every error becomes a BrokenTask."""

    def __init__(self, name: str, when: str) -> None:
        self.name, self.when = name, when

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if not isinstance(error, (Exception, SystemExit)) or isinstance(error, BrokenTask):
            return
        said = next(iter(str(error).strip().splitlines()), "")
        line = f"{self.name}: {self.when} raised {type(error).__name__}: {said}"
        is_full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if self.name != "make" and (is_full or "can't allocate memory" in said):
            line = f"batch_size: a step does not fit into memory; {line}"
        raise BrokenTask(line, "".join(traceback.format_exception(error))) from None


def expect(is_met: bool, part: str, wanted: str, got: object) -> None:  # noqa: FBT001
    """Raise a BrokenTask that names a part of the contract, unless it is met."""
    if not is_met:
        msg = f"{part}: expected {wanted}, got {got}"
        raise BrokenTask(msg)


@cache  # a file is imported once
def find_make(text: str, option: str = "task") -> Make:
    """Return the function of FILE.py, FILE.py:NAME, package.module:NAME or a built-in job.

    A file is imported as Python runs a script: it can import what lies beside it. A worker finds it
    by its name, too, so its classes can be pickled.

    Raises:
        argparse.ArgumentError: there is no such file, function or job; it names the `option`.
        BrokenTask: the file or the module cannot be imported.
    """
    if text in JOBS:
        return JOBS[text]
    place, _, name = (f"{text}:make" if text.endswith(".py") else text).rpartition(":")
    path, is_file = Path(place).absolute(), place.endswith(".py")
    if not place or (is_file and not path.is_file()):
        known = f"or one of {', '.join(JOBS)}"
        refuse(text, f"is no file: expected FILE.py, FILE.py:make, {known}", option)
    if is_file and str(path.parent) != sys.path[0]:
        sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()  # the file may be new
    with Part(path.name, "its import"):
        module = importlib.import_module(path.stem if is_file else place)
    if is_file and path.resolve() != Path(getattr(module, "__file__", None) or "").resolve():
        refuse(text, f"cannot be imported: another module is called {path.stem!r}", option)
    found = getattr(module, name, None)
    if not callable(found):
        refuse(text, f"has no function {name!r}", option)
    return found  # type: ignore[no-any-return]


def with_absolute_path(text: str) -> str:
    """Return the name of a task whose file, if it is in one, is found from every folder."""
    place, colon, name = (text, "", "") if text.endswith(".py") else text.rpartition(":")
    return f"{Path(place).absolute()}{colon}{name}" if place.endswith(".py") else text


def make_training(make: Make, device: str, seed: int, batch_size: int | None = None) -> Training:
    """Call a task's function, and check what it returns; `batch_size` replaces the task's own."""
    seed_all(seed, 0)
    with Part("make", f"make({device!r}, {seed})"):
        made = make(device, seed)
    kinds = "(model, dataset, loss) or (model, dataset, loss, options)"
    got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
    expect(got in {"a tuple of 3", "a tuple of 4"}, "make", kinds, got)
    model, data, loss, *rest = made
    expect(isinstance(model, nn.Module), "model", "an nn.Module", type(model).__name__)
    own = {} if batch_size is None else {"batch_size": batch_size}
    with Part("options", "the dict of them"):
        options = {**rest[0], **own} if rest else own
        expect(options.keys() <= OPTIONS, "options", f"some of {sorted(OPTIONS)}", [*options])
        training = Training(model=model, data=data, loss=loss, **options)
    is_ours = not (own and training.has_loader)
    expect(is_ours, "--batch-size", "a dataset: the task has a loader of its own", "one")
    return training


def make_optimizers(training: Training) -> list[Optimizer]:
    """Return the task's optimizers, or AdamW, fused where torch can."""
    make = training.optimizer or partial(make_by_name, kind="adamw", lr=1e-3)
    with Part("options['optimizer']", "its call"):
        made: Any = make(training.model)
        optimizers = [*made] if isinstance(made, (list, tuple)) else [made]
        stepped = {*map(id, parameters_of(optimizers))}
        is_own = not stepped.isdisjoint(map(id, training.model.parameters()))
    kind = "optimizers of parameters of the model that it is called with"
    expect(is_own, "options['optimizer']", kind, "others")
    return optimizers


_MODEL = Part("model", "its call on a batch")
_LOSS = Part("loss", "its computation")


def compute_loss(training: Training, model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a model on a batch, which is on its device: 0-dim, in float32."""
    call = ModelCall(training.loss)
    with _MODEL:
        inputs, target = call.split(batch)
        output = call.forward(model, inputs)
    with _LOSS:
        return call.loss(output, target)


def make_loader(
    training: Training, seed: int, *, device: str, is_ours: bool = False
) -> Iterable[Any]:
    """Return the task's loader, or torch's as in a good script; or fastamp's in its place.

    A dataset of ours may name another one, `by_torch`, that torch's loader reads.
    """
    data = training.data
    if training.has_loader:
        return with_fastamp(data, device) if is_ours else data
    data = data if is_ours else getattr(data, "by_torch", data)
    options: dict[str, Any] = {"pin_memory": device == "cuda"}
    with Part("dataset", "DataLoader"):
        if not isinstance(data, IterableDataset):
            options |= {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}
            # All timed steps are on batches of one size, unless there are too few samples.
            options["drop_last"] = len(data) >= training.batch_size
        loader = DataLoader(data, training.batch_size, **options)
        return with_fastamp(loader, device) if is_ours else loader


# The arguments that fastamp's loader takes over from torch's.
TAKEN = "batch_size num_workers collate_fn pin_memory drop_last timeout worker_init_fn generator"
TAKEN += " multiprocessing_context prefetch_factor persistent_workers pin_memory_device in_order"


def with_fastamp(loader: Any, device: str) -> Iterable[Any]:
    """Return fastamp's loader of the same dataset, order and workers; of other batches prefetch."""
    if isinstance(loader, fastamp.DataLoader):
        return loader
    if type(loader) is not DataLoader:
        return loader if device == "cpu" else fastamp.prefetch(loader, device)
    options = {name: getattr(loader, name) for name in TAKEN.split()}
    if not isinstance(loader.dataset, IterableDataset):
        options["sampler"] = loader.sampler
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        options |= {"batch_sampler": loader.batch_sampler, "sampler": None}
        options |= {"batch_size": 1, "drop_last": False}  # torch's None is no argument there
    return fastamp.DataLoader(loader.dataset, device=device, **options)


def draw(loader: Iterable[Any], device: str) -> Iterator[Any]:
    """Yield the batches on the device, pass after pass, without end."""
    move = partial(map_tensors, partial(Tensor.to, device=device, non_blocking=True))
    with Part("dataset", "its next batch"):
        while True:
            batch = nothing = object()
            for batch in loader:
                yield move(batch)
            expect(batch is not nothing, "dataset", "a batch in every pass", "none")
