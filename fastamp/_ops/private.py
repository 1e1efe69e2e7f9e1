"""Every private name of torch that fastamp reads, with the reason, and what happens without it.

Names that a GradScaler overrides, as torch's own subclasses do, stand in `step/scaler.py`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as of_all

C = TypeVar("C", bound=Callable[..., Any])


def untraced(function: C) -> C:
    """Have torch.compile break its graph once where a function is called, and not trace it.

    Without the name `torch.compiler.disable` does it, which takes a second to import.
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
    """Say whether hooks run around an optimizer's step; without the names they do."""
    get = attributes.get
    own = get("_optimizer_step_pre_hooks", True) or get("_optimizer_step_post_hooks", True)
    return bool(own or _BEFORE_STEPS or _AFTER_STEPS)


def note_step(optimizer: Optimizer) -> None:
    """Note that a step was made, as torch's schedulers do, or they would warn of none."""
    if "step" in vars(optimizer):
        optimizer._opt_called = True  # type: ignore[attr-defined]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the shard of a DTensor, or any other tensor: `to_local` would make a view."""
    return getattr(tensor, "_local_tensor", tensor)


def norms_of(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the norm of each tensor, computed in a wider dtype: a launch for many on a GPU."""
    return torch.stack(torch._foreach_norm(tensors, 2.0, dtype=dtype))


# Says whether a TorchDispatchMode is on, which sees torch's operators only, so that torch steps.
# Without the name modes are not noticed.
in_dispatch_mode: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)

# Says whether torch's profiler is on. Without the name there are no ranges for it.
is_profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", bool)


# Hooks for all optimizers; without the names an optimizer counts as hooked.
_BEFORE_STEPS = getattr(of_all, "_global_optimizer_pre_hooks", True)
_AFTER_STEPS = getattr(of_all, "_global_optimizer_post_hooks", True)
