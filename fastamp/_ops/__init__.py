"""Which backend serves which tensor: the norm and the clip, ranks, and the handles of the core."""

from fastamp._ops.choose import (
    backend_for,
    backends,
    core,
    core_for,
    host_core,
    use_only,
    warn_of_fallback,
)
from fastamp._ops.grads import Grads
from fastamp._ops.private import has_step_hook, in_dispatch_mode, is_profiling, note_step, untraced
from fastamp._ops.sharded import hold, replicated
from fastamp._ops.torch_update import TorchBackend
from fastamp._ops.types import Clip, StepReport, Why, is_spread, local_of, moved, unread
