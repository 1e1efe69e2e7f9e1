"""The one training loop of the bench: a task, and how a configuration loads and steps it.

The naive loop is the one found in the wild: a Python list stacked for each batch, blocking copies,
a check of the norm and the loss on the host, FP32. The stock one is torch alone
as an expert writes it. The main job, `jobs` and a user's task are lists of configurations: each
replaces a part of the one before it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam, AdamW, Optimizer
from torch.utils._pytree import tree_map_only

import fastamp
from fastamp.bench import arms
from fastamp.bench.environment import DTYPES
from fastamp.bench.feeds import NO_FEED, Feed
from fastamp.bench.tasks import (
    Part,
    Parts,
    Training,
    compute_loss,
    expect,
    make_optimizers,
)
from fastamp.step.native import parameters_of
from fastamp.train.loop import modes_kept

Region: TypeAlias = Callable[[str], AbstractContextManager[object]]  # such as a fastamp.Timer

LEAN = "lean"  # a precision: bfloat16 weights and inputs, no autocast, and fastamp.AdamW
TF32 = {"fp32-strict": False, "fp32-tf32": True}  # all other precisions leave torch's switches


@dataclass(frozen=True, kw_only=True)
class Config:
    """One way to train a task: for each part a key of the table named beside it."""

    name: str
    loader: str = "stock"  # feeds.LOADERS
    step: str = "stock"  # STEPS
    precision: str = "fp32"  # "fp32", LEAN, or TF32 or DTYPES
    is_own: bool = False  # an arm of the task, or of --arm


@dataclass(frozen=True, kw_only=True)
class Score:
    """What the task's `evaluate` returns of a model; `loss` is None if it returns none."""

    loss: float | None
    accuracy: float
    window_accuracies: list[float]  # of each part of the held-out data


_BATCH = Part("dataset", "its next batch")
_MOVE = Part("model", "its move to the device")
_LEAN = Part("model", "its change to bfloat16")
_BACKWARD = Part("loss", "its backward pass")
_STEP = Part("options['optimizer']", "its step")
_EVALUATE = Part("options['evaluate']", "its call on the model")
_SWITCHES = Part("make", "reading torch's switches of TF32 after it")
_NOT_TIMED = nullcontext()


class Trainer:
    """A task and its configuration: the model, which it trains in place, optimizer, scaler, losses.

    Args:
        config: the parts of the loop.
        training: the task; `with_copy` gives each of several trainers a model of its own.
        device: of the model.
        feed: begins the short epoch of a `visit`.
    """

    def __init__(
        self, config: Config, training: Training, device: str, feed: Feed = NO_FEED
    ) -> None:
        self.device, self.feed = device, feed
        with _MOVE:
            training.model.to(device)
        self.own = config.name if config.is_own else ""  # its name, in errors
        with arms.named(self.own):
            missing = config.is_own and config.name not in training.arms
            expect(not missing, "make", "the arms of its first call, in every call", "others")
            self.training, precision = arms.apply(self.own, training)
            self.config = config = replace(config, precision=precision or config.precision)
            self.model = self.training.model
            if config.precision == LEAN:
                _make_lean(self.model)
            self.optimizers = make_optimizers(self.training, self.model)
            if config.precision == LEAN:
                self.optimizers = [*map(_in_less_memory, self.optimizers)]
        self.parameters = parameters_of(self.optimizers)
        self.dtype = DTYPES.get(config.precision)
        make = fastamp.GradScaler if config.step == "fastamp" else torch.amp.GradScaler
        self.scaler = make(device, enabled=self.dtype is torch.float16)
        self.losses: list[Any] = []
        self._seen = self._count_skipped()

    def visit(self) -> None:
        """Train one short epoch of the trainer's own loader."""
        with _BATCH:  # the parts of a step name their own errors
            self.train(self.feed.begin())

    def train(self, batches: Iterable[Any], region: Region = lambda _: _NOT_TIMED) -> None:
        """Take a step on each batch; `region` names its parts: "forward", "backward", "step"."""
        with arms.named(self.own), tf32(self.config.precision):
            for batch in batches:
                self.train_step(batch, region)

    def train_step(self, batch: Any, region: Region) -> None:
        """Take one optimizer step; without loss scaling the scaler passes everything through."""
        if self.config.step != "fastamp":  # its step frees the gradients
            with region("step"):
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
        parts = batch if isinstance(batch, Parts) else [batch]
        losses = [self._accumulate(part, len(parts), region) for part in parts]
        loss = torch.stack(losses).sum() if losses[1:] else losses[0]
        with region("step"), _STEP:
            STEPS[self.config.step](self)  # the only line in which the steps differ
            self.scaler.update()
        # Read at the end: no step waits for it, except the naive one.
        self.losses.append(loss.item() if self.config.step == "naive" else loss)

    def _accumulate(self, batch: Any, n_parts: int, region: Region) -> Tensor:
        """Add a batch's gradients; return its share of the step's loss."""
        with region("forward"), self.autocast():
            loss = compute_loss(self.training, self.model, batch)
            loss = loss / n_parts if n_parts > 1 else loss
        with region("backward"), _BACKWARD:
            torch.autograd.backward(self.scaler.scale(loss))
        return loss.detach()

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass."""
        return torch.autocast(self.device, dtype=self.dtype) if self.dtype else nullcontext()

    def has_skipped(self) -> bool:
        """Say whether a step since the last call changed no parameter; waits for the device."""
        before, self._seen = self._seen, self._count_skipped()
        return self._seen > before

    def _count_skipped(self) -> float:
        """Return a number that grows with every skipped step."""
        if isinstance(self.scaler, fastamp.GradScaler):
            return self.scaler.skipped_steps
        return -self.scaler.get_scale()  # torch lowers the scale

    def evaluate(self) -> list[Score]:
        """Score the model by the task's own function, if there is one, in its own precision."""
        score = self.training.evaluate
        if score is None:
            return []
        switched, named = tf32(self.config.precision), arms.named(self.own)
        with named, torch.no_grad(), modes_kept(self.model), _EVALUATE, switched:
            self.model.eval()
            with self.autocast():
                found: Any = score(self.model)
            found = found if isinstance(found, Mapping) else {"accuracy": found}
            parts = torch.as_tensor(found["accuracy"], dtype=torch.float64).flatten()
            loss = None if found.get("loss") is None else float(found["loss"])
        wanted = "a number, or a list of them"
        expect(parts.numel() > 0, "options['evaluate']", wanted, "an empty list")
        return [Score(loss=loss, accuracy=parts.mean().item(), window_accuracies=parts.tolist())]


def _make_lean(model: nn.Module) -> None:
    """Make a model bfloat16, in training and in `evaluate`: it takes and returns float32."""
    with _LEAN:
        model.bfloat16()
        takes = lambda _, *inputs: _cast(inputs, torch.bfloat16)  # noqa: E731
        model.register_forward_pre_hook(takes, with_kwargs=True)
        model.register_forward_hook(lambda _, __, output: _cast(output, torch.float32))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors of a structure."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def _in_less_memory(optimizer: Optimizer) -> Optimizer:
    """Return fastamp.AdamW with 8-bit moments in place of torch's AdamW; one is kept as it is."""
    if isinstance(optimizer, fastamp.AdamW):
        return optimizer
    groups = optimizer.param_groups
    is_adamw = type(optimizer) is AdamW or (
        type(optimizer) is Adam and not any(group["weight_decay"] for group in groups)
    )
    wanted = "torch's AdamW, or its Adam without weight decay, for fastamp.AdamW in its place"
    expect(is_adamw, "options['optimizer']", wanted, type(optimizer).__name__)
    kept = ("params", "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
    with Part("options['optimizer']", "fastamp.AdamW in its place"):
        amsgrad = any(group["amsgrad"] for group in groups)
        groups = [{name: group[name] for name in kept} for group in groups]
        return fastamp.AdamW(groups, amsgrad=amsgrad, moments="8bit")


@contextmanager
def tf32(precision: str) -> Iterator[None]:
    """Switch TF32 in matmuls and in cuDNN as a precision of TF32 says, and back at the end.

    A task that sets torch's newer `fp32_precision` is refused: torch does not mix the two.
    """
    if precision not in TF32:
        yield
        return
    cudnn: Any = torch.backends.cudnn
    with _SWITCHES:
        before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high" if TF32[precision] else "highest")
        cudnn.allow_tf32 = TF32[precision]
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]


def _naive_step(trainer: Trainer) -> None:
    for optimizer in trainer.optimizers:
        trainer.scaler.unscale_(optimizer)
    norm = clip_grad_norm_(trainer.parameters, trainer.training.max_norm or math.inf)
    if torch.isfinite(norm).item():  # the host waits
        _step_each(trainer)


def _stock_step(trainer: Trainer) -> None:
    if trainer.training.max_norm is not None:
        for optimizer in trainer.optimizers:
            trainer.scaler.unscale_(optimizer)
        clip_grad_norm_(trainer.parameters, trainer.training.max_norm)
    _step_each(trainer)


def _step_each(trainer: Trainer) -> None:
    for optimizer in trainer.optimizers:
        trainer.scaler.step(optimizer)


def _fastamp_step(trainer: Trainer) -> None:
    scaler: Any = trainer.scaler  # fastamp.GradScaler, which steps several at once
    scaler.step(trainer.optimizers, max_norm=trainer.training.max_norm, zero_grad=True)


STEPS = {"naive": _naive_step, "stock": _stock_step, "fastamp": _fastamp_step}
