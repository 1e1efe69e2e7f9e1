"""torch's Muon, a stack of matrices at a time: momentum, products of the stack, write.

Of matrices sharded by rows each rank multiplies some, which it gathers from all ranks.
"""

import math
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fastamp import _ops
from fastamp._ops.types import NO_GRADIENT, NO_STATE, Entry, Why, entries_of

RULE = "Muon"
MODULE = "torch.optim._muon"  # where the class is; its `__module__` says torch.optim
STATE = "momentum_buffer"
STATES = ((STATE, ""),), False, True  # as `rules` of the core
OPTIONS = {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps"}
OPTIONS |= {"adjust_lr_fn", "differentiable"}  # the last one is False: a loaded optimizer has it

# Bytes of a stack, which take about three times as much beside; on the CPU two products find them
# in the caches.
STACK = 64 << 20
CPU_STACK = 1 << 19


class Stack(NamedTuple):
    """Matrices of one group and one shape; all ranks that share them have the same stacks."""

    matrices: list[Entry]
    ranks: Any  # the process group that they are sharded over; None if each rank has all of them
    first: int  # how many matrices of these ranks are before: ranks multiply them in turn


class MuonBackend:
    """Steps of Muon on the device of the core's backend; see `Backend` in _native.pyi."""

    def __init__(self, core: Any) -> None:
        self.device, self._core = core.device, core

    def read(self, _update: object, *given: Any) -> list[Stack] | Why:
        """Find what a step reads and writes, in stacks, or say why it cannot be made here."""
        stacks: dict[Any, list[Entry]] = {}
        tensors = list[Tensor]()
        entries = entries_of(*given)
        for entry in entries:
            if why := _refusal(entry):
                return Why("torch", why)
            whole, ranks = entry.whole, None  # each rank has all of it, or some rows
            for dim, place in enumerate(getattr(whole, "placements", ())):
                ranks = ranks if place.is_replicate() else whole.device_mesh.get_group(dim)
            key = id(entry.group), ranks, whole.shape
            stacks.setdefault(key, []).append(entry)
            tensors += _tensors_of(entry)
        if self._core.pack(tensors).rest:
            return Why("torch", "a matrix's dtype, layout or device, or tensors share their memory")
        if any(entry.state.get(STATE) is None for entry in entries):
            return NO_STATE
        # Stacks of at most so many bytes, or of one matrix.
        cut, counts = list[Stack](), dict[Any, int]()
        most = CPU_STACK if self.device.type == "cpu" else STACK
        for (_, ranks, shape), matrices in stacks.items():
            size = 1 if ranks is None else ranks.size()
            count = max(1, most * size // (2 * math.prod(shape)))
            for i in range(0, len(matrices), count):
                cut.append(Stack(matrices[i : i + count], ranks, counts.get(ranks, 0)))
                counts[ranks] = cut[-1].first + len(cut[-1].matrices)
        return cut or NO_GRADIENT

    @torch.no_grad()
    def apply(
        self, read: list[Stack], factor: Tensor | None, found_inf: Tensor | None, drops: object
    ) -> None:
        """Multiply the gradients and update, unless `found_inf` is 1.0.

        On a device the core's kernels look at the flag, and the products are made in any case.
        """
        is_skipped = found_inf is not None and not self._core.is_apart and bool(found_inf.item())
        for matrices, ranks, first in () if is_skipped else read:
            group, param, whole, *_ = matrices[0]
            rows = param.new_empty((len(matrices), *param.shape), dtype=torch.bfloat16)
            directions = rows.unbind()
            states = {to: each.state for to, each in zip(directions, matrices, strict=True)}
            grads = [each.grad for each in matrices]
            momentum = {**group, "params": directions}
            self._pass("Muon, momentum", momentum, states, grads, (factor, found_inf, drops))
            products = group["ns_coefficients"], group["ns_steps"], group["eps"]
            if ranks is None:
                orthogonalize_(rows, *products)
            else:
                _orthogonalize_shared_(rows, len(whole), ranks, first, products)
            height, width = whole.shape
            ratio = math.sqrt(max(1, height / width))
            if group["adjust_lr_fn"] == "match_rms_adamw":
                ratio = 0.2 * math.sqrt(max(height, width))
            write = {**group, "lr_ratio": ratio, "params": [each.param for each in matrices]}
            self._pass("Muon, write", write, {}, [*directions], (None, found_inf, True))
        for matrix in (each for stack in read for each in stack.matrices if drops):
            matrix.param.grad = None

    def _pass(
        self, rule: str, group: dict[str, Any], states: Any, grads: list[Tensor], how: Any
    ) -> None:
        step = self._core.read(_ops.core().Update(rule), [group], states, grads)
        if isinstance(step, tuple):
            msg = f"Muon: {step[1]}"
            raise RuntimeError(msg)  # noqa: TRY004 - a reason, not a type
        self._core.apply(step, *how)


def _tensors_of(entry: Entry) -> list[Tensor]:
    """Return a matrix, its gradient and its momentum, if there is one."""
    buffer = entry.state.get(STATE)
    return [entry.param, entry.grad] + ([] if buffer is None else [buffer])


def _refusal(entry: Entry) -> str:
    """Say why a matrix is left to torch's step, which may raise its own error; "" if it is not."""
    group, param, whole, *_ = entry
    spread = [place for place in getattr(whole, "placements", ()) if not place.is_replicate()]
    if len(spread) > 1 or any(hasattr(p, "split_factor") or not p.is_shard(0) for p in spread):
        return "a matrix is sharded by more than its rows"
    tensors = _tensors_of(entry)  # of a sharded matrix this rank's rows
    is_unlike = any(t.layout is not torch.strided or t.shape != param.shape for t in tensors)
    is_unlike |= any(buffer.dtype != entry.grad.dtype for buffer in tensors[2:])
    if is_unlike or whole.dim() != 2 or whole.numel() == 0:
        return "a matrix is empty, or its gradient or momentum of another kind"
    if any(not each.is_contiguous() or each.is_neg() for each in tensors):
        return "a matrix, gradient or momentum is not contiguous"
    is_known = group["adjust_lr_fn"] in {None, "original", "match_rms_adamw"}
    if not is_known or len(group["ns_coefficients"]) != 3 or group["ns_steps"] >= 100:
        return "adjust_lr_fn, ns_coefficients or ns_steps"
    return ""


def orthogonalize_(
    stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> None:
    """Orthogonalize bfloat16 matrices [matrices, rows, columns] in place.

    Each gets the operations of torch's Muon: Newton-Schulz `steps` with a polynomial, after it was
    divided by its norm, or by `eps`.
    """
    a, b, c = coefficients
    wide = stack.mT if stack.size(1) > stack.size(2) else stack
    norms = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True)
    result = wide.div_(norms.clamp(min=eps))
    for _ in range(steps):
        gram = torch.bmm(result, result.mT)
        # torch's baddbmm ignores `beta` where alpha is 0, as in the cubic polynomial.
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) if c else gram * b
        result = torch.baddbmm(result, gram, result, beta=a)
    wide.copy_(result)


def _orthogonalize_shared_(
    rows: Tensor, height: int, ranks: Any, first: int, products: Any
) -> None:
    """Orthogonalize matrices of so many rows, of which each rank holds some; all have to call it.

    Each rank multiplies every `ranks.size()`-th matrix, counted from the `first` one's number.
    """
    size, me = ranks.size(), ranks.rank()
    owned = [range((rank - first) % size, len(rows), size) for rank in range(size)]
    order = [matrix for some in owned for matrix in some]
    step = -(-height // size)  # DTensor's rows, as torch.chunk has them
    heights = [max(0, min(step, height - rank * step)) for rank in range(size)]
    count, columns = len(owned[me]), rows.size(2)
    sent = [len(some) * heights[me] * columns for some in owned]
    received = [count * each * columns for each in heights]
    given = rows[order]
    pieces = rows.new_empty(sum(received))
    _exchange(pieces, received, given, sent, ranks)
    parts = zip(torch.split(pieces, received), heights, strict=True)
    stack = torch.cat([part.view(count, each, columns) for part, each in parts], 1)
    if count:
        orthogonalize_(stack, *products)
    pieces = torch.cat([part.flatten() for part in torch.split(stack, heights, 1)])
    _exchange(given, sent, pieces, received, ranks)
    rows[order] = given


def _exchange(to: Tensor, received: list[int], values: Tensor, sent: list[int], ranks: Any) -> None:
    to, values = to.view(-1).view(torch.uint8), values.view(-1).view(torch.uint8)  # gloo: no bf16
    dist.all_to_all_single(to, values, [2 * n for n in received], [2 * n for n in sent], ranks)


_compared: "WeakSet[Optimizer]" = WeakSet()


@torch.no_grad()
def compare_ranks(optimizer: Optimizer, why: Why | None) -> None:
    """Raise an error on all ranks unless they make Muon's first step of their DTensors alike.

    Later a rank that lacks a gradient is waited for, as with torch.
    """
    if optimizer in _compared or not isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        return
    _compared.add(optimizer)
    given = [p for group in optimizer.param_groups for p in group["params"]]
    params: list[Any] = [p for p in given if _ops.is_spread(p)]
    agree = True
    for mesh in dict.fromkeys(p.device_mesh for p in params):
        answer = hash((why is None, *(p.grad is None for p in params if p.device_mesh == mesh)))
        most = torch.tensor([answer, -answer], device=mesh.device_type)
        for ranks in mesh.get_all_groups():
            dist.all_reduce(most, dist.ReduceOp.MAX, ranks)
        agree = agree and bool(most[0] == -most[1])
    if not agree:
        msg = "Muon's sharded matrices need the same step hooks, and gradients of the same "
        msg += "matrices, on all ranks" + ("" if why is None else f"; here torch steps: {why.text}")
        raise RuntimeError(msg)
