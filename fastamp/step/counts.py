"""Step counts that are on the host while a device updates: corrected before they are read.

torch keeps `state["step"]` of an optimizer that is not fused on the host. A native step adds 1
there without a wait; the device counts the steps that it skipped. Before `state_dict`,
`load_state_dict`, torch's own step, a copy or a pickle, the skipped steps are subtracted, which
waits for the device.
"""

import copyreg
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from fastamp._ops import Update

_watched: "WeakKeyDictionary[Optimizer, Update]" = WeakKeyDictionary()


def watch(optimizer: Optimizer, update: Update) -> None:
    """Register hooks that settle the counts of an optimizer, which `update` steps."""
    known = _watched.get(optimizer)
    if known is update:
        return
    _watched[optimizer] = update
    if known is not None:  # the hooks are registered
        return
    optimizer.register_state_dict_pre_hook(settle)
    optimizer.register_load_state_dict_pre_hook(settle)
    optimizer.register_step_pre_hook(settle)
    _watch_copies(type(optimizer))


@_disable_dynamo
def settle(optimizer: Optimizer, *_: Any) -> None:
    """Subtract the skipped steps; waits for the device if there may be any."""
    update = _watched.get(optimizer)
    if update is not None:
        update.settle(optimizer.state)


def others_in(*hooks: Mapping[int, Callable[..., Any]]) -> bool:
    """Say whether there is a hook that is not ours."""
    return any(hooks) and any(hook is not settle for some in hooks for hook in some.values())


def _watch_copies(cls: type[Optimizer]) -> None:
    """Settle before an optimizer of a class is copied or pickled."""
    before: Any = copyreg.dispatch_table.get(cls)
    if getattr(before, "__module__", None) == __name__:
        return

    def reduce(optimizer: Optimizer) -> Any:
        settle(optimizer)
        return before(optimizer) if before else optimizer.__reduce_ex__(2)

    copyreg.pickle(cls, reduce)
