"""The loop of `fine_tune`: what a run consists of; steps, evaluations and checkpoints, in turn."""

import errno
import logging
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastamp._progress import progress
from fastamp.metrics import MetricsTracker
from fastamp.step import GradScaler, optimizer_step
from fastamp.train import ranks
from fastamp.train.batches import Batches
from fastamp.train.checkpointer import Checkpointer
from fastamp.train.config import AUTOCAST, TrainConfig
from fastamp.train.folder import Folder
from fastamp.train.model_call import ModelCall
from fastamp.train.optimizer import Schedule, find_loss, make_optimizer
from fastamp.train.progress import Progress
from fastamp.train.result import Curve, TrainResult

_LOG = logging.getLogger(__name__)
_SYNC = nullcontext()


class Loop:
    """A run, made or resumed: its parts, and what happens to them step by step."""

    def __init__(
        self, model: nn.Module, train_data: Any, val_data: Any, config: TrainConfig
    ) -> None:
        self.config, self.model, self.n_ranks = config, model, ranks.count()
        self.device, self.precision = config.chosen_device, config.effective_precision
        self.data = Batches("train_data", train_data, config, shuffle=True)
        self.held_out = None if val_data is None else Batches("val_data", val_data, config)
        self.evaluates = self.held_out is not None or config.evaluate is not None
        call = self.model_call = config.model_call or ModelCall(config.loss_fn)
        self._check()
        n_batches, self.n_steps = self.data.n_batches, config.max_steps
        if self.n_steps is None and n_batches is not None:
            self.n_steps = config.epochs * math.ceil(n_batches / config.accumulate)
        if self.n_steps is None and config.schedule != "constant":
            msg = f"schedule: {config.schedule!r} needs max_steps for data without a length"
            raise ValueError(msg)
        self.end = self.n_steps or f"{config.epochs} epochs"
        if self.n_ranks == 1:
            model.to(self.device)
        # In evaluation DDP's own call would exchange buffers.
        self.evaluated: Any = model.module if ranks.is_ddp(model) else model
        self.loss = find_loss(getattr(call, "loss_fn", None), model, self.device)
        trained = nn.ModuleList([model] if self.loss is None else [model, self.loss])
        options = {"lr": config.lr, "weight_decay": config.weight_decay}
        self.optimizer = make_optimizer(trained, config.optimizer, **options)
        self.is_scaled = self.precision == "16-mixed"
        self.scaler = GradScaler(self.device.type, enabled=self.is_scaled)
        lr_factor = partial(config.lr_factor, total=self.n_steps)
        self.schedule = Schedule(self.optimizer, lr_factor, self._log_report)
        self.tracker = MetricsTracker(sinks=[] if config.tracker is None else [self._hand_on])
        self.progress = Progress(config, self.n_steps, self.schedule)
        self.saved_at: tuple[int, ...] = ()
        self.compared: float | None = None  # the metric of this step, if it is the best so far
        self.best_weights: Any = None  # on the host, where no checkpoint has them
        self.resumed = ""
        self.checkpointer = None if config.checkpoint_dir is None else self._resume()
        scales = self.tracker.summary().get("train/loss_scale")
        self.scale = scales and scales.last  # as logged
        dtype = AUTOCAST[self.precision]
        # Around mixed steps autocast would not clear its cache: each call has its own.
        around: Any = torch.autocast(self.device.type, dtype) if dtype else lambda call: call
        self.split = around(call.split_for)
        self.evaluate = around(config.evaluate or (lambda _: {}))
        self.loss_of = around(lambda model, x, y: call.loss(call.forward(model, x), y))
        # DDP exchanges gradients in the last backward pass of a step only.
        self.no_sync: Any = getattr(model, "no_sync", nullcontext)

    def _check(self) -> None:
        """Raise an error if the data or the model's call cannot do what the options ask for."""
        config = self.config
        compares = config.keep_best or config.patience is not None
        if compares and self.held_out is None and config.metric == "loss":
            msg = "keep_best, patience: expected val_data, whose loss says which is best, got None"
            raise ValueError(msg)
        every = config.checkpoint_every or (config.keep_best and config.eval_every)
        if every and config.checkpoint_dir is not None and not self.data.has_state:
            msg = "checkpoint_every, eval_every: expected None, as train_data has no state_dict: "
            raise ValueError(msg + f"checkpoints are written at the end of an epoch; got {every}")
        if type(self.model_call).__call__ is not ModelCall.__call__:
            msg = "model_call: fine_tune calls split, forward, loss and count, not its __call__"
            raise TypeError(msg)

    def train(self) -> TrainResult:
        """Train to the end."""
        config, is_first = self.config, ranks.rank() == 0
        if is_first and (config.progress or self.resumed):
            said = self.resumed or f"fine_tune: begins at step 0 of {self.end}"
            _LOG.warning("%s, on %s in %s", said, self.device, self.precision)
        signals: Any = nullcontext()
        if self.checkpointer is not None and self.data.has_state:  # else the last one stands
            signals = self.checkpointer.on_signal()
        bar = progress(self.n_steps, self.progress.step, shows=config.progress and is_first)
        with closing(self.tracker), signals, bar as advance:
            self._run_epochs(advance)
            result = self._make_result()
            if self.best_weights is not None:
                self.evaluated.load_state_dict(self.best_weights)
            elif config.keep_best and self.checkpointer and self.checkpointer.best_path:
                self.checkpointer.restore(only=("model",), best=True)
        if config.progress and is_first:
            _LOG.warning("fine_tune: %s", "; ".join(str(result).splitlines()))
        return result

    def _run_epochs(self, advance: Any) -> None:
        self.optimizer.zero_grad()  # drop the gradients from before
        accumulate = self.config.accumulate
        while not self.progress.ended_by:
            self.data.set_epoch(self.progress.epoch)
            for name, data in {"train_data": self.data, "val_data": self.held_out}.items():
                lengths = ranks.gather(None if data is None else data.n_batches)
                if len({*lengths}) > 1:
                    msg = f"{name}: expected as many batches on every rank, got {lengths}"
                    raise ValueError(msg)
            batches, self.progress.is_within = iter(self.data), True
            while self.progress.is_within and not self.progress.ended_by:
                fetched = [*islice(batches, accumulate)]  # less are the last ones
                self.progress.is_within = len(fetched) == accumulate
                self.progress.epoch += not self.progress.is_within
                if has_step := len(fetched) > 0:
                    self._train_step(fetched)
                    advance()
                self._pause(has_step=has_step)
        self._pause(ends=True)  # while `batches` are held: their end would end the epoch

    def _pause(self, *, has_step: bool = False, ends: bool = False) -> None:
        """Evaluate, save and flush where they are due: without an interval, after an epoch."""
        step, config, epoch_ends = self.progress.step, self.config, not self.progress.is_within
        every = config.eval_every
        is_due = epoch_ends if every is None else has_step and step % every == 0
        if self.evaluates and (is_due or ends) and self.progress.evaluated_at != step:
            self._evaluate()
        if self.checkpointer is not None:
            every = config.checkpoint_every
            is_due = epoch_ends if every is None else has_step and step % every == 0
            is_due |= ends or self.compared is not None
            if is_due and self.saved_at != self.progress.place:
                self.checkpointer.save(step, metric=self.compared)
                self.saved_at = self.progress.place
            elif self.data.has_state:
                self.checkpointer.save(step, every=step + 1)  # only if a signal has come
        if config.tracker is not None and step % config.log_every == 0:
            self.tracker.flush()

    def _train_step(self, batches: list[tuple[Any, int]]) -> None:
        """Take a step of the optimizer, by the mean loss over this rank's targets of the step."""
        parts, shares = [], []
        total: Any = 0
        for batch, n_samples in batches:
            inputs, target = self.split(self.model, batch)
            parts.append((inputs, target, self.model_call.count(target, n_samples)))
            total += parts[-1][2]
        batches.clear()  # `parts` are freed one by one
        while parts:
            inputs, target, n = parts.pop(0)
            with self.no_sync() if parts else _SYNC:
                loss = share(self.loss_of(self.model, inputs, target), n, total)
                torch.autograd.backward(self.scaler.scale(loss) if self.is_scaled else loss)
            shares.append(loss.detach())
        mean: Any = sum(shares[1:], shares[0])
        if not (isinstance(total, int) and total):
            mean = mean / (total > 0)  # NaN if no target counts
        if self.n_ranks > 1:
            dist.all_reduce(mean)
            mean /= self.n_ranks
        lr = self.schedule.read()  # and log the report of the step before
        self.progress.step = step = self.progress.step + 1
        self.compared = None
        self.tracker.log_scalar("train/loss", mean.item() if mean.is_cpu else mean, step)
        self.tracker.log_scalar("train/lr", lr, step)
        if self.is_scaled:
            self.scaler.step(self.optimizer, max_norm=self.config.max_norm, zero_grad=True)
            report = self.scaler.last_step
            self.scaler.update()
        else:
            report = optimizer_step(self.optimizer, self.config.max_norm, zero_grad=True)
        self.schedule.advance(report.stacked())

    def _log_report(self, numbers: list[float]) -> None:
        """Log what the last step found."""
        (norm, found_inf, *_, scale), step = numbers, self.progress.step
        if self.is_scaled or self.config.max_norm is not None:
            self.tracker.log_scalar("train/grad_norm", norm, step)
        if found_inf:
            self.tracker.log_scalar("train/gradient_overflow", 1.0, step)
            self.tracker.log_scalar("train/skipped_steps", step - self.schedule.n_taken, step)
        if self.is_scaled and scale != self.scale:
            self.scale = scale
            self.tracker.log_scalar("train/loss_scale", scale, step)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Evaluate, log the numbers, and find out whether the run ends."""
        config, numbers, step = self.config, {}, self.progress.step
        with modes_kept(self.model):
            self.model.eval()
            if self.held_out is not None:
                numbers["loss"] = self._mean_loss(self.held_out)
            named = self.evaluate(self.evaluated)
            try:
                own = {name: float(number) for name, number in named.items()}
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                msg = f"evaluate: expected named numbers, as {{'auc': 0.9}}, got {named!r:.200}"
                raise TypeError(msg) from error
            numbers |= ranks.gather(own)[0]
        for name, value in numbers.items():
            self.tracker.log_scalar(f"val/{name}", value, step)
        self.progress.evaluated_at = step
        if config.keep_best or config.patience:
            if config.metric not in numbers:
                msg = f"metric: expected one of {', '.join(numbers)}, got {config.metric!r}"
                raise ValueError(msg)
            if self.progress.compare(numbers[config.metric]) and config.keep_best:
                self.compared = numbers[config.metric]
            if self.compared is not None and self.checkpointer is None:
                on_host = partial(Tensor.to, device="cpu", copy=True)
                self.best_weights = tree_map_only(Tensor, on_host, self.evaluated.state_dict())
        if config.on_evaluation is not None:
            stops = config.on_evaluation(step, numbers) is True
            self.progress.is_stopped |= ranks.gather(stops)[0]

    def _mean_loss(self, data: Batches) -> float:
        """Return the mean loss over all targets that count, of all ranks; NaN without any."""
        found = []
        for batch, n_samples in data:
            inputs, target = self.split(self.evaluated, batch)
            n = self.model_call.count(target, n_samples)
            found.append((self.loss_of(self.evaluated, inputs, target), n))
        counted = [(float(loss), float(n)) for loss, n in found if n]  # waits once, at the end
        sums = ranks.gather((sum(loss * n for loss, n in counted), sum(n for _, n in counted)))
        total = sum(n for _, n in sums)
        return sum(loss for loss, _ in sums) / total if total else math.nan

    def _make_result(self) -> TrainResult:
        self.schedule.read()  # the last step's report
        names = self.tracker.summary()
        curves = defaultdict(Curve, {n: Curve(*self.tracker.history(n)) for n in names})
        evaluated = [name for name in names if name.startswith("val/") and name != "val/loss"]
        return TrainResult(
            train_loss=curves["train/loss"],
            val_loss=curves["val/loss"],
            metrics={name[4:]: curves[name] for name in evaluated},
            grad_norm=curves["train/grad_norm"],
            loss_scale=curves["train/loss_scale"],
            lr=curves["train/lr"],
            steps=self.progress.step,
            skipped_steps=self.progress.step - self.schedule.n_taken,
            best_checkpoint=None if self.checkpointer is None else self.checkpointer.best_path,
            precision=self.precision,
        )

    def _resume(self) -> Checkpointer:
        """Return the checkpointer; restore the newest checkpoint, if there is one, and say so."""
        config, place = self.config, self.progress
        folder = Folder(config.checkpoint_dir or "", keep=config.keep)
        made = next(path for path in (folder.path, *folder.path.parents) if path.exists())
        if not os.access(made, os.W_OK):
            raise PermissionError(errno.EACCES, "checkpoint_dir cannot be written to", str(made))
        if not config.resume and (newest := folder.newest()) is not None:
            msg = f"resume: expected True, as {folder.path} has the checkpoint of step {newest}"
            raise ValueError(msg)
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        parts |= {"scaler": self.scaler, "progress": place, "tracker": self.tracker}
        parts |= {"loss_fn": self.loss, "loader": self.data.loader if self.data.has_state else None}
        best = place.mode if config.keep_best else None
        checkpointer = Checkpointer(folder.path, keep=config.keep, best=best, **parts)
        step = checkpointer.restore()
        if step is None:
            return checkpointer
        self.saved_at, at = place.place, f"step {step} of {self.end}"
        self.data.is_resumed = place.is_within and self.data.has_state
        place.epoch += place.is_within and not self.data.has_state  # the run ended within an epoch
        if place.ended_by and not (self.evaluates and place.evaluated_at != step):
            msg = f"{folder.path}: nothing is left to train at {at}: more {place.ended_by} resumes"
            raise ValueError(msg + ", another folder starts anew")
        self.schedule.set_lr()  # of this run's length
        self.resumed = f"{folder.path}: resumed at {at}"
        self.resumed += f", its next learning rate is {self.schedule.read():g}"
        return checkpointer

    def _hand_on(self, scalars: list[Any]) -> None:
        """Pass our tracker's scalars on to the user's."""
        tracker: Any = self.config.tracker
        for scalar in scalars:
            name, step, value = scalar
            tracker.log_scalar(name, value, step, time_s=scalar.time_s)
        tracker.flush()


def share(loss: Tensor, n: Any, n_targets: Any) -> Tensor:
    """Return a batch's share of the mean loss over all targets, of which it has `n`; 0 if none."""
    if isinstance(n, Tensor) or isinstance(n_targets, Tensor):
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
