"""`fastamp.fine_tune`: the loop, with mixed precision and checkpoints done right."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from fastamp.amp import GradScaler
from fastamp.metrics import MetricsTracker
from fastamp.timer import Timer
from fastamp.train.adapter import Adapter
from fastamp.train.batches import Batches, count_samples
from fastamp.train.checkpoint import Checkpoints, Signals, rng_state, set_rng_state
from fastamp.train.config import AUTOCAST, OPTIMIZERS, TrainConfig
from fastamp.train.result import TrainResult, curve_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from fastamp.metrics.sinks import Scalar, Sink

__all__ = ["fine_tune"]

_PHASES = ("data", "forward", "backward", "step", "evaluate", "checkpoint")
# What a run may change when it is resumed; all else would make it another run.
_FREE = {"epochs", "max_steps", "use_amp", "precision", "device", "compile", "num_workers"}
_FREE |= {"eval_every", "log_every", "checkpoint_dir", "checkpoint_every", "keep", "resume"}
_FREE |= {"tracker", "loss_fn", "adapter", "optimizer"}


def fine_tune(
    model: nn.Module,
    train_data: Any,
    val_data: Any = None,
    config: TrainConfig | None = None,
) -> TrainResult:
    """Train a model, in place.

    1. The model moves to the device; the run is resumed where `config.checkpoint_dir` has one.
    2. A step: forward and loss under autocast, backward of the scaled loss, for each of
       `config.accumulate` batches; then unscale, check, clip and step at once. The learning rate
       moves on if the step was taken, which is known without a wait one step later.
    3. Evaluation, in the same precision, and checkpoints at the end of an epoch or so many steps.

    With a checkpoint folder SIGTERM and Ctrl-C let the step under way end, with its evaluation, and
    write a checkpoint first. On a CPU a run that is interrupted, or killed, and resumed comes to
    the bit to what it would have been.

    Args:
        model: its modules are in training mode as they are now, or all if the model itself is not;
            afterwards they are as they were.
        train_data: a Dataset or tensors (one, or a tuple or dict of them), which are shuffled; a
            DataLoader; or any iterable of batches, as a list. See `Adapter.split` on batches.
        val_data: the same, in its order; None evaluates nothing.
        config: None is `TrainConfig()`.

    Returns:
        Loss curves, norms, skipped steps, throughput and more.

    Raises:
        CheckpointError: the newest checkpoint is damaged, or of another model, data or config; the
            message names the newest good one. Nothing has changed by then but the model's device.
        OSError: a checkpoint cannot be written; the model and older checkpoints are untouched.
        TypeError, ValueError: the data or the model's output is none that can be trained on.
    """
    config = config or TrainConfig()
    checkpoints = None
    if config.checkpoint_dir is not None:
        folder = config.checkpoint_dir
        checkpoints = Checkpoints(folder, keep=config.keep, resume=config.resume)
    data = Batches("train_data", train_data, config, shuffle=True)
    held_out = None
    if val_data is not None:
        held_out = Batches("val_data", val_data, config, shuffle=False)
    with _as_found(model, config):
        run = _Run(model, data, held_out, config, checkpoints)
        with Signals(enabled=checkpoints is not None) as signals:
            return run.train(signals)


@contextmanager
def _as_found(model: nn.Module, config: TrainConfig) -> Iterator[None]:
    """Seed what is drawn, and restore the generators, the modules' modes and the plain call."""
    device, compiled = config.chosen_device, model._compiled_call_impl
    modes, before = _modes(model), rng_state(device)
    torch.manual_seed(config.seed)
    np.random.seed(config.seed % 2**32)  # noqa: NPY002 - what a dataset may draw from
    random.seed(config.seed)
    try:
        if not model.training:
            model.train()
        yield
    finally:
        model._compiled_call_impl = compiled
        _set_modes(modes)
        set_rng_state(before, device)


def _modes(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    return [(module, module.training) for module in model.modules()]


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _prepare(model: nn.Module, config: TrainConfig) -> nn.Module:
    """Return what is called in place of the model: the only place where a model is wrapped."""
    model.to(config.chosen_device)
    if config.compile:
        model.compile()
    return model


def _make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        msg = f"model: {type(model).__name__} has no parameter that requires a gradient"
        raise ValueError(msg)
    if not isinstance(config.optimizer, str):
        return config.optimizer(parameters)
    make: Any = OPTIMIZERS[config.optimizer]
    options = {"lr": config.lr, "weight_decay": config.weight_decay}
    try:
        return make(parameters, **options, fused=True)  # type: ignore[no-any-return]
    except RuntimeError:  # torch has none for this device or dtype
        return make(parameters, **options)  # type: ignore[no-any-return]


def _forward_to(tracker: MetricsTracker) -> Sink:
    def sink(scalars: list[Scalar]) -> None:
        for name, step, value in scalars:
            tracker.log_scalar(name, value, step)
        tracker.flush()

    return sink


class _Skipped:
    """Whether a step was skipped: on its way to the host, and read when nobody waits for it."""

    def __init__(self, found_inf: Tensor) -> None:
        self._flag = found_inf.to("cpu", non_blocking=True)
        self._event = torch.cuda.current_stream().record_event() if found_inf.is_cuda else None

    def __bool__(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return bool(self._flag)


class _Run:
    """A run at some step: all that a checkpoint keeps, and what moves it on."""

    def __init__(
        self,
        model: nn.Module,
        data: Batches,
        held_out: Batches | None,
        config: TrainConfig,
        checkpoints: Checkpoints | None,
    ) -> None:
        self.config, self.data, self.held_out = config, data, held_out
        self.checkpoints = checkpoints
        self.device, self.precision = config.chosen_device, config.effective_precision
        self.model, self.called = model, _prepare(model, config)
        self.adapter = config.adapter or Adapter(config.loss_fn)
        self.optimizer = _make_optimizer(model, config)
        self.scaler = GradScaler(self.device.type, enabled=self.precision == "16-mixed")
        self.total = self._count_steps()
        self.scheduler = LambdaLR(self.optimizer, lambda n: config.lr_factor(n, self.total))
        self.timer = Timer(self.device)
        sinks = [] if config.tracker is None else [_forward_to(config.tracker)]
        self.tracker = MetricsTracker(sinks=sinks)
        self.step = self.epoch = self.n_skipped = self.n_samples = self.evaluated_at = 0
        self.pending: _Skipped | None = None  # of the last step, which the scheduler waits for
        self.saved: tuple[int, ...] | None = None
        self._resume()
        self.tracker.watch(self.scaler, first_step=self.step + 1)

    def train(self, signals: Signals) -> TrainResult:
        """Train to the end."""
        started_s = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        every = self.config.checkpoint_every
        while not self._is_done():
            batches = iter(self.data)
            while not self._has_all_steps() and self._train_step(batches):
                self._evaluate(due=_is_due(self.step, self.config.eval_every))
                self._save(due=_is_due(self.step, every) or signals.received is not None)
                if _is_due(self.step, self.config.log_every):
                    self.tracker.flush()
                signals.deliver()
            if not self._has_all_steps():
                self.epoch += 1
                self._evaluate(due=self.config.eval_every is None)
                self._save(due=every is None or signals.received is not None)
                signals.deliver()
        self._evaluate(due=True)
        self._save(due=True)
        self._settle()
        self.tracker.close()
        return self._result(time.perf_counter() - started_s)

    def _train_step(self, batches: Iterator[Any]) -> bool:
        """Take a step of the optimizer, of at most `accumulate` batches; False if none is left."""
        accumulate, timer = self.config.accumulate, self.timer
        full = n_samples = 0  # of a full step, in this one
        mean = torch.zeros((), device=self.device)
        for _ in range(accumulate):
            with timer("data"):
                batch = next(batches, None)
            if batch is None:
                break
            n = count_samples(batch)
            full, n_samples = full or n * accumulate, n_samples + n
            with timer("forward"), self._autocast():
                loss = self.adapter(self.called, batch).loss
            with timer("backward"):
                part = loss * (n / full)
                torch.autograd.backward(self.scaler.scale(part))
            mean += part.detach()
        if not n_samples:
            return False
        with timer("step"):
            self._optimize(full / n_samples)
        self.step, self.n_samples = self.step + 1, self.n_samples + n_samples
        self.tracker.log_scalar("train/loss", mean * (full / n_samples), self.step)
        return True

    def _optimize(self, factor: float) -> None:
        """Step on the gradients times a factor, which is 1 for a full accumulation."""
        self._settle()
        if factor != 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        lr = self.optimizer.param_groups[0]["lr"]
        self.tracker.log_scalar("train/lr", lr, self.step + 1)
        self.scaler.step(self.optimizer, max_norm=self.config.max_norm)
        self.scaler.update()
        assert self.scaler.last_step is not None  # noqa: S101 - there was one
        self.pending = _Skipped(self.scaler.last_step.found_inf)
        self.optimizer.zero_grad()

    def _settle(self) -> None:
        """Move the schedule on if the last step was taken."""
        if self.pending is None:
            return
        if self.pending:
            self.n_skipped += 1
        else:
            self.scheduler.step()
        self.pending = None

    @torch.no_grad()
    def _evaluate(self, *, due: bool) -> None:
        if self.held_out is None or not due or self.evaluated_at == self.step:
            return
        modes, n_samples = _modes(self.model), 0
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self.timer("evaluate"):
            self.model.eval()
            for batch in self.held_out:
                n = count_samples(batch)
                with self._autocast():
                    loss = self.adapter(self.called, batch).loss
                total, n_samples = total + loss * n, n_samples + n
            _set_modes(modes)
        self.tracker.log_scalar("val/loss", total / n_samples, self.step)
        self.evaluated_at = self.step

    def _autocast(self) -> torch.autocast:
        dtype = AUTOCAST[self.precision]
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _is_done(self) -> bool:
        if self.config.max_steps is None:
            return self.epoch >= self.config.epochs
        return self._has_all_steps()

    def _has_all_steps(self) -> bool:
        return self.config.max_steps is not None and self.step >= self.config.max_steps

    def _count_steps(self) -> int | None:
        """Return the length of the schedule in steps, None for one that has no end."""
        if self.config.schedule == "constant":
            return None
        if self.config.max_steps is not None:
            return self.config.max_steps
        try:
            n_batches = len(self.data)
        except TypeError:
            problem = "needs max_steps for data without a length"
            msg = f"schedule: {self.config.schedule!r} {problem}, or be 'constant'"
            raise ValueError(msg) from None
        return self.config.epochs * -(-n_batches // self.config.accumulate)

    def _save(self, *, due: bool) -> None:
        place = (self.step, self.epoch, self.evaluated_at)
        if self.checkpoints is not None and due and self.saved != place:
            with self.timer("checkpoint"):
                self._settle()
                self.checkpoints.save(self.step, self._state_dict())
            self.saved = place

    def _resume(self) -> None:
        if self.checkpoints is None:
            return
        state = self.checkpoints.load(self._find_problem)
        if state is not None:
            self._load_state_dict(state)

    def _parts(self) -> dict[str, Any]:
        """Name what has a state of its own; what may refuse a state comes first."""
        return {
            "data": self.data,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "model": self.model,
            "tracker": self.tracker,
        }

    def _state_dict(self) -> dict[str, Any]:
        return {
            "config": self._identity(),
            "counts": [self.step, self.epoch, self.n_skipped, self.evaluated_at],
            "rng": rng_state(self.device),
            **{name: part.state_dict() for name, part in self._parts().items()},
        }

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.step, self.epoch, self.n_skipped, self.evaluated_at = state["counts"]
        self.saved = (self.step, self.epoch, self.evaluated_at)
        set_rng_state(state["rng"], self.device)

    def _identity(self) -> dict[str, Any]:
        """Return what must be the same for a run to be resumed."""
        fields = {k: v for k, v in vars(self.config).items() if k not in _FREE}
        optimizer = type(self.optimizer).__name__
        own = {"optimizer": optimizer, "precision": self.precision, "total_steps": self.total}
        return fields | own

    def _find_problem(self, state: dict[str, Any]) -> str | None:
        """Say why a checkpoint cannot be resumed, None if it can."""
        for name, ours in self._identity().items():
            theirs = state["config"].get(name)
            if theirs != ours:
                return f"its run has {name}={theirs!r}, this one {name}={ours!r}"
        shapes, theirs = _shapes(self.model.state_dict()), _shapes(state["model"])
        for name in {**shapes, **theirs}:
            if shapes.get(name) != theirs.get(name):
                return f"its {name} is {theirs.get(name)}, the model's {shapes.get(name)}"
        return None

    def _result(self, elapsed_s: float) -> TrainResult:
        regions = self.timer.summary()
        phases = {name: regions[name] for name in _PHASES if name in regions}
        others_s = sum(phases[name].host for name in ("evaluate", "checkpoint") if name in phases)
        training_s = elapsed_s - others_s
        wait_s = phases["data"].host if "data" in phases else 0.0
        is_cuda = self.device.type == "cuda"
        names = ("train/loss", "val/loss", "train/grad_norm", "train/loss_scale", "train/lr")
        train_loss, val_loss, grad_norm, loss_scale, lr = (curve_of(self.tracker, n) for n in names)
        return TrainResult(
            train_loss=train_loss,
            val_loss=val_loss,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            lr=lr,
            steps=self.step,
            skipped_steps=self.n_skipped,
            precision=self.precision,
            samples_per_s=self.n_samples / training_s,
            peak_memory_nbytes=torch.cuda.max_memory_allocated(self.device) if is_cuda else None,
            phase_s={name: stats.total for name, stats in phases.items()},
            wait_share=wait_s / training_s,
        )


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _shapes(tensors: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }
