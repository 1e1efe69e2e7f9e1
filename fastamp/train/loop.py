"""`fastamp.fine_tune`: the loop, with mixed precision and checkpoints done right."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from fastamp.metrics import MetricsTracker
from fastamp.step import GradScaler
from fastamp.timer import Timer
from fastamp.train.adapter import Adapter
from fastamp.train.batches import Batches
from fastamp.train.checkpoint import (
    DEFERRED,
    CheckpointError,
    Checkpoints,
    Signals,
    rng_state,
    set_rng_state,
)
from fastamp.train.config import AUTOCAST, TrainConfig
from fastamp.train.ranks import Ranks, join
from fastamp.train.result import Curve, TrainResult
from fastamp.train.setup import (
    Skipped,
    as_found,
    make_optimizer,
    modes_of,
    prepare,
    seed_all,
    set_modes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from fastamp.metrics.sinks import Scalar

__all__ = ["fine_tune"]

_CURVES = {
    "train_loss": "train/loss",
    "val_loss": "val/loss",
    "grad_norm": "train/grad_norm",
    "loss_scale": "train/loss_scale",
    "lr": "train/lr",
}
# What makes two runs the same, beside the optimizer, the precision and the length of the schedule.
_FIXED = [
    "batch_size",
    "accumulate",
    "seed",
    "lr",
    "weight_decay",
    "max_norm",
    "schedule",
    "warmup_steps",
]
_OF_RANKS = ["batch_size", "accumulate", "total_steps"]  # another number of ranks may change them


def fine_tune(
    model: nn.Module, train_data: Any, val_data: Any = None, config: TrainConfig | None = None
) -> TrainResult:
    """Train a model, in place.

    1. The model moves to the device; the run is resumed where `config.checkpoint_dir` has one.
    2. A step: forward and loss under autocast, backward of the scaled loss, for each of
       `config.accumulate` batches; then unscale, check, clip and step at once. The learning rate
       moves on if the step was taken, which is known without a wait one step later.
    3. Evaluation, in the same precision, and checkpoints after an epoch or so many steps.

    With a checkpoint folder SIGTERM and Ctrl-C let the step under way end, with its evaluation, and
    write a checkpoint first. On a CPU a run that is interrupted, or killed, and resumed comes to
    the bit to what it would have been, but for random numbers that workers draw in the middle of an
    epoch.

    Under torchrun, or where torch.distributed is initialised, every rank calls this, with the same
    arguments, and trains on its part of a Dataset or tensors, with DDP or FSDP2; a loader or an
    iterable has to be the rank's part, with as many batches as the others'. What is not yet
    initialised is, and is left at the end: an FSDP2 model, which stays sharded, can then no longer
    be called. Losses are means over the ranks; `config.tracker` is served on the first one; a
    signal to one is a signal to all. Checkpoints are folders, which all ranks can reach, and which
    any number of ranks resumes, with another batch size, too: within an epoch with what is left of
    it, at the same part of the schedule, and with random numbers drawn anew. As many ranks resume
    to the bit, but for buffers, of which the first rank's are kept, and for DDP on more than two
    ranks, whose first sum may be rounded differently.

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
            Or the first one to be written holds what could not be read again.
        OSError: a checkpoint cannot be written; the model and older checkpoints are untouched.
        TypeError: the data, or the model's output, is nothing that can be trained on.
        ValueError: there is no batch, nothing to train, or shapes do not fit.
    """
    config = config or TrainConfig()
    with join(config) as ranks, as_found(model, config, ranks):
        return _train(_Run(model, train_data, val_data, config, ranks))


def _train(run: _Run) -> TrainResult:
    saves = run.config.checkpoint_dir is not None
    with closing(run.tracker), Signals(enabled=saves) as signals:
        return run.train(signals)


class _Run:
    """A run at some step: all that a checkpoint keeps, and what moves it on."""

    def __init__(
        self, model: nn.Module, train_data: Any, val_data: Any, config: TrainConfig, ranks: Ranks
    ) -> None:
        self.config, self.model, self.ranks = config, model, ranks
        self.device, self.precision = config.chosen_device, config.effective_precision
        self.checkpoints = _make_checkpoints(config, ranks)
        self.data = Batches("train_data", train_data, config, ranks, shuffle=True)
        self.held_out = None
        if val_data is not None:
            self.held_out = Batches("val_data", val_data, config, ranks, shuffle=False)
        self.total = self._count_steps()
        self.called, self.evaluated = prepare(model, config, ranks)
        self.adapter = config.adapter or Adapter(config.loss_fn)
        self.optimizer = make_optimizer(model, config, ranks)
        self.scheduler = LambdaLR(self.optimizer, lambda n: config.lr_factor(n, self.total))
        self.scaler = GradScaler(self.device.type, enabled=self.precision == "16-mixed")
        self.timer = Timer(self.device)
        self.tracker = MetricsTracker(sinks=[] if config.tracker is None else [self._hand_on])
        self.step = self.epoch = self.n_skipped = self.evaluated_at = self.n_samples = 0
        self.has_ended = False  # the pass over the data, whose last step may be under way
        self.pending: Skipped | None = None  # of the last step, for the schedule
        self.began: dict[str, Any] | None = None  # where a step under way did, beside workers
        self.losses: list[tuple[int, torch.Tensor]] = []  # of steps, that ranks have not exchanged
        self.saved_at: tuple[int, ...] = ()
        self._resume()
        self.tracker.watch(self.scaler, first_step=self.step + 1)

    def train(self, signals: Signals) -> TrainResult:
        """Train to the end."""
        config, started_s = self.config, time.perf_counter()
        self.optimizer.zero_grad()  # of what was there before
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        max_steps = config.max_steps or math.inf
        epochs = config.epochs if config.max_steps is None else math.inf
        while self.step < max_steps and self.epoch < epochs:
            batches = iter(() if self.has_ended else self.data)
            while self.step < max_steps and self._train_step(batches, signals):
                self._pause(config.eval_every, config.checkpoint_every, signals)
                if config.tracker is not None and self.step % config.log_every == 0:
                    self.tracker.flush()
            if self.step < max_steps:
                self.epoch, self.has_ended = self.epoch + 1, False
                # Whatever has no interval is due after every epoch.
                eval_every, save_every = not config.eval_every, not config.checkpoint_every
                self._pause(int(eval_every), int(save_every), signals)
        self._pause(1, 1, signals)
        return self._make_result(time.perf_counter() - started_s)

    def _pause(self, eval_every: int | None, save_every: int | None, signals: Signals) -> None:
        """Evaluate and save if the step is a multiple of these, and do what a signal asks for."""
        if eval_every and self.step % eval_every == 0 and self.evaluated_at != self.step:
            self._evaluate()
        saves = bool(save_every) and self.step % (save_every or 1) == 0
        if saves or self.ranks.mode is None or self.step % self.config.log_every == 0:
            self._exchange(signals)
        if saves or signals.received is not None:
            self._save()
        signals.deliver()

    def _exchange(self, signals: Signals) -> None:
        """Log what losses there are, as means over the ranks, and hear of the ranks' signals."""
        signals.received, means = signals.heard, [loss for _, loss in self.losses]
        if self.ranks.mode is not None:
            heard = torch.tensor([signals.heard == number for number in DEFERRED])
            summed = self.ranks.sum([*means, *heard.to(self.device)])
            means = [*(summed[: len(means)] / self.ranks.count)]
            flags = zip(DEFERRED, summed[len(means) :], strict=True)
            signals.received = next((number for number, flag in flags if flag), None)
        for (step, _), mean in zip(self.losses, means, strict=True):
            self.tracker.log_scalar("train/loss", mean, step)
        self.losses.clear()

    def _train_step(self, batches: Iterator[tuple[Any, int]], signals: Signals) -> bool:
        """Take a step of the optimizer, of at most `accumulate` batches; False if none is left."""
        if self.checkpoints is not None and getattr(self.data.loader, "num_workers", None):
            self.began = self._own_state()
        try:
            n_samples, full, mean = self._accumulate(batches)
        except RuntimeError:
            if signals.heard is not None and self.began is not None and self.ranks.mode is None:
                self.has_ended = False
                self._pause(None, None, signals)  # it has ended a worker, too: the step is dropped
            raise
        self.began = None
        if not n_samples:
            return False
        self._settle()
        self.step, self.n_samples = self.step + 1, self.n_samples + n_samples
        self.losses.append((self.step, mean * (full / n_samples)))
        self.tracker.log_scalar("train/lr", self.optimizer.param_groups[0]["lr"], self.step)
        with self.timer("step"):
            self._optimize(full / n_samples)
        return True

    def _accumulate(self, batches: Iterator[tuple[Any, int]]) -> tuple[int, int, torch.Tensor]:
        """Return the samples of a step, those of a full one, and the loss for so many."""
        timer, mean = self.timer, torch.zeros((), device=self.device)
        batch, n = self._fetch(batches)
        full, n_samples = n * self.config.accumulate, 0  # in a full step, in this one
        for n_left in reversed(range(self.config.accumulate)):
            if not n:
                break
            following = self._fetch(batches) if n_left else (None, 0)
            n_samples += n
            with self._unless_last(following[1]):
                with timer("forward"), self._autocast():
                    loss = self.adapter(self.called, batch).loss * (n / full)
                with timer("backward"):
                    torch.autograd.backward(self.scaler.scale(loss))
            mean += loss.detach()
            batch, n = following
        return n_samples, full, mean

    def _fetch(self, batches: Iterator[tuple[Any, int]]) -> tuple[Any, int]:
        with self.timer("data"):
            batch, n = next(batches, (None, 0))
        self.has_ended = not n
        return batch, n

    def _unless_last(self, n_following: int) -> AbstractContextManager[None]:
        """Let DDP exchange gradients in the last backward pass of a step only."""
        if n_following and isinstance(self.called, DistributedDataParallel):
            return self.called.no_sync()
        return nullcontext()

    def _optimize(self, factor: float) -> None:
        """Step on the gradients times a factor, which is 1 for a full accumulation."""
        for parameter in self.model.parameters() if factor != 1 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self.scaler.step(self.optimizer, max_norm=self.config.max_norm)
        self.scaler.update()
        assert self.scaler.last_step is not None  # noqa: S101 - there was one
        self.pending = Skipped(self.scaler.last_step.found_inf)
        self.optimizer.zero_grad()

    def _settle(self) -> None:
        """Move the schedule on if the last step was taken."""
        if self.pending:
            self.n_skipped += 1
        elif self.pending is not None:
            self.scheduler.step()
        self.pending = None

    @torch.no_grad()
    def _evaluate(self) -> None:
        if self.held_out is None:
            return
        modes = modes_of(self.model)
        total, n_samples = torch.zeros((2,), dtype=torch.float64, device=self.device)
        with self.timer("evaluate"):
            self.model.eval()
            for batch, n in self.held_out:
                with self._autocast():
                    loss = self.adapter(self.evaluated, batch).loss.double()
                if n:
                    total += loss * n
                n_samples += n
            set_modes(modes)
            total, n_samples = self.ranks.sum([total, n_samples])
        self.tracker.log_scalar("val/loss", total / n_samples, self.step)
        self.evaluated_at = self.step

    def _autocast(self) -> torch.autocast:
        dtype = AUTOCAST[self.precision]
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _hand_on(self, scalars: list[Scalar]) -> None:
        """Give the user's tracker what ours has had."""
        assert self.config.tracker is not None  # noqa: S101 - else this is no sink
        for name, step, value in scalars:
            self.config.tracker.log_scalar(name, value, step)
        self.config.tracker.flush()

    def _count_steps(self) -> int | None:
        """Return the length of the schedule in steps, None for one that has no end."""
        config = self.config
        if config.schedule == "constant":
            return None
        if config.max_steps is not None:
            return config.max_steps
        try:
            return config.epochs * -(-len(self.data.loader) // config.accumulate)
        except TypeError:
            problem = "needs max_steps for data without a length"
            msg = f"schedule: {config.schedule!r} {problem}, or be 'constant'"
            raise ValueError(msg) from None

    def _parts(self) -> dict[str, Any]:
        """Name what has a state of its own, the same on all ranks."""
        return {name: getattr(self, name) for name in ("scheduler", "scaler", "tracker")}

    def _own_state(self) -> dict[str, Any]:
        """Return what every rank has of its own."""
        return {"data": self.data.state_dict(), "rng": rng_state(self.device)}

    def _save(self) -> None:
        place = (self.step, self.epoch, self.evaluated_at)
        if self.checkpoints is None or self.saved_at == place:
            return
        with self.timer("checkpoint"):
            self._settle()
            own = self.began or self._own_state()
            state = own | {name: part.state_dict() for name, part in self._parts().items()}
            state |= {"config": self._identity(), "place": place, "n_skipped": self.n_skipped}
            state["has_ended"] = self.has_ended
            if self.ranks.mode is not None:
                state["ranks"] = self.ranks.gather(own)
            self.checkpoints.save(self.step, state, self.model, self.optimizer)
        self.saved_at = place

    def _resume(self) -> None:
        if self.checkpoints is None:
            return
        state = self.checkpoints.load(self._find_problem)
        if state is None:
            return
        own, as_many = self._own(state)
        try:  # what is the user's changes last
            self.data.load_state_dict(own["data"])
            for name, part in self._parts().items():
                part.load_state_dict(state[name])
            self.checkpoints.restore(state, self.model, self.optimizer)
        except ValueError as error:
            msg = f"checkpoint_dir={self.config.checkpoint_dir}: its newest one does not fit: "
            raise CheckpointError(msg + str(error)) from error
        self.saved_at, self.n_skipped = state["place"], state["n_skipped"]
        self.step, self.epoch, self.evaluated_at = self.saved_at
        self.has_ended = state["has_ended"]
        if as_many:
            set_rng_state(own["rng"], self.device)
            return
        seed_all(self.config.seed, self.ranks.rank, self.step)
        if self.total is not None:  # the same part of the way, in longer or shorter steps
            part = self.scheduler.last_epoch / state["config"]["total_steps"]
            self.scheduler.last_epoch = round(part * self.total)

    def _own(self, state: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return what a checkpoint has for this rank, and whether as many ranks have written it."""
        everyone = state.get("ranks", [state])
        as_many = len(everyone) == self.ranks.count
        return everyone[self.ranks.rank if as_many else 0], as_many

    def _identity(self) -> dict[str, Any]:
        """Return what must be the same for a run to be resumed."""
        own = {"optimizer": type(self.optimizer).__name__, "precision": self.precision}
        fixed = {name: getattr(self.config, name) for name in _FIXED}
        return {"total_steps": self.total, **own, **fixed}

    def _find_problem(self, state: dict[str, Any]) -> str | None:
        """Say why a checkpoint cannot be resumed, None if it can."""
        own, as_many = self._own(state)
        if not (as_many or self.data.is_shared) and own["data"]["n_consumed"]:
            return f"{len(state['ranks'])} ranks wrote it within a pass over loaders of their own"
        pairs = [(state["config"], self._identity())]
        pairs += [(_shapes(state["model"]), _shapes(self.model.state_dict()))]
        may_differ = () if as_many else _OF_RANKS
        for theirs, ours in pairs:
            for name in {**ours, **theirs}:
                if name not in may_differ and theirs.get(name) != ours.get(name):
                    return f"it has {name}={theirs.get(name)!r}, this run {ours.get(name)!r}"
        return None

    def _make_result(self, elapsed_s: float) -> TrainResult:
        self._settle()
        regions, known = self.timer.summary(), self.tracker.summary()
        empty = (np.empty(0, np.int64), np.empty(0))
        curves = {
            field: Curve(*(self.tracker.history(name) if name in known else empty))
            for field, name in _CURVES.items()
        }
        host_s = {name: stats.host for name, stats in regions.items()}
        training_s = elapsed_s - host_s.get("evaluate", 0) - host_s.get("checkpoint", 0)
        is_cuda = self.device.type == "cuda"
        return TrainResult(
            **curves,
            steps=self.step,
            skipped_steps=self.n_skipped,
            precision=self.precision,
            samples_per_s=self.n_samples * self.ranks.count / training_s,
            peak_memory_nbytes=torch.cuda.max_memory_allocated(self.device) if is_cuda else None,
            phase_s={name: stats.total for name, stats in regions.items()},
            wait_share=host_s.get("data", 0) / training_s,
            over_ranks=self.timer.summary_over_ranks() if self.ranks.mode is not None else {},
        )


def _make_checkpoints(config: TrainConfig, ranks: Ranks) -> Checkpoints | None:
    if config.checkpoint_dir is None:
        return None
    folder, keep, resume = config.checkpoint_dir, config.keep, config.resume
    if ranks.mode is None:
        return Checkpoints(folder, keep=keep, resume=resume)
    from fastamp.train.sharded_checkpoint import ShardedCheckpoints  # noqa: PLC0415 - imports DTensor

    return ShardedCheckpoints(folder, keep=keep, resume=resume, ranks=ranks)


def _shapes(tensors: dict[str, Any]) -> dict[str, str]:
    tensors = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    return {name: f"{t.dtype} {[*t.shape]}" for name, t in tensors.items()}
