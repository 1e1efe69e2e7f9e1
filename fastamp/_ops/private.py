"""Every private name of torch that fastamp reads, with the reason, and what happens without it.

Names that a GradScaler overrides, as torch's own subclasses do, stand in `step/scaler.py`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

C = TypeVar("C", bound=Callable[..., Any])


def untraced(function: C) -> C:
    """Have torch.compile break its graph once where a function is called, and not trace it.

    `torch.compiler.disable` does the same, but imports dynamo, which takes a second, and adds a
    frame to every call. It is used where the name is gone.
    """
    try:
        hooks: Any = torch._C._dynamo.eval_frame
        skip = hooks._FrameAction.SKIP
        hooks.set_code_exec_strategy(function.__code__, hooks._FrameExecStrategy(skip, skip))
    except AttributeError:
        return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def has_step_hook(attributes: dict[str, Any]) -> bool:
    """Say whether hooks run around an optimizer's step, from its attributes: torch then steps.

    Without the names an optimizer counts as hooked, and torch makes all steps.
    """
    return bool(
        _BEFORE_STEPS
        or _AFTER_STEPS
        or attributes.get("_optimizer_step_pre_hooks", True)
        or attributes.get("_optimizer_step_post_hooks", True)
    )


def note_step(optimizer: Optimizer) -> None:
    """Note that a step was made, as the wrapper of torch's schedulers around `step` does.

    A scheduler warns if it steps before its optimizer. Without the name it would warn.
    """
    if "step" in vars(optimizer):
        optimizer._opt_called = True  # type: ignore[attr-defined]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the shard of a DTensor, or any other tensor itself.

    `to_local` makes a view of a parameter's, and takes five times as long.
    """
    return getattr(tensor, "_local_tensor", tensor)


def norms_of(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the norm of each tensor, computed in a wider dtype: a launch for many on a GPU."""
    return torch.stack(torch._foreach_norm(tensors, 2.0, dtype=dtype))


# Says whether a TorchDispatchMode is on, as allow_mutation_on_saved_tensors or FakeTensorMode: it
# sees torch's operators only, so torch steps. Without the name modes are not noticed.
in_dispatch_mode: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)

# Says whether torch's profiler is on, for which a step opens a range of its name. Without the name
# there is no range.
is_profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", bool)


def _hooks_of(register: Callable[..., Any]) -> Any:
    """Return the dict that hooks for all optimizers are registered in."""
    handle = register(lambda *_: None)
    handle.remove()
    return handle.hooks_dict_ref()


_BEFORE_STEPS = _hooks_of(register_optimizer_step_pre_hook)
_AFTER_STEPS = _hooks_of(register_optimizer_step_post_hook)
