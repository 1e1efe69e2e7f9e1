"""The step alone: torch's unscale, clip, step and update against fastamp's, on random gradients.

Takes a minute a row on two CPU cores; gpt2 needs 10 GB of memory.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import fastamp
from fastamp.bench.comparison import PLAIN, PLAN, run_cases
from fastamp.bench.environment import no_speed_reason
from fastamp.bench.race import Case
from fastamp.bench.record import Task

MAX_NORM = 1.0  # less than the norm of the gradients: every step clips
RATE = 1e-4
STOCK_RTOL = 1e-3  # torch's float32 norm is off in the fourth digit
OUR_RTOL = 1e-5
# A step over few elements takes microseconds: so many calls are a visit, well above the clock's.
SMALL, CALLS = 50_000, 50
LOOP_ROWS, LOOP_BATCH = 8192, 128  # of a step in a loop

Make = Callable[..., torch.optim.Optimizer]
FUSED: Make = partial(torch.optim.AdamW, fused=True)
OPEN: Make = torch.optim.AdamW  # neither fused nor foreach


@dataclass(frozen=True, kw_only=True)
class Row:
    """Gradients, and the step that takes them."""

    text: str
    sizes: Sequence[tuple[int, ...]]
    optimizer: Make
    scaler: bool = True
    in_a_loop: bool = False  # each step follows a pass of torch, see `Looped`
    zero_grad: bool = False
    dtype: torch.dtype = torch.float32

    def make_case(self, device: str, seed: int) -> Case:
        """Return the race of torch's step and fastamp's."""
        grads, norm = draw_grads(self.sizes, device, seed, self.dtype)
        kind = Looped if self.in_a_loop else Side
        return race_sides(kind(self, grads), kind(self, grads), [norm])


_BLOCK = [(768,)] * 6 + [(2304, 768), (2304,), (768, 768), (3072, 768), (3072,), (768, 3072)]
GPT2: list[tuple[int, ...]] = [(50257, 768), (1024, 768), *_BLOCK * 12, (768,), (768,)]
LOOP = [(512, 64), (512,), (512, 512), (512,), (2, 512), (2,)]
SHAPES: dict[str, tuple[str, Sequence[tuple[int, ...]]]] = {
    "2000x1000": ("2,000 tensors of 1,000", [(1000,)] * 2000),
    "gpt2": ("GPT-2, 124 M in 148 tensors", GPT2),
    "in-a-loop": ("64-512-512-2, after torch's forward and backward pass of 128 rows", LOOP),
}
ROWS = {
    f"{shape}/{name}": Row(
        text=f"{text}; whole step, {kind} AdamW",
        sizes=sizes,
        optimizer=optimizer,
        scaler=shape != "in-a-loop",
        in_a_loop=shape == "in-a-loop",
    )
    for shape, (text, sizes) in SHAPES.items()
    for name, kind, optimizer in (("adamw", "fused", FUSED), ("adamw-open", "default", OPEN))
}


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    rows = f"some of {', '.join(ROWS)} (default: all)"
    add("--rows", nargs="+", choices=ROWS, default=[*ROWS], metavar="ROW", help=rows)


def prepare(args: argparse.Namespace, rows: Mapping[str, Row] = ROWS) -> Task:
    """Return the job and the function that runs it."""
    chosen = {name: rows[name] for name in args.rows}
    notes = [f"{name}: {row.text}" for name, row in chosen.items()]
    notes += ["torch: unscale_, clip_grad_norm_, step and update; in a loop without a scaler"]
    notes += ["plain: sum() and mul_() over the bytes of the step; no limit: it can be beaten"]
    cases = {name: partial(row.make_case, args.device, args.seed) for name, row in chosen.items()}
    job = {"races": [*chosen], "seed": args.seed}
    return job, lambda: run_cases(args, PLAN, cases, notes)


def race_sides(theirs: "Side", ours: "Side", norms: Sequence[float]) -> Case:
    """Return a race, after a check of each side against plain float64 arithmetic."""
    theirs.check(theirs.torch, norms[0], STOCK_RTOL)
    ours.check(ours.fastamp, norms[-1], OUR_RTOL)
    plain, restore_plain, nbytes = make_plain(ours)
    before_plain = theirs.before if isinstance(theirs, Looped) else restore_plain
    before = {"torch": theirs.before, PLAIN: before_plain, "fastamp": ours.before}
    return Case(
        arms={"torch": theirs.torch, PLAIN: plain, "fastamp": ours.fastamp},
        before=lambda arm: before[arm](),
        calls=1 if sum(map(torch.numel, ours.drawn)) > SMALL else CALLS,
        amounts={"GB/s": nbytes / 1e9},
    )


def draw_grads(
    sizes: Sequence[tuple[int, ...]], device: str, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], float]:
    """Return random gradients and their norm, which is above MAX_NORM even for one element."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = [torch.randn(size, device=device, generator=generator) for size in sizes]
    grads = [(grad + 2 * grad.sign()).to(dtype) for grad in drawn]
    return grads, math.sqrt(math.fsum(grad.double().square().sum().item() for grad in grads))


def make_plain(side: "Side") -> tuple[Callable[[], object], Callable[[], object], int]:
    """Return passes over the fewest bytes the step can move, what restores them, and the bytes."""
    reads, updates = side.passes()
    numel = sum(grad.numel() for grad in side.drawn)
    tensors = [side.drawn[0].new_ones(numel) for _ in range(max(updates, 1))]

    def move() -> None:
        for _ in range(reads):
            tensors[0].sum()
        for tensor in tensors[:updates]:
            tensor.mul_(1.0)

    # The first tensor is left in the cache, as restored gradients are.
    return move, partial(tensors[0].fill_, 1.0), tensors[0].nbytes * (reads + 2 * updates)


class Side:
    """The parameters, optimizer and scaler of one side of a race; `drawn` are its gradients."""

    codes_rtol = 0.0  # of moments that are codes

    def __init__(self, row: Row, drawn: list[Tensor]) -> None:
        self.row, self.drawn = row, drawn
        self.parameters = self.make_parameters()
        self.grads = [torch.empty_like(grad) for grad in drawn]
        self.optimizer = row.optimizer(self.parameters, lr=RATE)
        # Not 1 or another power of two, for which multiplies are exact. It never grows.
        device = drawn[0].device.type
        self.torch_scaler = torch.amp.GradScaler(device, init_scale=1.01, growth_interval=2**30)
        self.scaler = fastamp.GradScaler(device, init_scale=1.01, growth_interval=2**30)
        for scaler in (self.torch_scaler, self.scaler):
            scaler.scale(torch.ones((), device=device))

    def make_parameters(self) -> list[nn.Parameter]:
        """Return one for each gradient."""
        return [nn.Parameter(grad + 1) for grad in self.drawn]

    def passes(self) -> tuple[int, int]:
        """Return how often a step reads as many bytes as the gradients have, and updates them.

        The norm reads the gradients. The update moves the parameters, two moments and the
        gradients, which it leaves unscaled and clipped, or reads alone if it consumes them.
        """
        return (2, 3) if self.row.zero_grad else (1, 4)

    def restore(self) -> None:
        """Restore the gradients as backward leaves them, all of them in the caches."""
        torch._foreach_copy_(self.grads, self.drawn)
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad

    before = restore  # of a call, off the clock

    def torch(self) -> object:
        """Take a step with torch's functions."""
        if self.row.scaler:
            self.torch_scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.parameters, MAX_NORM)
        if self.row.scaler:
            self.torch_scaler.step(self.optimizer)
            self.torch_scaler.update()
        else:
            self.optimizer.step()
        return self.optimizer.zero_grad() if self.row.zero_grad else None

    def fastamp(self) -> object:
        """Take the same step with fastamp's."""
        if not self.row.scaler:
            return fastamp.optimizer_step(self.optimizer, MAX_NORM, self.row.zero_grad)
        self.scaler.step(self.optimizer, max_norm=MAX_NORM, zero_grad=self.row.zero_grad)
        return self.scaler.update()

    def check(self, step: Callable[[], object], norm: float, rtol: float) -> None:
        """Take a first step, and compare with plain float64 arithmetic.

        Raises:
            AssertionError: a figure differs by more than its dtype allows.
        """
        self.restore()
        starts = [parameter.detach().double() for parameter in self.parameters]
        step()
        moments, weights = self.read()
        for place, (start, drawn) in enumerate(zip(starts, self.drawn, strict=True)):
            grad, left = drawn.double() * (MAX_NORM / norm), self.parameters[place].grad
            stepped = start * (1 - RATE * 0.01) - RATE * grad / (grad.abs() + 1e-8)
            _compare(moments[place], 0.1 * grad, max(rtol, self.codes_rtol))
            _compare(weights[place], stepped, rtol, 1e-7)
            assert (left is None) == self.row.zero_grad, "a gradient is left"  # noqa: S101
            if left is not None:
                _compare(left, grad, rtol)
        self.restore()

    def read(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the first moments, zero where no step was taken, and the weights."""
        known = [(each, self.optimizer.state[each]) for each in self.parameters]
        moments = [state.get("exp_avg", torch.zeros_like(each)) for each, state in known]
        return moments, [parameter.detach() for parameter in self.parameters]


def _compare(found: Tensor, expected: Tensor, rtol: float, atol: float = 0.0) -> None:
    """Raise an error if values differ by more than their dtype allows."""
    coarse = max(rtol, 2 * torch.finfo(found.dtype).eps)
    torch.testing.assert_close(found, expected, rtol=coarse, atol=atol, check_dtype=False)


class Looped(Side):
    """A side in a training of Linears: after a pass through them the caches hold other data."""

    def make_parameters(self) -> list[nn.Parameter]:
        """Return those of the model, and draw its rows."""
        torch.manual_seed(0)  # both sides train the same
        first, second, last = (nn.Linear(n, m) for m, n in self.row.sizes[::2])
        relu, self.device = nn.ReLU(), self.drawn[0].device
        self.model = nn.Sequential(first, relu, second, relu, last).to(self.device)
        self.rows = torch.randn(LOOP_ROWS, first.in_features, device=self.device)
        self.labels, self.start = (self.rows[:, :8].sum(1) > 0).long(), 0
        self.has_units = no_speed_reason(self.device.type, "bf16") is None
        return [*self.model.parameters()]

    def before(self) -> None:
        """Run the forward and backward pass on the next batch."""
        self.start = (self.start + LOOP_BATCH) % LOOP_ROWS
        chosen = slice(self.start, self.start + LOOP_BATCH)
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.has_units):
            loss = functional.cross_entropy(self.model(self.rows[chosen]), self.labels[chosen])
        torch.autograd.backward(loss)
