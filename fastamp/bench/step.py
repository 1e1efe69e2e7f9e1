"""The step alone: torch's norm, clip and optimizer step against fastamp's, on random gradients.

All rows take about half an hour on two CPU cores, one a minute; gpt2 needs 10 GB of memory.
"""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

import fastamp
from fastamp.bench.environment import no_speed_reason
from fastamp.bench.options import refuse
from fastamp.bench.race import Case, Plan
from fastamp.bench.record import PLAIN, Report, Task, run_cases
from fastamp.bench.rows import NAMED, RATE, ROWS, WORK, Shapes, Work, parse_shapes

MAX_NORM = 1.0  # less than the norm of the gradients: every step clips
PLAN = Plan(build_s=1.0, limit_s=45.0)
STOCK_RTOL = 1e-3  # torch's float32 norm is off in the fourth digit
CODES_RTOL = 0.04  # 8-bit codes of large first moments are 1/16 apart, and the nearest is taken
PRODUCTS_RTOL = 0.05  # of the norm of Muon's step: fifteen products in bfloat16
PRODUCTS_NBYTES = 2**19  # of matrices multiplied at once, which stay in a CPU's caches
SMALL = 50_000  # elements: a step over fewer takes microseconds, and a visit has many calls
CALLS = 50
LOOP_ROWS, LOOP_BATCH = 8192, 128  # of a step in a loop
METRICS = "speedup/ or of_plain/, the shape and the work, as in speedup/gpt2/adamw"


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    shapes = "; ".join(f"{name} ({each.text})" for name, each in NAMED.items())
    shapes += "; 2000x1000 is tensors and the elements of each; 465gx1000 makes each a group, "
    shapes += "2000x64x64 has matrices, and in 2000x1000-bf16 all are bfloat16; "
    shapes += f"separated by commas (default: {','.join(ROWS)})"
    add("--shapes", type=parse_shapes, metavar="LIST", help=shapes)
    work = "; ".join(f"{name} ({each.text})" for name, each in WORK.items())
    work += "; several may be given (default: the README's rows of a default shape, all for others)"
    work += ". A default AdamW is neither fused nor foreach."
    add("--work", nargs="+", choices=WORK, metavar="NAME", help=work)


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    args.shapes = args.shapes or parse_shapes(",".join(ROWS))
    work = {name: args.work or ROWS.get(name, " ".join(WORK)).split() for name in args.shapes}
    names = [f"{shape}/{each}" for shape in args.shapes for each in dict.fromkeys(work[shape])]
    lacking = {name: problem for name in names if (problem := _lacks(args, name))}
    for name, problem in lacking.items() if args.work or len(lacking) == len(names) else ():
        refuse("--work", name, problem)
    names = [name for name in names if name not in lacking]
    return {"races": names, "seed": args.seed}, partial(_run, args, names)


def _lacks(args: argparse.Namespace, name: str) -> str:
    """Say what is missing for Muon's rows, "" if nothing is."""
    shape, work = name.split("/")
    if WORK[work].matrices is None:
        return ""
    if not hasattr(torch.optim, "Muon"):
        return f"needs torch 2.9, this is {torch.__version__}"
    found = args.shapes[shape]
    has_matrices = any(len(size) == 2 for size in found.sizes[found.tables :])
    return "" if has_matrices else "needs matrices, as in 2000x64x64"


def _run(args: argparse.Namespace, names: list[str]) -> Report:
    """Race all work on all shapes."""
    notes = []
    for name in names:
        shape, work = name.split("/")
        notes.append(f"{name}: {args.shapes[shape].text}; {WORK[work].text}")
    notes += ["torch: unscale_, clip_grad_norm_, step, update and zero_grad, as the work has them"]
    plain = "sum() and mul_() over the bytes that the work has to move; no limit: it can be beaten"
    return run_cases(args, PLAN, names, partial(_make_case, args), [*notes, f"plain: {plain}"])


def _make_case(args: argparse.Namespace, name: str) -> Case:
    """Return a race of both sides, after a check of each against plain float64 arithmetic."""
    first, _, second = name.partition("/")
    shape, work = args.shapes[first], WORK[second]
    how: dict[str, Any] = {"grouped": shape.grouped, "tables": shape.tables}
    grads, norm = draw_grads(shape.sizes, args.device, args.seed, shape.dtype)
    theirs = Side(work, grads, **how)
    theirs.check(theirs.torch, norm, rtol=STOCK_RTOL)
    if work.lean is not None:
        work = work._replace(optimizer=work.lean)
        grads, norm = draw_grads(shape.sizes, args.device, args.seed, torch.bfloat16)
    ours = Side(work, grads, **how)
    ours.check(ours.fastamp, norm, rtol=1e-5)
    if work.matrices is None:
        plain, restore_plain, nbytes = _make_plain(ours)
        more: dict[str, Any] = {"amounts": {"GB/s": nbytes / 1e9}}
    else:
        plain, restore_plain = make_products(ours), bool
        sides = {"torch": (theirs, theirs.torch), "fastamp": (ours, ours.fastamp)}
        more = {"details": {arm: {"calls": count_operators(*side)} for arm, side in sides.items()}}
    restore = {"torch": theirs.restore, PLAIN: restore_plain, "fastamp": ours.restore}
    if shape.in_a_loop:
        loops = {"torch": Loop(theirs), "fastamp": Loop(ours)}
        restore = {arm: loops.get(arm, loops["torch"]).pass_back for arm in restore}
    return Case(
        arms={"torch": theirs.torch, PLAIN: plain, "fastamp": ours.fastamp},
        before=lambda arm: restore[arm](),
        calls=count_calls(shape),
        **more,
    )


def make_products(side: "Side") -> Callable[[], object]:
    """Return Muon's products alone: five rounds of three, of stacked matrices in bfloat16."""
    by_size: dict[torch.Size, list[Tensor]] = {}
    for grad, work in zip(side.drawn, side.works, strict=True):
        if work is not side.work:
            wide = grad if grad.size(0) <= grad.size(1) else grad.mT
            by_size.setdefault(grad.shape, []).append((wide / wide.norm()).bfloat16())
    stacks: list[Tensor] = []
    for matrices in by_size.values():
        is_cpu, size = matrices[0].device.type == "cpu", 2 * matrices[0].numel()
        count = max(1, PRODUCTS_NBYTES // size) if is_cpu else len(matrices)
        stacks += torch.split(torch.stack(matrices), count)

    def multiply() -> None:
        for stack in stacks:
            for _ in range(5):
                gram = torch.bmm(stack, stack.mT)
                torch.bmm(torch.bmm(gram, gram), stack)

    return multiply


def count_operators(side: "Side", step: Callable[[], object]) -> int:
    """Count the calls of torch's operators that a step makes, but not those of other operators."""
    side.restore()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch 2.13's profiler prints to stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step()
    side.restore()
    events = [event for event in found.events() or () if event.name.startswith("aten::")]
    return sum(not _is_inside(event) for event in events)


def _is_inside(event: Any) -> bool:
    """Say whether an operator was called by another one."""
    parent = event.cpu_parent
    return parent is not None and (parent.name.startswith("aten::") or _is_inside(parent))


def count_calls(shape: Shapes) -> int:
    """Return how many calls a visit needs, so that its time is well above the clock's."""
    return 1 if sum(map(math.prod, shape.sizes)) > SMALL else CALLS


def draw_grads(
    sizes: Sequence[tuple[int, ...]], device: str, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], float]:
    """Return random gradients and their norm, which is above MAX_NORM even for one element."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = [torch.randn(size, device=device, generator=generator) for size in sizes]
    grads = [(grad + 2 * grad.sign()).to(dtype) for grad in drawn]
    return grads, math.sqrt(math.fsum(grad.double().square().sum().item() for grad in grads))


def _make_plain(side: "Side") -> tuple[Callable[[], object], Callable[[], object], int]:
    """Return passes over the fewest bytes the work can move, what restores them, and the bytes."""
    reads, updates = side.work.reads, side.work.updates
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
    """The parameters, gradients, optimizers and scalers of one side of a race.

    Args:
        work: what is timed.
        drawn: the gradients, before each call.
        grouped: each parameter is a group of its own.
        tables: how many of the first parameters are no matrices of hidden layers.
    """

    zero = 0.0  # the largest kept moment that may stand for 0

    def __init__(
        self, work: Work, drawn: list[Tensor], *, grouped: bool = False, tables: int = 0
    ) -> None:
        self.work = work
        self.drawn = drawn
        self.parameters = [torch.nn.Parameter(grad + 1) for grad in drawn]
        self.grads = [torch.empty_like(grad) for grad in drawn]
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad
        has_own = work.matrices is not None
        self.works = [
            work.matrices or work if has_own and i >= tables and grad.dim() == 2 else work
            for i, grad in enumerate(drawn)
        ]
        """What each parameter's optimizer does, which is another one for matrices."""
        self.optimizers = []
        for each in (work.matrices, work):
            held = zip(self.parameters, self.works, strict=True)
            own = [parameter for parameter, its in held if its is each]
            groups = [[parameter] for parameter in own] if grouped else [own]
            if own and each is not None:
                made = each.optimizer([{"params": group} for group in groups], lr=RATE)
                self.optimizers.append(made)
        self.optimizer = self.optimizers[-1]
        # Not 1 or another power of two, for which multiplies are exact. It never grows.
        device = self.drawn[0].device.type
        self.torch_scaler = torch.amp.GradScaler(device, init_scale=1.01, growth_interval=2**30)
        self.scaler = fastamp.GradScaler(device, init_scale=1.01, growth_interval=2**30)
        for scaler in (self.torch_scaler, self.scaler):
            scaler.scale(torch.ones((), device=device))

    def restore(self) -> None:
        """Restore the gradients as backward leaves them, all of them in the caches."""
        torch._foreach_copy_(self.grads, self.drawn)
        if self.work.zero_grad:
            for parameter, grad in zip(self.parameters, self.grads, strict=True):
                parameter.grad = grad

    def torch(self) -> Tensor | None:
        """Do the work with torch's functions."""
        if not self.work.updates:
            return get_total_norm(self.grads)
        if self.work.scaler:
            self.torch_scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.parameters, MAX_NORM)
        if not self.work.scaler:
            for each in self.optimizers:
                each.step()
        elif self.work.moment:
            self.torch_scaler.step(self.optimizer)
        if self.work.scaler:
            self.torch_scaler.update()
        for each in self.optimizers if self.work.zero_grad else ():
            each.zero_grad()
        return None

    def fastamp(self) -> Tensor | None:
        """Do the same with fastamp's."""
        if not self.work.updates:
            return fastamp.get_total_norm(self.grads)
        if not self.work.scaler:
            several = self.optimizers if len(self.optimizers) > 1 else self.optimizer
            fastamp.optimizer_step(several, MAX_NORM, self.work.zero_grad)
            return None
        if self.work.moment:
            self.scaler.step(self.optimizer, max_norm=MAX_NORM, zero_grad=self.work.zero_grad)
        else:
            self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
        self.scaler.update()
        return None

    def check(self, do: Callable[[], Tensor | None], norm: float, rtol: float) -> None:
        """Do the work once, and compare with plain float64 arithmetic.

        Raises:
            AssertionError: a figure differs by more than its dtype allows.
        """
        coarse = max(rtol, 2 * torch.finfo(self.drawn[0].dtype).eps)
        close = partial(torch.testing.assert_close, rtol=coarse, atol=0, check_dtype=False)
        self.restore()
        total = do()
        if not self.work.updates:
            close(total, torch.tensor(norm, device=self.drawn[0].device))
        is_lean, (states, weights) = isinstance(self.optimizer, fastamp.AdamW), self.read()
        for place, (parameter, grad) in enumerate(zip(self.parameters, self.grads, strict=True)):
            drawn = self.drawn[place]
            clipped = drawn.double() * (MAX_NORM / norm)
            work, start = self.works[place], (drawn + 1).double()
            if work.first_step is not None:
                stepped, moment = work.first_step(start, clipped)
                state = states.get(place, {})
                assert work.moment in state, "no state: there was no step"  # noqa: S101
                of_moment = CODES_RTOL if is_lean else coarse
                close(state[work.moment], moment, rtol=of_moment, atol=self.zero)
                if work is not self.work:  # a step of Muon
                    error, size = (weights[place] - stepped).norm(), (stepped - start).norm()
                    assert error < PRODUCTS_RTOL * size, "products are not close"  # noqa: S101
                else:
                    close(weights[place], stepped, rtol=rtol if is_lean else coarse, atol=1e-7)
            if self.work.zero_grad:
                assert parameter.grad is None, "a gradient is left"  # noqa: S101
            elif self.work.updates:
                close(grad, clipped)
        self.restore()

    def read(self) -> tuple[dict[int, dict[str, Any]], list[Tensor]]:
        """Return the states by place, and the weights; those of fastamp.AdamW in float32."""
        if isinstance(self.optimizer, fastamp.AdamW):
            kept: Any = fastamp.to_torch(self.optimizer.state_dict())
            return kept["state"], self.optimizer.master_weights()
        known = {p: state for each in self.optimizers for p, state in each.state.items()}
        states = {place: known.get(p, {}) for place, p in enumerate(self.parameters)}
        return states, [parameter.detach() for parameter in self.parameters]


class Loop:
    """A training around a side's step: after a pass through the model the caches hold other data.

    The parameters are those of a stack of Linears, from its usual start.
    """

    def __init__(self, side: Side) -> None:
        self.side, widths = side, [grad.size(1) for grad in side.drawn[::2]]
        rng = torch.Generator(side.drawn[0].device).manual_seed(0)
        with torch.no_grad():
            for parameter in side.parameters:
                end = parameter.shape[-1] ** -0.5
                parameter.uniform_(-end, end, generator=rng)
        device = side.drawn[0].device
        self.rows = torch.randn(LOOP_ROWS, widths[0], device=device, generator=rng)
        self.labels = (self.rows[:, :8].sum(1) > 0).long()
        self.device, self.start = device.type, 0
        self.has_units = no_speed_reason(self.device, "bf16") is None

    def pass_back(self) -> None:
        """Run the forward and backward pass on the next batch."""
        self.start = (self.start + LOOP_BATCH) % LOOP_ROWS
        chosen = slice(self.start, self.start + LOOP_BATCH)
        for parameter in self.side.parameters:
            parameter.grad = None
        x, parameters = self.rows[chosen], self.side.parameters
        layers = zip(parameters[::2], parameters[1::2], strict=True)
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.has_units):
            for place, (weight, bias) in enumerate(layers):
                x = torch.nn.functional.linear(x.relu() if place else x, weight, bias)
            loss = torch.nn.functional.cross_entropy(x, self.labels[chosen])
        if self.side.work.scaler:  # the side's own, of one scale
            loss = loss * self.side.scaler.get_scale()
        torch.autograd.backward(loss)
