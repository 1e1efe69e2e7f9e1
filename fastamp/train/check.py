"""Checks that a checkpoint fits a run: all of it, before anything of it is loaded.

Each function raises a ValueError that names the entry, and changes nothing.
"""

import numbers
from collections.abc import Callable
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map

from fastamp.metrics import MetricsTracker
from fastamp.step import GradScaler

ANY: Any = object()
"""Stands for an entry that `check` leaves to another check."""
_LARGEST = 2**63 - 1
# What torch's optimizers keep for each parameter: tensors of its shape, and a "step".
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_KEPT: dict[type, set[str]] = {AdamW: _ADAM, Adam: _ADAM, Adagrad: {"step", "sum"}, SGD: set()}
_MAY_KEEP = {"max_exp_avg_sq", "momentum_buffer"}


def check(saved: Any, like: Any, at: str) -> None:
    """Check that a tree has the keys, lengths, kinds, shapes and dtypes of another one.

    Numbers are finite and not negative, unless those of the other tree are not; None in the other
    tree also allows True and False.
    """
    if isinstance(like, dict):
        _expect(isinstance(saved, dict), "a dict", saved, at)
        for key in saved:
            if key not in like:
                msg = f"it has {at}[{short(key)}], which this run does not know"
                raise ValueError(msg)
        for key, value in like.items():
            if key not in saved:
                msg = f"it has no {at}[{key!r}]"
                raise ValueError(msg)
            check(saved[key], value, f"{at}[{key!r}]")
    elif isinstance(like, (list, tuple)):
        fine = type(saved) is type(like) and len(saved) == len(like)
        _expect(fine, f"a {type(like).__name__} of {len(like)}", saved, at)
        for i, (one, other) in enumerate(zip(saved, like, strict=True)):
            check(one, other, f"{at}[{i}]")
    elif like is not ANY:
        _check_leaf(saved, like, at)


def _check_leaf(saved: Any, like: Any, at: str) -> None:
    fine, expected = type(saved) is type(like), f"a {type(like).__name__}"
    if isinstance(like, Tensor):
        fine, expected = describe(saved) == describe(like), describe(like)
    elif like is None:
        fine, expected = saved is None or isinstance(saved, bool), "True, False or None"
    elif isinstance(like, (int, float)) and not isinstance(like, bool):
        in_bounds = fine or (type(saved) is int and isinstance(like, float))
        in_bounds = in_bounds and (saved >= 0 or like < 0) and abs(saved) <= _LARGEST
        fine = in_bounds or (fine and saved == like)  # an option may be infinite
        expected = f"{'an integer' if isinstance(like, int) else 'a number'} of at least 0"
    _expect(fine, expected, saved, at)


def check_equal(saved: Any, like: dict[str, Any], at: str, may_differ: set[str]) -> None:
    """Check that a dict of plain values is equal to another one."""
    _expect(isinstance(saved, dict), "a dict", saved, at)
    for name in {**like, **saved}:
        theirs, ours = saved.get(name), like.get(name)
        if name not in may_differ and (type(theirs) is not type(ours) or theirs != ours):
            msg = f"it has {name}={short(theirs)}, this run {short(ours)}"
            raise ValueError(msg)


def check_model(saved: Any, own: dict[str, Any], at: str = "['model']") -> None:
    """Check that a model's state has the tensors of another one, and the same other names.

    Extra states are the model's own business.
    """
    _expect(isinstance(saved, dict), "a dict", saved, at)
    theirs, ours = ({k: describe(v) for k, v in each.items()} for each in (saved, own))
    tensors = {k for each in (saved, own) for k, v in each.items() if isinstance(v, Tensor)}
    may_differ = {k for k, v in own.items() if is_lazy(v) and isinstance(saved.get(k), Tensor)}
    may_differ |= (
        {k for k in tensors if str(k).endswith("_extra_state")} & saved.keys() & own.keys()
    )
    check_equal(theirs, ours, at, (saved.keys() & own.keys()) - tensors | may_differ)


def check_optimizer(
    saved: Any, optimizer: Optimizer, n_with_state: int | None = None, place: str = "['optimizer']"
) -> None:
    """Check the options of every group, and the state of every parameter that has one.

    As with torch's own `load_state_dict`, a group may have more options than this optimizer's: of
    another version of torch, or of a scheduler that the run makes later.
    """
    check(saved, {"state": ANY, "param_groups": ANY}, place)
    groups, at = optimizer.state_dict()["param_groups"], f"{place}['param_groups']"
    is_torchs = type(optimizer).__module__.startswith("torch.")  # else they are its own business
    check(saved["param_groups"], [ANY] * len(groups), at)
    for i, (theirs, ours) in enumerate(zip(saved["param_groups"], groups, strict=True)):
        _expect(isinstance(theirs, dict), "a dict", theirs, f"{at}[{i}]")
        like = {k: v for k, v in tree_map(_widen, ours).items() if v is not None or k in theirs}
        like = like if is_torchs else dict.fromkeys(ours, ANY)
        like = dict.fromkeys(theirs, ANY) | like | {"params": ours["params"]}
        check(theirs, like, f"{at}[{i}]")
        fine = theirs["params"] == ours["params"]
        _expect(fine, short(ours["params"]), theirs["params"], f"{at}[{i}]['params']")
    kept, at = saved["state"], f"{place}['state']"
    fine = isinstance(kept, dict) and n_with_state in (None, len(kept))
    _expect(fine, f"a dict of n_with_state={n_with_state}", kept, at)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entries in kept.items():
        if type(index) is int or type(optimizer) in _KEPT:
            fine = type(index) is int and 0 <= index < len(parameters)
            _expect(fine, f"an index of {len(parameters)} parameters", index, f"{at}: a key")
            _expect(isinstance(entries, dict), "a dict", entries, f"{at}[{index}]")
        if type(optimizer) in _KEPT:
            names = _KEPT[type(optimizer)] | (_MAY_KEEP & entries.keys())
            _check_kept(entries, names, parameters[index], f"{at}[{index}]")


def _check_kept(entries: dict[str, Any], names: set[str], parameter: Tensor, at: str) -> None:
    """Check the names and shapes of what one of torch's optimizers keeps for a parameter.

    A lazy module's parameter has no shape until the model is restored, or called.
    """
    check(entries, dict.fromkeys(names, ANY), at)
    for name, value in entries.items():
        fine, expected = isinstance(value, Tensor), "a tensor"
        if name == "step" or not is_lazy(parameter):
            shape = torch.Size() if name == "step" else parameter.shape
            fine, expected = fine and value.shape == shape, f"a tensor of shape {[*shape]}"
        _expect(fine or (value is None and name in _MAY_KEEP), expected, value, f"{at}[{name!r}]")


def check_part(saved: Any, part: Any, at: str) -> None:
    """Check the state of one of a checkpoint's other parts, as far as its kind is known.

    A part with `check_state_dict(state)` checks it itself.
    """
    own_check = getattr(part, "check_state_dict", None)
    if own_check is not None:
        attempt(lambda: own_check(saved), at)
    elif isinstance(part, nn.Module):
        check_model(saved, part.state_dict(), at)
    elif isinstance(part, Optimizer):
        check_optimizer(saved, part, place=at)
    elif isinstance(part, MetricsTracker):
        attempt(lambda: MetricsTracker().load_state_dict(saved), at)
    elif isinstance(part, torch.amp.GradScaler):
        own = part.state_dict()
        check(saved, own | dict.fromkeys({"scale"} & own.keys(), ANY), at)
        if saved:  # this checks the scale, which may be as large as a float32
            attempt(lambda: GradScaler("cpu").load_state_dict(saved), at)
    elif isinstance(part, (LRScheduler, ReduceLROnPlateau)):
        _expect(isinstance(saved, dict), "a dict", saved, at)
        for name, ours in part.state_dict().items():
            if type(ours) in (int, float) and (name in saved or name == "last_epoch"):
                theirs = saved.get(name)
                _expect(type(theirs) in (int, float), "a number", theirs, f"{at}[{name!r}]")


def attempt(action: Callable[[], object], at: str) -> None:
    """Call a function that checks or loads an entry; make its error a ValueError that names it."""
    try:
        action()
    except Exception as error:  # the user's own classes can raise anything
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        msg = f"its {at} cannot be loaded: {kind}{error}"
        raise ValueError(msg) from error


def describe(value: Any) -> str:
    """Return a tensor's dtype and shape, a container's type and length, else the value."""
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if not isinstance(value, Tensor) or is_lazy(value):
        return short(value)
    layout = "" if value.layout is torch.strided else f" {value.layout}"
    return f"{value.dtype} {[*value.shape]}{layout}"


def _widen(value: Any) -> Any:
    """Return what `check` compares an option with: None for a flag, a float for every number."""
    if isinstance(value, bool):
        return None
    return float(value) if isinstance(value, numbers.Real) else value  # NumPy's are, too


def _expect(fine: bool, expected: str, value: Any, at: str) -> None:  # noqa: FBT001
    if not fine:
        msg = f"its {at} is {describe(value)}, expected {expected}"
        raise ValueError(msg)
