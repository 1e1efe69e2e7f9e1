"""`fastamp.fine_tune`: the training loop, with mixed precision and checkpoints."""

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

from fastamp._progress import progress
from fastamp.data import DataLoader
from fastamp.train.batches import Batches
from fastamp.train.config import AUTOCAST, TrainConfig
from fastamp.train.random_state import rng_state, seed_all, set_rng_state
from fastamp.train.ranks import find_ranks
from fastamp.train.result import CURVES, Curve, TrainResult, compare_ranks
from fastamp.train.run import NO_STATE, Run
from fastamp.train.signals import DEFERRED, Signals

_LOG = logging.getLogger(__name__)
Part: TypeAlias = tuple[Any, Any, Any]  # a batch's inputs, its target, how many targets count


def fine_tune(
    model: nn.Module, train_data: Any, val_data: Any = None, config: TrainConfig | None = None
) -> TrainResult:
    """Train a model in place: fine-tune a pretrained one, or train one from scratch.

    1. The model moves to the device. If `config.checkpoint_dir` holds a run, it is resumed, and
       the log says "resumed at step N of M", on standard error unless logging is set up.
    2. A step: `config.accumulate` batches are fetched; for each of them forward and loss under
       autocast, and backward of the scaled loss; then unscale, check, clip and step at once. The
       gradient is that of the mean over the step's targets, without those that are -100
       (`ModelCall.count`): one batch of 8 or two of 4 make no difference. A step in which none
       counts has gradients of 0, and NaN as its loss. The learning rate advances after a step that
       was taken; the loop learns of that one step later, without a wait.
    3. After every epoch, or as often as the config says: evaluation in the same precision, with
       `config.evaluate`, and a checkpoint. `config.patience` or `config.on_evaluation` may end the
       run.

    With a checkpoint folder, after SIGTERM or Ctrl-C the current step and its evaluation finish,
    and a checkpoint is written. A second signal acts at once, for a step that never ends, as when
    the data hang. If the same signal ends worker processes too, the last checkpoint stands. A
    damaged checkpoint is passed over with one warning. On a CPU a run that is interrupted or
    killed, and resumed, is bit-identical, except for random numbers that worker processes draw
    within an epoch, or that a loader without a state draws from a generator of its own.

    If the loader has no `state_dict`, as torch's, checkpoints are written at the end of an epoch
    and of the run: after a signal the last one stands. A longer run begins the next epoch.

    Over ranks every rank calls this with the same arguments, and with a model on its device that is
    in DistributedDataParallel or sharded by `fully_shard`. A Dataset or tensors are divided among
    the ranks. A loader must yield the rank's part, as with `shard=True` or a DistributedSampler,
    and as many batches as on the other ranks: `len` of it is compared when an epoch begins; without
    one, you promise it. As in torch, gradients and training losses are means over the ranks, each
    of its own targets; validation losses are means over all ranks' targets. Only the first rank
    logs to `config.tracker`; a signal to one rank is a signal to all.

    All ranks must be able to read the folder of checkpoints. The same number of ranks
    resumes bit-identically, except for buffers, of which the first rank's are kept, and for DDP on
    more than two ranks, whose first sum may be rounded differently. Any other number of ranks can
    resume too, also with another batch size: with the rest of the epoch, at the same share of the
    schedule, and with new random numbers.

    Args:
        model: its modules keep their training or evaluation mode; if the model itself is in
            evaluation mode, all modules train. Afterwards all have the mode they had before.
        train_data: a Dataset, as a list of samples is one, or tensors (one, or a tuple or dict of
            them), which are shuffled; a DataLoader; or any other iterable of batches. A list of
            batches is passed as `torch.utils.data.DataLoader(batches, batch_size=None)`. See
            `ModelCall.split` on batches. Before each epoch, from 0, `set_epoch(epoch)` is called,
            where it exists: of the loader or else of its samplers, and of the loader's dataset.
        val_data: as `train_data`, but not shuffled; None evaluates nothing. A
            `fastamp.DataLoader` that shuffles by a seed has the same order in each evaluation. One
            of torch with a generator of its own begins with that generator's seed again after a
            resume: the last bits of validation losses may differ.
        config: None is `TrainConfig()`.

    Returns:
        Loss curves, norms, skipped steps, throughput and more.

    Raises:
        CheckpointError: the newest whole checkpoint is of another model, optimizer or config; only
            the model's device has changed by then. Or all are damaged. Or a state holds an object
            that is neither a tensor nor a plain value.
        OSError: a checkpoint cannot be written; the model and older checkpoints are unchanged.
        TypeError: `model` is no module, `config` no TrainConfig, or the data or the model's output
            cannot be trained on.
        ValueError: there is no batch or no parameter to train, the optimizer has other parameters,
            shapes do not match, ranks have unlike numbers of batches or a model that they do not
            share. Or checkpoints within an epoch are asked for, of data without a state. Or the run
            in `config.checkpoint_dir` has finished: more `max_steps` or `epochs` continue it,
            another folder starts anew; the model has that run's weights then. Or the folder has
            checkpoints, and `config.resume` is False.

    Example:
        >>> x, y = torch.randn(64, 4), torch.randint(2, (64,))
        >>> config = fastamp.TrainConfig(epochs=2, batch_size=16, device="cpu")
        >>> result = fastamp.fine_tune(torch.nn.Linear(4, 2), (x, y), config=config)
        >>> result.steps
        8
    """
    config = TrainConfig() if config is None else config
    for name, value, kind in (("model", model, nn.Module), ("config", config, TrainConfig)):
        if not isinstance(value, kind):
            msg = f"{name}: expected a {kind.__name__}, got {type(value).__name__}"
            raise TypeError(msg)
    ranks = find_ranks(model)
    with modes_kept(model):
        rng = rng_state([config.chosen_device])
        seed_all(config.seed, ranks.rank)
        if not model.training:
            model.train()
        try:
            return _Loop(model, train_data, val_data, config, ranks).train()
        finally:
            set_rng_state(rng, [config.chosen_device])


class _Loop(Run):
    """Steps, evaluations and checkpoints, in turn."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.n_samples, dtype = 0, AUTOCAST[self.precision]
        self.autocast = torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)
        # DDP exchanges gradients in the last backward pass of a step only.
        self.no_sync: Any = self.model.no_sync if self.ranks.mode == "ddp" else nullcontext
        self.losses: list[tuple[int, torch.Tensor, float]] = []  # with step and time, to be logged
        self.advance: Callable[..., object] = lambda: None
        self.signals = Signals(DEFERRED if self.checkpointer is not None else ())

    def train(self) -> TrainResult:
        """Train to the end."""
        start_s = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        shows = self.config.progress and self.ranks.rank == 0
        bar = progress(self.total or self.config.max_steps, self.step, shows=shows)
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
        while self.step < max_steps and self.epoch < epochs:
            if not self.has_ended:
                self.data.set_epoch(self.epoch)
            self._compare_lengths()
            batches = iter(() if self.has_ended else self.data)
            while self.step < max_steps and self._train_step(batches):
                self._pause(config.eval_every, config.checkpoint_every)
                if config.tracker is not None and self.step % config.log_every == 0:
                    self.tracker.flush()
                if self.is_stopped:
                    return
            if self.step < max_steps:
                self.epoch, self.has_ended = self.epoch + 1, False
                # What has no interval is due after every epoch.
                self._pause(not config.eval_every, not config.checkpoint_every)
                if self.is_stopped:
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
        if eval_every and self.step % eval_every == 0 and self.evaluated_at != self.step:
            self._evaluate()
        saves = bool(save_every) and self.step % (save_every or 1) == 0
        saver = self.checkpointer
        saves = saves or (saver is not None and saver._is_better(self.compared))
        received = None
        if saves or self.ranks.mode is None or self.step % self.config.log_every == 0:
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
        self.has_ended = len(found) < self.config.accumulate
        self.n_samples += sum(n for _, n in found)
        parts = [self._split(batch, n) for batch, n in found]
        del found  # `parts` are freed one by one
        n_targets = sum(n for *_, n in parts)
        if not parts:
            return False
        self.step, self.compared = self.step + 1, math.nan
        loss = self._accumulate(parts, n_targets)
        self.advance()
        self.losses.append((self.step, loss, time.time()))
        self.tracker.log_scalar("train/lr", self.schedule.lr, self.step)
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
            self.tracker.log_scalar(f"val/{name}", value, self.step)
        self.evaluated_at = self.step
        if self.compares and config.metric not in numbers:
            msg = f"metric: expected one of {', '.join(numbers)}, got {config.metric!r}"
            raise ValueError(msg)
        if self.compares:
            self._compare(float(numbers[config.metric]))
        if config.on_evaluation is not None:
            seen = {name: float(value) for name, value in numbers.items()}
            stops = config.on_evaluation(self.step, seen) is True
            self.is_stopped |= self.ranks.gather(stops)[0]

    def _compare(self, value: float) -> None:
        """Count the evaluations since the best one; with `patience` enough of them end the run."""
        self.compared = value if self.config.keep_best else math.nan
        sign = 1 if self.config.mode == "min" else -1
        if sign * value < sign * self.best:
            self.best, self.n_worse = value, 0
        else:
            self.n_worse += 1
        self.is_stopped = self.n_worse >= (self.config.patience or math.inf)

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
            steps=self.step,
            best_checkpoint=None if self.checkpointer is None else self.checkpointer.best_path,
            skipped_steps=self.schedule.n_skipped,
            precision=self.precision,
            samples_per_s=sum(self.ranks.gather(self.n_samples)) / training_s,
            peak_memory_nbytes=torch.cuda.max_memory_allocated(self.device) if is_cuda else None,
            phase_s={name: stats.total for name, stats in regions.items()},
            wait_share=host_s.get("data", 0) / training_s,
            over_ranks=compare_ranks(self.ranks.gather(mean_s)) if self.ranks.mode else {},
        )


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
