"""Arms of one's own: each is another arm, that of --against, with one change.

A change is a function of the model, or a dict that replaces options of the task. What it returns is
checked as far as is possible before anything is timed; every error names the arm.
"""

import argparse
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

from fastamp.bench.environment import DTYPES
from fastamp.bench.tasks import (
    BrokenTask,
    Part,
    Training,
    check_options,
    expect,
    find_make,
    make_optimizers,
    read_data,
    short,
    with_absolute_path,
)

Change: TypeAlias = Callable[[nn.Module], Any] | Mapping[str, Any]

REPLACED = ("optimizer", "dtype", "batch_size", "accumulate")  # options of the task
PRECISIONS = ("fp32", "lean", *DTYPES)
KEYS = (*REPLACED, "loader", "precision", "other_samples")
NAME = r"[A-Za-z0-9_.+-]+"  # what --fail-on can tell from a bound
TAKEN = ("fp32", "fp32-strict", "fp32-tf32", "lean", "amp", "amp+fastamp", "fp32+fastamp")
RTOL, ATOL = 0.01, 1e-5  # of weights in another dtype: bfloat16 rounds by 0.004 of them


def read(text: str) -> tuple[str, str]:
    """Return the name of an arm and FILE:function, "" for a built-in one; for argparse."""
    name, is_own, place = text.partition("=")
    if not is_own and name not in BUILT_IN:
        message = f"{text!r} is neither NAME=FILE.py:function nor one of {', '.join(BUILT_IN)}"
        raise argparse.ArgumentTypeError(message)
    if not re.fullmatch(NAME, name) or name in TAKEN or (is_own and ":" not in place):
        message = f"{text!r} is not NAME=FILE.py:function, with a name of its own"
        raise argparse.ArgumentTypeError(message)
    return name, with_absolute_path(place)


def find(training: Training, added: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Return the changes of a task's own arms and of --arm, by the name of their arm."""
    given: Mapping[Any, Any] = training.arms
    for name, change in given.items():
        fits = isinstance(name, str) and bool(re.fullmatch(NAME, name)) and name not in TAKEN
        wanted = f"names of letters and digits, none of {', '.join(TAKEN)}"
        expect(fits, "options['arms']", wanted, repr(name))
        _check(name, change)
    changes = dict(training.arms)
    for name, place in added:
        expect(name not in changes, f"arms[{name!r}]", "one change", "two")
        try:
            changes[name] = find_make(place) if place else BUILT_IN[name]
        except argparse.ArgumentError as error:
            msg = f"arms[{name!r}]: {error.message.removeprefix('argument task: ')}"
            raise BrokenTask(msg) from None
    return changes


def _check(name: str, change: Any) -> None:
    part = f"arms[{name!r}]"
    is_dict = isinstance(change, Mapping)
    expect(is_dict or callable(change), part, "a function of the model or a dict", short(change))
    if not is_dict:
        return
    for key in change:
        expect(key in KEYS, part, f"some of {', '.join(KEYS)}", repr(key))
    expect(bool({*change} - {"other_samples"}), part, f"some of {', '.join(KEYS)}", "none")
    expect(not {"dtype", "precision"} <= {*change}, part, "dtype or precision", "both")
    check_options({key: change[key] for key in REPLACED if key in change}, part, REPLACED)
    if "precision" in change:
        value, wanted = change["precision"], f"one of {', '.join(PRECISIONS)}"
        expect(value in PRECISIONS, f"{part}['precision']", wanted, short(value))


@contextmanager
def named(name: str) -> Iterator[None]:
    """Let every BrokenTask name an arm of one's own; "" is another arm."""
    try:
        yield
    except BrokenTask as error:
        msg = f"arms[{name!r}]: {error.line}" if name else error.line
        raise BrokenTask(msg, error.trace) from None


def is_built_in(name: str, training: Training) -> bool:
    """Say whether an arm is one of ours, not one of the task's that is called like it."""
    return name in training.arms and training.arms[name] is BUILT_IN.get(name)


def apply(name: str, training: Training) -> tuple[Training, str | None]:
    """Return the task of an arm, and the precision that it names; its model is on the device."""
    change = training.arms.get(name)
    if is_built_in(name, training):
        change = BUILT_IN[name](training)
    if change is None:
        return training, None
    if not isinstance(change, Mapping):
        return replace(training, model=_change_model(training.model, change)), None
    precision = change.get("precision")
    if "dtype" in change:
        names = {dtype: key for key, dtype in DTYPES.items()} | {None: "fp32"}
        precision = names[change["dtype"]]
    changed = replace(training, **{key: change[key] for key in REPLACED if key in change})
    if "loader" in change:
        changed = replace(changed, data=read_data(change["loader"]))
        workers = {getattr(each.data, "num_workers", 0) for each in (training, changed)}
        wanted = "loaders without workers, which would work while other arms train"
        expect(workers == {0}, "loader", wanted, f"{max(workers)} workers")
        if not change.get("other_samples"):
            counts = [_count_samples(each.data) for each in (training, changed)]
            wanted = f"the {counts[0]} samples of the task in an epoch, or other_samples=True"
            expect(None in counts or counts[0] == counts[1], "loader", wanted, str(counts[1]))
    expect(
        not (changed.has_loader and "batch_size" in change), "batch_size", "a dataset", "a loader"
    )
    return changed, precision


def _change_model(model: nn.Module, change: Callable[[nn.Module], Any]) -> nn.Module:
    """Return the changed model; it has the very parameters of the model, and trains the same ones.

    Global switches, which would change all arms, are as they were.
    """
    own = [*model.parameters()]
    trained, switches = [p.requires_grad for p in own], _switches()
    values = [p.detach().clone() for p in own]
    with Part("the change", "its call on the model"):
        changed: Any = change(model)
    expect(isinstance(changed, nn.Module), "the change", "the changed model", short(changed))
    for name, value in _switches().items():
        expect(value == switches[name], "the change", f"{name} as it was, for all arms", str(value))
    with Part("the change", "the look at its parameters"):
        now = {*map(id, changed.parameters())}
        same = now == {*map(id, own)} and trained == [p.requires_grad for p in own]
        pairs = zip(own, values, strict=True)
        same = same and all(torch.allclose(p.float(), v.float(), RTOL, ATOL) for p, v in pairs)
    wanted = (
        "the parameters of the model that it is given, as they are: no other, new or frozen ones"
    )
    expect(same, "the change", wanted, "others")
    return changed  # type: ignore[no-any-return]


def _switches() -> dict[str, object]:
    cudnn: Any = torch.backends.cudnn
    return {
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn.benchmark": cudnn.benchmark,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _count_samples(data: Any) -> int | None:
    """Return the samples of an epoch; None where only reading them would tell."""
    if isinstance(data, DataLoader):
        sized: Any = data.dataset if data.batch_sampler is None else data.sampler
    else:
        sized = data if isinstance(data, Dataset) or hasattr(data, "__getitem__") else None
    return len(sized) if hasattr(sized, "__len__") else None


def _compile(_: Training) -> Change:
    return torch.compile


def _muon(training: Training) -> Change:
    """Return torch's Muon for the matrices of hidden layers, the task's AdamW for the rest."""
    has_muon = hasattr(torch.optim, "Muon")
    expect(has_muon, "torch", "2.9 or later, which has Muon", torch.__version__)
    return {"optimizer": partial(_split, training)}


def _split(training: Training, model: nn.Module) -> list[Optimizer]:
    """Take the weights of all Linear modules but the last, the head, from AdamW's groups."""
    embedded = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    weights = [each.weight for each in model.modules() if isinstance(each, nn.Linear)][:-1]
    hidden = {id(weight) for weight in weights if weight.requires_grad} - embedded
    expect(bool(hidden), "the model", "matrices of hidden layers, for Muon", "none")
    matrices, optimizers = [], []
    for optimizer in make_optimizers(training, model):
        kind: Any = type(optimizer)
        expect(kind in {Adam, AdamW}, "the optimizer", "AdamW, whose rate Muon's is", str(kind))
        groups = []
        for group in optimizer.param_groups:
            of_muon, rest = (
                [p for p in group["params"] if (id(p) in hidden) is wanted]
                for wanted in (True, False)
            )
            taken = {key: group[key] for key in ("lr", "weight_decay")}
            matrices += [{"params": of_muon, **taken}] if of_muon else []
            groups += [{**group, "params": rest}] if rest else []
        optimizers += [kind(groups)] if groups else []
    muon: Any = torch.optim.Muon
    return [muon(matrices, adjust_lr_fn="match_rms_adamw"), *optimizers]


def _fp8(_: Training) -> Change:
    """Return torchao's conversion of Linear modules, where a GPU has the units for it."""
    has_units = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    expect(has_units, "the device", "a GPU with fp8 units, of compute capability 8.9", "none")
    with Part("fp8", "the import of torchao"):
        convert: Any = importlib.import_module("torchao.float8").convert_to_float8_training
    return convert  # type: ignore[no-any-return]


BUILT_IN: dict[str, Callable[[Training], Change]] = {
    "compiled": _compile,
    "muon": _muon,
    "fp8": _fp8,
}
