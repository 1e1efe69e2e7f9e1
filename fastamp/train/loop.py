"""The loop of `fine_tune`: what a run consists of; steps, evaluations and checkpoints, in turn."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastamp._progress import progress
from fastamp.data import DataLoader
from fastamp.metrics import MetricsTracker
from fastamp.metrics.sinks import Logged
from fastamp.step import GradScaler
from fastamp.timer import Timer
from fastamp.train.batches import Batches
from fastamp.train.checkpointer import Checkpointer
from fastamp.train.config import AUTOCAST, TrainConfig
from fastamp.train.folder import Folder
from fastamp.train.model_call import ModelCall
from fastamp.train.optimizer import Schedule, check_saved, find_loss, make_optimizer
from fastamp.train.progress import Progress
from fastamp.train.random_state import seed_all
from fastamp.train.ranks import Ranks
from fastamp.train.result import CURVES, Curve, TrainResult, compare_ranks
from fastamp.train.signals import DEFERRED, Signals

Part: TypeAlias = tuple[Any, Any, Any]  # a batch's inputs, its target, how many targets count
NO_STATE = "train_data has no state_dict: checkpoints are written at the end of an epoch"
_LOG = logging.getLogger(__name__)


class _Checkpointer(Checkpointer):
    """One whose errors name the arguments of a TrainConfig."""

    _argument, _anew = "checkpoint_dir", "another checkpoint_dir starts anew"


class Loop:
    """A run, made or resumed: its parts, and what happens to them step by step."""

    def __init__(
        self, model: nn.Module, train_data: Any, val_data: Any, config: TrainConfig, ranks: Ranks
    ) -> None:
        compares = "keep_best" if config.keep_best else "patience"
        self.compares = config.keep_best or config.patience is not None
        if self.compares and val_data is None and config.metric == "loss":
            msg = f"{compares}: expected val_data, whose loss says which is best, got None"
            raise ValueError(msg)
        self.config, self.model, self.ranks = config, model, ranks
        self.device, self.precision = config.chosen_device, config.effective_precision
        self.data = Batches("train_data", train_data, config, ranks, shuffle=True)
        self._refuse_within_epoch()
        self.held_out = None
        if val_data is not None:
            self.held_out = Batches("val_data", val_data, config, ranks, shuffle=False)
        self.total = self._count_steps()
        if ranks.mode is None:
            model.to(self.device)
        # In evaluation DDP's own call would exchange buffers.
        self.evaluated = model.module if isinstance(model, DistributedDataParallel) else model
        self.model_call = config.model_call or ModelCall(config.loss_fn)
        if type(self.model_call).__call__ is not ModelCall.__call__:
            name = type(self.model_call).__name__
            msg = f"model_call: {name} overrides __call__, which fine_tune does not call: override "
            raise TypeError(msg + "split, forward, loss or count")
        has_ranks = ranks.mode is not None
        loss_fn = getattr(self.model_call, "loss_fn", None)
        self.loss = find_loss(loss_fn, model, self.device, has_ranks=has_ranks)
        options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        self.optimizer = make_optimizer(model, config.optimizer, loss=self.loss, **options)
        self.scaler = GradScaler(self.device.type, enabled=self.precision == "16-mixed")
        self.schedule = Schedule(
            self.optimizer, self.scaler, lambda n: config.lr_factor(n, self.total)
        )
        self.timer = Timer(self.device if self.device.type == "cuda" else "cpu")
        self.tracker = MetricsTracker(sinks=[] if config.tracker is None else [self._hand_on])
        self.progress = Progress(config, self.total, ranks.count)
        self.saved_at: tuple[int, ...] = ()
        self.compared = math.nan  # the metric of this step, if it was evaluated and is compared
        self.is_best = False  # and the best one so far
        folder = config.checkpoint_dir
        self.checkpointer = None if folder is None else self._resume(folder)
        self.tracker.watch(self.scaler, first_step=self.progress.step + 1)
        self.n_samples, dtype = 0, AUTOCAST[self.precision]
        self.autocast = torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)
        # DDP exchanges gradients in the last backward pass of a step only.
        self.no_sync: Any = model.no_sync if ranks.mode == "ddp" else nullcontext
        self.losses: list[tuple[int, torch.Tensor, float]] = []  # with step and time, to be logged
        self.advance: Callable[..., object] = lambda: None
        self.signals = Signals(DEFERRED if self.checkpointer is not None else ())

    def train(self) -> TrainResult:
        """Train to the end."""
        start_s = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        shows = self.config.progress and self.ranks.rank == 0
        bar = progress(self.total or self.config.max_steps, self.progress.step, shows=shows)
        with closing(self.tracker), self.signals, bar as self.advance:
            self._run_epochs()
            self.schedule.read_flag()
            self._pause(1, 1)
            return self._make_result(time.perf_counter() - start_s)

    def _run_epochs(self) -> None:
        config = self.config
        self.optimizer.zero_grad()  # drop the gradients from before
        max_steps = config.max_steps or math.inf
        epochs = config.epochs if config.max_steps is None else math.inf
        while self.progress.step < max_steps and self.progress.epoch < epochs:
            if not self.progress.has_ended:
                self.data.set_epoch(self.progress.epoch)
            self._compare_lengths()
            batches = iter(() if self.progress.has_ended else self.data)
            while self.progress.step < max_steps and self._train_step(batches):
                self._pause(config.eval_every, config.checkpoint_every)
                if config.tracker is not None and self.progress.step % config.log_every == 0:
                    self.tracker.flush()
                if self.progress.is_stopped:
                    return
            if self.progress.step < max_steps:
                self.progress.epoch, self.progress.has_ended = self.progress.epoch + 1, False
                # What has no interval is due after every epoch.
                self._pause(not config.eval_every, not config.checkpoint_every)
                if self.progress.is_stopped:
                    return

    def _compare_lengths(self) -> None:
        """Raise a ValueError on all ranks if they have unlike numbers of batches."""
        compared = {"train_data": self.data}
        if self.ranks.mode == "fsdp" and self.held_out is not None:
            compared["val_data"] = self.held_out  # ranks gather parameters for each of its batches
        for name, data in compared.items() if self.ranks.mode is not None else ():
            lengths = self.ranks.gather(data.n_batches)
            if len({*lengths}) > 1:
                msg = f"{name}: expected as many batches on every rank, got {lengths}"
                raise ValueError(msg)

    def _pause(self, eval_every: int | None, save_every: int | None) -> None:
        """Evaluate and save if the step is a multiple of these, and obey a signal."""
        if (
            eval_every
            and self.progress.step % eval_every == 0
            and self.progress.evaluated_at != self.progress.step
        ):
            self._evaluate()
        saves = bool(save_every) and self.progress.step % (save_every or 1) == 0
        saves = saves or self.is_best
        received = None
        if saves or self.ranks.mode is None or self.progress.step % self.config.log_every == 0:
            received = self._exchange()
        if saves or (received is not None and self.data.can_resume):
            self.save()
        if received is not None:
            if not self.data.can_resume:
                _LOG.warning("%s: %s", NO_STATE, "the last one stands")
            self.signals.deliver(received)

    def _exchange(self) -> int | None:
        """Log the losses, as means over the ranks; return a signal that a rank has received."""
        received, means = self.signals.received, [loss for _, loss, _ in self.losses]
        if self.ranks.mode is not None:
            flags = torch.tensor([received == number for number in DEFERRED]).to(self.device)
            summed = self.ranks.sum([*means, *flags])
            means = [*(summed[: len(means)] / self.ranks.count)]
            counts = zip(DEFERRED, summed[len(means) :], strict=True)
            received = next((number for number, count in counts if count), None)
        for (step, _, time_s), mean in zip(self.losses, means, strict=True):
            self.tracker.log_scalar("train/loss", mean, step, time_s=time_s)
        self.losses.clear()
        return received

    def _train_step(self, batches: Iterator[tuple[Any, int]]) -> bool:
        """Take a step of the optimizer, of at most `accumulate` batches; False if none is left."""
        with self.timer("data"):
            found = [*islice((one for one in batches if one[1]), self.config.accumulate)]
        self.progress.has_ended = len(found) < self.config.accumulate
        self.n_samples += sum(n for _, n in found)
        parts = [self._split(batch, n) for batch, n in found]
        del found  # `parts` are freed one by one
        n_targets = sum(n for *_, n in parts)
        if not parts:
            return False
        self.progress.step += 1
        self.compared, self.is_best = math.nan, False
        loss = self._accumulate(parts, n_targets)
        self.advance()
        self.losses.append((self.progress.step, loss, time.time()))
        self.tracker.log_scalar("train/lr", self.schedule.lr, self.progress.step)
        with self.timer("step"):
            self.scaler.step(self.optimizer, max_norm=self.config.max_norm)
            self.schedule.advance(self.scaler.last_step.found_inf)
            self.scaler.update()
            self.optimizer.zero_grad()
        return True

    def _split(self, batch: Any, n_samples: int) -> Part:
        """Return the inputs and the target of a batch, and how many targets count."""
        with self.autocast:
            inputs, target = self.model_call.split_for(self.model, batch)
        return inputs, target, self.model_call.count(target, n_samples)

    def _accumulate(self, parts: list[Part], n_targets: Any) -> torch.Tensor:
        """Add up the gradients of the mean loss over this rank's targets of a step; return it."""
        timer = self.timer
        mean: torch.Tensor = torch.zeros((), dtype=torch.float32, device=self.device)
        while parts:
            inputs, target, n = parts.pop(0)
            with self.no_sync() if parts else nullcontext():
                with timer("forward"), self.autocast:
                    output = self.model_call.forward(self.model, inputs)
                    loss = share(self.model_call.loss(output, target), n, n_targets)
                del inputs, target, output
                with timer("backward"):
                    torch.autograd.backward(self.scaler.scale(loss))
            mean = mean + loss.detach()
        averaged: torch.Tensor = mean / (n_targets > 0)  # of none it is NaN
        return averaged

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Evaluate, log the numbers, and find out whether the run ends."""
        if not self.evaluates:
            return
        config, numbers = self.config, {}
        if self.held_out is not None:
            numbers["loss"] = self._mean_loss(self.held_out)
        if config.evaluate is not None:
            with self.timer("evaluate"), modes_kept(self.model):
                self.model.eval()
                named = config.evaluate(self.evaluated)
            numbers |= self.ranks.gather({k: float(v) for k, v in named.items()})[0]
        for name, value in numbers.items():
            self.tracker.log_scalar(f"val/{name}", value, self.progress.step)
        self.progress.evaluated_at = self.progress.step
        if self.compares and config.metric not in numbers:
            msg = f"metric: expected one of {', '.join(numbers)}, got {config.metric!r}"
            raise ValueError(msg)
        if self.compares:
            compared = float(numbers[config.metric])
            self.compared = compared if config.keep_best else math.nan
            is_best = self.progress.compare(compared) or not self._has_best()
            self.is_best = is_best and not math.isnan(self.compared)
        if config.on_evaluation is not None:
            seen = {name: float(value) for name, value in numbers.items()}
            stops = config.on_evaluation(self.progress.step, seen) is True
            self.progress.is_stopped |= self.ranks.gather(stops)[0]

    def _mean_loss(self, data: Batches) -> torch.Tensor:
        """Return the mean loss over all targets that count."""
        loader = data.loader
        if isinstance(loader, DataLoader) and loader is not self.data.loader:
            loader.set_epoch(0)  # the same order each time, wherever the run was resumed
        # Metal has no float64.
        device = torch.device("cpu") if self.device.type == "mps" else self.device
        total, n_targets = torch.zeros((2,), dtype=torch.float64, device=device)
        with self.timer("evaluate"), modes_kept(self.model):
            self.model.eval()
            for batch, n_samples in data:
                inputs, target, n = self._split(batch, n_samples)
                n = n if n_samples else 0  # else all are padding of this rank's share
                with self.autocast:
                    output = self.model_call.forward(self.evaluated, inputs)
                    loss = self.model_call.loss(output, target).to(device).double()
                total += share(loss, n, 1)
                n_targets += n
            total, n_targets = self.ranks.sum([total, n_targets])
        mean: torch.Tensor = total / n_targets
        return mean

    def save(self) -> None:
        """Write a checkpoint unless this step has one."""
        if self.checkpointer is None or self.saved_at == self.progress.place:
            return
        self.schedule.read_flag()  # the optimizer's state has the rate, too
        with self.timer("checkpoint"):
            self.checkpointer.save(self.progress.step, metric=self.compared)
        self.saved_at = self.progress.place

    def _has_best(self) -> bool:
        return self.checkpointer is not None and self.checkpointer.best_path is not None

    def _make_result(self, elapsed_s: float) -> TrainResult:
        regions, known = self.timer.summary(), self.tracker.summary()
        empty = (np.empty(0, np.int64), np.empty(0))
        curves = {
            field: Curve(*(self.tracker.history(name) if name in known else empty))
            for field, name in CURVES.items()
        }
        host_s = {name: stats.host for name, stats in regions.items()}
        training_s = elapsed_s - host_s.get("evaluate", 0) - host_s.get("checkpoint", 0)
        is_cuda = self.device.type == "cuda"
        mean_s = {name: stats.mean for name, stats in regions.items() if stats.count}
        evaluated = {name[4:] for name in known if name.startswith("val/")} - {"loss"}
        return TrainResult(
            **curves,
            metrics={name: Curve(*self.tracker.history(f"val/{name}")) for name in evaluated},
            steps=self.progress.step,
            best_checkpoint=None if self.checkpointer is None else self.checkpointer.best_path,
            skipped_steps=self.schedule.n_skipped,
            precision=self.precision,
            samples_per_s=sum(self.ranks.gather(self.n_samples)) / training_s,
            peak_memory_nbytes=torch.cuda.max_memory_allocated(self.device) if is_cuda else None,
            phase_s={name: stats.total for name, stats in regions.items()},
            wait_share=host_s.get("data", 0) / training_s,
            over_ranks=compare_ranks(self.ranks.gather(mean_s)) if self.ranks.mode else {},
        )

    def _resume(self, path: Any) -> Checkpointer:
        """Return the checkpointer; restore the newest checkpoint, if there is one, and say so.

        Raises:
            ValueError: nothing is left to train, or there is a checkpoint that is not wanted.
        """
        config, progress = self.config, self.progress
        folder = Folder(path, keep=config.keep, argument="checkpoint_dir")
        newest = folder.newest()
        if newest is not None and not config.resume:
            has = f"{folder.title} has the checkpoint of step {newest}"
            msg = f"resume: expected True, as {has}; another folder starts anew"
            raise ValueError(msg)
        check_saved(self.optimizer, self.model, self.loss)
        parts: dict[str, Any] = {"progress": progress, "optimizer": self.optimizer}
        parts |= {"loader": self.data, "scaler": self.scaler, "scheduler": self.schedule}
        parts |= {"tracker": self.tracker} | ({} if self.loss is None else {"loss_fn": self.loss})
        best = config.mode if config.keep_best else None
        parts |= {"model": self.model, "keep": config.keep, "best": best}
        checkpointer = _Checkpointer(folder.path, **parts)
        step = checkpointer.restore()
        if step is None:
            return checkpointer
        self.saved_at = progress.place
        if not self.data.can_resume:  # the run ended within an epoch
            progress.epoch, self.data.n_consumed = progress.epoch + 1, 0
        at, former = f"step {step} of {self._length()}", progress.former_total
        if progress.has_trained and not (self.evaluates and progress.evaluated_at != step):
            remedy = "more max_steps or epochs continue it, another checkpoint_dir starts anew"
            msg = f"{folder.title}: nothing is left to train at {at}: {remedy}"
            raise ValueError(msg)
        said = f"resumed at {at}"
        if progress.former_ranks != self.ranks.count:
            seed_all(config.seed, self.ranks.rank, step)
            if self.total is not None and former is not None:
                self.schedule.rescale(former, self.total)
        elif self.total != former:
            self.schedule.set_lr()
            said += f", a longer run than {former}: its next learning rate is {self.schedule.lr:g}"
        if self.ranks.rank == 0:
            _LOG.warning("%s: %s", folder.title, said)
        return checkpointer

    def _refuse_within_epoch(self) -> None:
        """Raise a ValueError if checkpoints within an epoch are asked for that cannot resume."""
        config = self.config
        asked = {"checkpoint_every": config.checkpoint_every}
        asked |= {"eval_every": config.eval_every} if config.keep_best else {}
        for name, every in asked.items():
            if every is not None and config.checkpoint_dir is not None and not self.data.has_state:
                beside = " with keep_best" if name == "eval_every" else ""
                msg = f"{name}: expected None{beside}, as {NO_STATE}; got {every}"
                raise ValueError(msg)

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate."""
        return self.held_out is not None or self.config.evaluate is not None

    def _hand_on(self, scalars: list[Logged]) -> None:
        """Pass our tracker's scalars on to the user's."""
        assert self.config.tracker is not None  # noqa: S101 - else this is no sink
        for scalar in scalars:
            name, step, value = scalar
            self.config.tracker.log_scalar(name, value, step, time_s=scalar.time_s)
        self.config.tracker.flush()

    def _count_steps(self) -> int | None:
        """Return the length of the schedule in steps, None if it has none."""
        if self.config.schedule == "constant":
            return None
        length = self._length()
        if isinstance(length, int):
            return length
        problem = "needs max_steps for data without a length; 'constant' does not"
        msg = f"schedule: {self.config.schedule!r} {problem}"
        raise ValueError(msg)

    def _length(self) -> int | str:
        """Return the length of the run in steps, or in words for data without a length."""
        config = self.config
        if config.max_steps is not None:
            return config.max_steps
        if self.data.n_batches is None:
            return f"{config.epochs} epochs"
        return config.epochs * math.ceil(self.data.n_batches / config.accumulate)


def share(loss: torch.Tensor, n: Any, n_targets: Any) -> torch.Tensor:
    """Return a batch's share of the mean loss over all targets, of which it has `n`.

    The loss of a batch without targets may be NaN: it becomes 0, and so do its gradients.
    """
    if isinstance(n, torch.Tensor) or isinstance(n_targets, torch.Tensor):
        n = torch.as_tensor(n, dtype=torch.float64, device=loss.device)
        weight = torch.where(n > 0, n / n_targets, 0.0).to(loss.dtype)
        return torch.where(n > 0, loss, 0.0) * weight
    if n == n_targets and n:
        return loss
    return loss * (n / n_targets) if n else 0.0 * loss.nan_to_num(0.0, 0.0, 0.0)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the mode of every module, training or evaluation, at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
