"""The loops that train a task: the naive one, a good one with torch alone, and fastamp's.

The naive loop is the one found in the wild: a Python list stacked for each batch, blocking copies,
a synchronize around every step, a check of the norm on the host, an optimizer with default options,
FP32. A loop has one part of each kind in PARTS, so that each can be replaced alone. All loops start
from the same weights and see the same samples.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset, RandomSampler, default_collate

import fastamp
from fastamp.bench.environment import count_cores
from fastamp.bench.jobs import JOBS
from fastamp.bench.loader import Batches, fastamp_batches, torch_batches
from fastamp.bench.tasks import (
    Training,
    compute_loss,
    copy_model,
    draw,
    expect,
    make_loader,
    make_optimizer,
)
from fastamp.data import map_tensors
from fastamp.step.native import parameters_of

ARMS = ("naive", "stock", "fastamp")
MOST_PERMUTED = 100_000  # rows
AGREE_STEPS = 4  # the first losses, before small differences grow
# Tolerances of losses: same samples, one precision; two precisions; other crops or filters.
SAME, PRECISE, ALIKE = 1e-3, 3e-2, 0.1


class Data(NamedTuple):
    """What the loops of one task read."""

    dataset: Any  # None where only batches are given
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None  # None is default_collate

    def by_torch(self) -> Any:
        """Return the dataset for a loop without fastamp: its `by_torch`, if it has one."""
        return getattr(self.dataset, "by_torch", self.dataset)

    def is_repeatable(self) -> bool:
        """Say whether all loops read the same samples from one order."""
        if self.dataset is None or self.by_torch() is not self.dataset:
            return False
        try:
            torch.testing.assert_close(self.dataset[0], self.dataset[0], rtol=0, atol=0)
        except (AssertionError, TypeError):  # TypeError: samples that are no numbers
            return False
        return True


def find_data(training: Training) -> Data:
    """Return the dataset of a task; of a loader, the one that it reads."""
    data, batch_size, collate_fn = training.data, training.batch_size, None
    if training.has_loader:
        batch_size = getattr(data, "batch_size", None) or 0
        collate_fn = getattr(data, "collate_fn", None)
        data = getattr(data, "dataset", None)
    if data is None or isinstance(data, IterableDataset) or not batch_size:
        return Data(None, 0, None)
    return Data(data, batch_size, None if collate_fn is default_collate else collate_fn)


def _stack(*values: Any) -> Any:
    return torch.stack(values) if isinstance(values[0], Tensor) else default_collate([*values])


def _naive_batches(data: Data, device: str, sampler: RandomSampler) -> Batches:
    move = partial(map_tensors, partial(Tensor.to, device=device))
    join = data.collate_fn or (lambda samples: tree_map(_stack, *samples))
    dataset = data.by_torch()

    def batches() -> Iterator[Any]:
        rows = iter(sampler)
        for _ in range(sampler.num_samples // data.batch_size):
            yield move(join([dataset[row] for row in islice(rows, data.batch_size)]))

    return batches


def _stock_batches(data: Data, device: str, sampler: RandomSampler, **options: Any) -> Batches:
    # Without its own generator the loader would draw its seed from the one that dropout uses.
    options |= {"generator": torch.Generator(), "collate_fn": data.collate_fn, "sampler": sampler}
    return torch_batches(data.by_torch(), data.batch_size, device, **options)


def _fastamp_batches(data: Data, device: str, sampler: RandomSampler, **options: Any) -> Batches:
    options |= {"generator": torch.Generator(), "collate_fn": data.collate_fn, "sampler": sampler}
    return fastamp_batches(data.dataset, data.batch_size, device, **options)


def list_workers(data: Data, arm: str) -> list[dict[str, Any]]:
    """Return the workers that a loop might have, as options of its loader."""
    alone: list[dict[str, Any]] = [{}]
    n = count_cores()
    processes: dict[str, Any] = {"num_workers": n, "persistent_workers": True}
    if data.dataset is None or arm == "naive":
        return alone
    if arm == "stock":
        return [*alone, processes]
    ours = fastamp.DataLoader[Any](data.dataset, data.batch_size, collate_fn=data.collate_fn)
    is_gathered = ours.stats().path.startswith("gathered")
    return alone if is_gathered else [*alone, {"num_workers": n, "worker": "thread"}, processes]


def _make_sampler(data: Data, steps: int, seed: int) -> RandomSampler:
    """Return a sampler of short epochs, which draws from the whole dataset."""
    n_rows, n_drawn = len(data.dataset), steps * data.batch_size
    # A permutation of very many rows would take most of a short epoch.
    again = n_rows > MOST_PERMUTED or n_rows < n_drawn
    order = torch.Generator().manual_seed(seed)
    return RandomSampler(data.dataset, replacement=again, num_samples=n_drawn, generator=order)


class Loop:
    """One training loop, made of a part of each kind; a visit is a short epoch.

    Args:
        parts: for each part of PARTS, the arm that it is of.
        dtype: of autocast; ignored if the precision is the naive loop's.
        steps: of a visit.
        workers: options of its loader.
    """

    def __init__(
        self,
        parts: dict[str, str],
        training: Training,
        device: str,
        *,
        dtype: torch.dtype | None,
        steps: int,
        seed: int,
        workers: dict[str, Any],
    ) -> None:
        self.training, self.device, self.data = training, device, find_data(training)
        self.model = copy_model(training).to(device)
        made = make_optimizer(training, self.model, fused=None)
        self.optimizer = with_fused(made, None if parts["step"] == "naive" else True)
        self.parameters = parameters_of([self.optimizer])
        self.dtype = dtype = None if parts["precision"] == "naive" else dtype
        make = fastamp.GradScaler if parts["step"] == "fastamp" else torch.amp.GradScaler
        self.scaler = make(device, enabled=dtype is torch.float16)
        self.autocast: Callable[[], Any] | None = None
        if dtype is not None:
            self.autocast = partial(torch.autocast, device, dtype=dtype)
        if self.data.dataset is None:
            endless = draw(make_loader(training, seed, device=device), device)
            self.batches: Batches = lambda: islice(endless, steps)
        else:
            self.sampler = _make_sampler(self.data, steps, seed)
            make_batches = LOADERS[parts["loader"]]
            self.batches = make_batches(self.data, device, self.sampler, **workers)
        self.step, self.timed = STEPS[parts["step"]], TIMINGS[parts["timing"]]
        self.losses: list[Any] = []
        self.times: list[object] = []
        self.timer = fastamp.Timer(device)

    def epoch(self) -> None:
        """Train the steps of one visit."""
        for batch in self.batches():
            self.timed(self, batch)

    def compute_loss(self, batch: Any) -> Tensor:
        """Return the loss, in the loop's precision."""
        loss_fn = self.training.loss
        if self.autocast is None and loss_fn is not None and isinstance(batch, (tuple, list)):
            *inputs, target = batch  # as in a script: the checks below would slow tiny networks
            return loss_fn(self.model(*inputs), target)
        with self.autocast() if self.autocast else nullcontext():
            return compute_loss(self.training, self.model, batch)


def with_fused(optimizer: Optimizer, fused: bool | None) -> Optimizer:  # noqa: FBT001
    """Return the optimizer rebuilt with `fused` (None: torch's default), if that is possible."""
    if "fused" not in optimizer.defaults:
        return optimizer
    kind: Any = type(optimizer)
    try:
        made: Optimizer = kind(
            [{**group, "fused": fused, "foreach": None} for group in optimizer.param_groups],
            fused=fused,
        )
    except (RuntimeError, TypeError):  # not fused for these parameters, or a class of the user's
        return optimizer
    return made


def _naive_step(loop: Loop, batch: Any) -> None:
    loop.optimizer.zero_grad()
    loss = loop.compute_loss(batch)
    torch.autograd.backward(loop.scaler.scale(loss))
    loop.scaler.unscale_(loop.optimizer)
    norm = clip_grad_norm_(loop.parameters, loop.training.max_norm or math.inf)
    if torch.isfinite(norm).item():  # the host waits
        loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.losses.append(loss.item())


def _stock_step(loop: Loop, batch: Any) -> None:
    loop.optimizer.zero_grad()
    loss = loop.compute_loss(batch)
    torch.autograd.backward(loop.scaler.scale(loss))
    if loop.training.max_norm is not None:
        loop.scaler.unscale_(loop.optimizer)
        clip_grad_norm_(loop.parameters, loop.training.max_norm)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.losses.append(loss.detach())  # read at the end: no step waits for it


def _fastamp_step(loop: Loop, batch: Any) -> None:
    loss = loop.compute_loss(batch)
    torch.autograd.backward(loop.scaler.scale(loss))
    loop.scaler.step(loop.optimizer, max_norm=loop.training.max_norm, zero_grad=True)
    loop.scaler.update()
    loop.losses.append(loss.detach())


def _naive_timing(loop: Loop, batch: Any) -> None:
    synchronize = torch.get_device_module(loop.device).synchronize
    synchronize()
    start_s = perf_counter()
    loop.step(loop, batch)
    synchronize()
    loop.times.append(perf_counter() - start_s)


def _stock_timing(loop: Loop, batch: Any) -> None:
    if loop.device != "cuda":
        _naive_timing(loop, batch)
        return
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    start.record()
    loop.step(loop, batch)
    end.record()
    loop.times.append((start, end))


def _fastamp_timing(loop: Loop, batch: Any) -> None:
    with loop.timer("step"):
        loop.step(loop, batch)


LOADERS: dict[str, Callable[..., Batches]] = {
    "naive": _naive_batches,
    "stock": _stock_batches,
    "fastamp": _fastamp_batches,
}
STEPS = {"naive": _naive_step, "stock": _stock_step, "fastamp": _fastamp_step}
TIMINGS = {"naive": _naive_timing, "stock": _stock_timing, "fastamp": _fastamp_timing}
# The arms that have their own version of a part; without one, fastamp's loop uses the stock one.
PARTS = {"loader": ARMS, "step": ARMS, "timing": ARMS, "precision": ("naive", "stock")}


def list_parts(arm: str) -> dict[str, str]:
    """Return the parts of an arm: "naive", "stock", "fastamp", or "loader: stock" for a repair."""
    part, _, repaired = arm.partition(": ")
    if repaired:
        return dict.fromkeys(PARTS, "naive") | {part: repaired}
    return {part: arm if arm in known else "stock" for part, known in PARTS.items()}


def check_losses(
    name: str, losses: dict[str, list[float]], *, is_same: bool, dtype: torch.dtype | None
) -> None:
    """Compare the first losses of all loops with those of the first loop.

    Raises:
        AssertionError: they differ by more than rounding, or, where loops read other crops of the
            same images, their means differ by more than a tenth.
        BrokenTask: so do those of a task of the user's.
    """
    base = next(iter(losses))
    for arm, values in losses.items():
        pair = [torch.tensor(values), torch.tensor(losses[base])]
        precisions = {list_parts(each)["precision"] for each in (arm, base)}
        rtol = SAME if dtype is None or len(precisions) == 1 else PRECISE
        if not is_same:
            pair, rtol = [losses.mean() for losses in pair], ALIKE
        if name not in JOBS:
            wanted = f"the first losses of the {base} loop in all loops, such as {losses[base]}"
            got = f"{values} in the {arm} loop: does the task draw random numbers?"
            expect(torch.allclose(pair[0], pair[1], rtol, rtol), "loss", wanted, got)
        say_where = partial("{}, {}: {}".format, name, arm)
        torch.testing.assert_close(*pair, rtol=rtol, atol=rtol, msg=say_where)
