"""The step alone: torch's norm, clip and optimizer step against fastamp's, on drawn gradients.

Takes a few minutes on two CPU cores; gpt2 needs 8 GB of memory.
"""

import argparse
import math
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

import fastamp
from fastamp.bench.race import AGAIN, Plan
from fastamp.bench.record import PLAIN, Case, Details, Report, Task, run_cases
from fastamp.train.options import number

Sizes: TypeAlias = list[tuple[int, ...]]

_BLOCK = [(768,)] * 6 + [(2304, 768), (2304,), (768, 768), (3072, 768), (3072,), (768, 3072)]
GPT2: Sizes = [(50257, 768), (1024, 768), *_BLOCK * 12, (768,), (768,)]
SHAPES = "gpt2,192x130208,2000x1000"
SHARDED_SHAPES = "4x2000000,192x50000,1000x1000"  # torch needs long for the first step of DTensors
MAX_NORM = 1.0  # less than the norm of what is drawn: every step clips
RATE = 1e-4
PLAN = Plan(rounds=2000, half_width=0.01, limit_s=8.0)
RANKS_PLAN = Plan(rounds=44)  # on all ranks, whatever their clocks say


def _adamw(start: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return start * (1 - RATE * 0.01) - RATE * grad / (grad.abs() + 1e-8), 0.1 * grad


def _sgd(start: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return start - RATE * grad, grad


class Work(NamedTuple):
    """What is timed, and how often it has to move as much memory as the gradients hold."""

    text: str
    reads: int
    updates: int  # reads and writes
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    moment: str = ""  # a key of the optimizer's state
    first_step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """The parameter and the moment after the first step, from the parameter and its gradient."""


SGD = partial(torch.optim.SGD, lr=RATE, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=RATE, fused=True)
WORK = {
    "norm": Work("the norm of the gradients", 1, 0, SGD),
    "clip": Work("unscale and clip in place", 1, 1, SGD),
    "adamw": Work("the whole step with fused AdamW", 2, 3, ADAMW, "exp_avg", _adamw),
    "sgd": Work("the whole step with SGD and momentum", 2, 2, SGD, "momentum_buffer", _sgd),
}


def _parse_shapes(text: str) -> dict[str, Sizes]:
    shapes: dict[str, Sizes] = {}
    for item in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", item)
        if match is None and item != "gpt2":
            message = f"{item!r} is not a number of tensors and of elements, as in 2000x1000"
            raise argparse.ArgumentTypeError(message)
        shapes[item] = [(int(match[2]),)] * int(match[1]) if match else GPT2
    return shapes


METRICS = "speedup/ or of_plain/, the shape and the work, as in speedup/gpt2/adamw"


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    shapes = "gpt2 (124 M in 148 tensors), or tensors and elements of each, separated by commas "
    shapes += f"(default: {SHAPES}; with --ranks {SHARDED_SHAPES})"
    add("--shapes", type=_parse_shapes, metavar="LIST", help=shapes)
    work = ", ".join(f"{name} ({each.text})" for name, each in WORK.items())
    work += "; several may be given (default: all; with --ranks adamw)"
    add("--work", nargs="+", choices=WORK, metavar="NAME", help=work)
    ranks = "of processes that share the tensors as DTensor shards, on the CPU over gloo"
    add("--ranks", type=number(int, 2), metavar="N", help=ranks)


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and what does it."""
    args.shapes = args.shapes or _parse_shapes(SHARDED_SHAPES if args.ranks else SHAPES)
    args.work = args.work or (["adamw"] if args.ranks else list(WORK))
    job = {"shapes": list(args.shapes), "work": args.work, "seed": args.seed}
    if args.ranks is None:
        return job, partial(_run, args)
    from fastamp.bench import local_ranks  # noqa: PLC0415 - it needs torch.distributed

    args.device = "cpu"
    run = partial(local_ranks.run_on_ranks, args.ranks, _run, args)
    return job | {"ranks": args.ranks}, run


def _run(args: argparse.Namespace) -> Report:
    """Race all work on all shapes, in this process or on each rank."""
    names = [f"{shape}/{work}" for shape in args.shapes for work in args.work]
    notes = ["torch: unscale_, clip_grad_norm_, step and update; bare: the optimizer's step alone"]
    if args.ranks:
        notes += ["DTensor shards; collectives of one step"]
    else:
        plain = "sum() and mul_() over the bytes that the work has to move"
        notes += [f"plain: {plain}; no limit: it can be beaten; GB/s: those bytes over the time"]
    plan = RANKS_PLAN if args.ranks else PLAN
    return run_cases(args, plan, names, partial(_make_case, args), notes)


def _make_case(args: argparse.Namespace, name: str) -> Case:
    """Return a race of both sides, after a check of both against plain float64 arithmetic."""
    shape, work = name.split("/")
    generator = torch.Generator(args.device).manual_seed(args.seed)
    draw = partial(torch.randn, device=args.device, generator=generator)
    grads = [draw(size) for size in args.shapes[shape]]
    norm = math.sqrt(math.fsum(grad.double().square().sum().item() for grad in grads))
    if args.ranks:
        from fastamp.bench import local_ranks  # noqa: PLC0415 - see prepare

        grads = local_ranks.shard(grads)
    theirs, ours = Side(WORK[work], grads), Side(WORK[work], grads)
    theirs.check(theirs.torch, norm, rtol=1e-3)  # its float32 norm is off in the fourth digit
    ours.check(ours.fastamp, norm, rtol=1e-5)
    arms: dict[str, Callable[[], object]] = {"torch": theirs.torch, AGAIN: theirs.torch}
    restore: dict[str, Callable[[], object]] = {"fastamp": ours.restore}
    amounts: dict[str, float] = {}
    details: Details = {}
    if args.ranks:
        count = local_ranks.count_collectives
        both = {**arms, "fastamp": ours.fastamp}
        details = {arm: {"collectives": count(call)} for arm, call in both.items()}
    else:
        if ours.work.moment:
            arms["bare"] = theirs.optimizer.step
        arms[PLAIN], restore[PLAIN], nbytes = _make_plain(ours)
        amounts = {"GB/s": nbytes / 1e9}
    return Case(
        arms=arms | {"fastamp": ours.fastamp},
        before=lambda arm: restore.get(arm, theirs.restore)(),
        amounts=amounts,
        details=lambda _: details,
    )


def _make_plain(side: "Side") -> tuple[Callable[[], object], Callable[[], object], int]:
    """Return passes over as many bytes as the work has to move at least, and their number."""
    reads, updates = side.work.reads, side.work.updates
    numel = sum(grad.numel() for grad in side.drawn)
    tensors = [torch.ones(numel, device=side.drawn[0].device) for _ in range(max(updates, 1))]

    def move() -> None:
        for _ in range(reads):
            tensors[0].sum()
        for tensor in tensors[:updates]:
            tensor.mul_(1.0)

    # The first tensor is left in the cache, as restored gradients are.
    return move, partial(tensors[0].fill_, 1.0), tensors[0].nbytes * (reads + 2 * updates)


class Side:
    """The parameters, gradients, optimizer and scalers of one side of a race."""

    def __init__(self, work: Work, drawn: list[Tensor]) -> None:
        self.work = work
        self.drawn = [_local(grad) for grad in drawn]
        self.parameters = [torch.nn.Parameter(grad + 1) for grad in drawn]
        self.grads = [torch.empty_like(grad) for grad in drawn]
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad
        self.optimizer = work.optimizer(self.parameters)
        # Not a power of two, and not 1: every multiply is a real one.
        device = self.drawn[0].device.type
        self.torch_scaler = torch.amp.GradScaler(device, init_scale=1.01)
        self.scaler = fastamp.GradScaler(device, init_scale=1.01)
        for scaler in (self.torch_scaler, self.scaler):
            scaler.scale(torch.ones((), device=device))

    def restore(self) -> None:
        """Put the gradients back as backward would leave them."""
        torch._foreach_copy_([_local(grad) for grad in self.grads], self.drawn)

    def torch(self) -> Tensor | None:
        """Do the work with torch's functions."""
        if not self.work.updates:
            return get_total_norm(self.grads)
        self.torch_scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.parameters, MAX_NORM)
        if self.work.moment:
            self.torch_scaler.step(self.optimizer)
        self.torch_scaler.update()
        return None

    def fastamp(self) -> Tensor | None:
        """Do the same with fastamp's."""
        if not self.work.updates:
            return fastamp.get_total_norm(self.grads)
        if self.work.moment:
            self.scaler.step(self.optimizer, max_norm=MAX_NORM)
        else:
            self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
        self.scaler.update()
        return None

    def check(self, do: Callable[[], Tensor | None], norm: float, rtol: float) -> None:
        """Do the work once, and compare with plain float64 arithmetic.

        Raises:
            AssertionError: a figure differs by more than float32 allows.
        """
        close = partial(torch.testing.assert_close, rtol=rtol, atol=0, check_dtype=False)
        self.restore()
        total = do()
        if not self.work.updates:
            full = getattr(total, "full_tensor", lambda: total)()  # where it is a DTensor
            close(full, torch.tensor(norm, device=self.drawn[0].device))
        for parameter, grad, drawn in zip(self.parameters, self.grads, self.drawn, strict=True):
            clipped = drawn.double() * (MAX_NORM / norm)
            if self.work.first_step is not None:
                stepped, moment = self.work.first_step(drawn + 1, clipped)
                state = self.optimizer.state[parameter]
                assert self.work.moment in state, "no state: there was no step"  # noqa: S101
                close(_local(state[self.work.moment]), moment)
                close(_local(parameter.detach()), stepped, atol=1e-7)
            elif self.work.updates:
                close(_local(grad), clipped)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor as it is."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
