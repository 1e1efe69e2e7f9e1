"""A training run: what it consists of, and how it is saved and resumed."""

import logging
import math
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastamp.metrics import MetricsTracker
from fastamp.metrics.sinks import Logged
from fastamp.step import GradScaler
from fastamp.timer import Timer
from fastamp.train.batches import Batches
from fastamp.train.checkpointer import Checkpointer
from fastamp.train.config import TrainConfig
from fastamp.train.fits import check_equal
from fastamp.train.model_call import ModelCall
from fastamp.train.optimizer import Schedule, make_optimizer
from fastamp.train.random_state import seed_all
from fastamp.train.ranks import Ranks

# A run resumes only if these agree with the checkpoint's, and the precision does.
_FIXED = ["batch_size", "accumulate", "seed", "lr", "weight_decay", "max_norm", "schedule"]
_FIXED += ["warmup_steps", "metric", "mode"]
_OF_RANKS = {"batch_size", "accumulate", "total_steps"}  # another number of ranks may change them
_OF_LENGTH = {"total_steps", "warmup_steps"}  # a longer run may change them
NO_STATE = "train_data has no state_dict: checkpoints are written at the end of an epoch"
_LOG = logging.getLogger(__name__)


class _Checkpointer(Checkpointer):
    """One whose errors name the arguments of a TrainConfig."""

    _argument, _anew = "checkpoint_dir", "another checkpoint_dir starts anew"


class Run:
    """A run at some step: everything that a checkpoint keeps."""

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
        self.loss = self._find_loss()
        options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        self.optimizer = make_optimizer(model, config.optimizer, loss=self.loss, **options)
        self.scaler = GradScaler(self.device.type, enabled=self.precision == "16-mixed")
        self.schedule = Schedule(
            self.optimizer, self.scaler, lambda n: config.lr_factor(n, self.total)
        )
        self.timer = Timer(self.device if self.device.type == "cuda" else "cpu")
        self.tracker = MetricsTracker(sinks=[] if config.tracker is None else [self._hand_on])
        self.step = self.epoch = self.evaluated_at = 0
        self.has_ended = False  # no batch is left in the pass; its last step may not be done yet
        self.saved_at: tuple[int, ...] = ()
        self.compared = math.nan  # the metric of this step, if it was evaluated and is compared
        self.best = math.inf if config.mode == "min" else -math.inf  # until the first evaluation
        self.n_worse, self.is_stopped = 0, False
        self.checkpointer = None
        if config.checkpoint_dir is not None:
            self.checkpointer = self._make_checkpointer(config.checkpoint_dir)
            self._resume(self.checkpointer)
        self.tracker.watch(self.scaler, first_step=self.step + 1)

    @property
    def place(self) -> tuple[int, ...]:
        """How far the run has come."""
        return self.step, self.epoch, self.evaluated_at

    def save(self) -> None:
        """Write a checkpoint unless this step has one."""
        if self.checkpointer is None or self.saved_at == self.place:
            return
        self.schedule.read_flag()  # the optimizer's state has the rate, too
        with self.timer("checkpoint"):
            self.checkpointer.save(self.step, metric=self.compared)
        self.saved_at = self.place

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the run itself."""
        own = {"precision": self.precision, "total_steps": self.total}
        config = own | {name: getattr(self.config, name) for name in _FIXED}
        state = {"config": config, "place": self.place, "has_ended": self.has_ended}
        return state | {"best": self.best, "n_worse": self.n_worse}

    def check_state_dict(self, state: Any) -> None:
        """Raise a ValueError that says why another run's checkpoint cannot be resumed."""
        as_many = self.checkpointer is None or self.checkpointer._as_many
        theirs, ours = state["config"], self.state_dict()["config"]
        is_shorter = (theirs["total_steps"] or math.inf) < (self.total or 0)
        of_length = _OF_LENGTH if is_shorter else set()
        check_equal(theirs, ours, of_length if as_many else _OF_RANKS)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.saved_at, self.has_ended = state["place"], state["has_ended"]
        self.former_total = state["config"]["total_steps"]
        self.step, self.epoch, self.evaluated_at = self.saved_at
        self.best, self.n_worse = state["best"], state["n_worse"]
        self.is_stopped = self.n_worse >= (self.config.patience or math.inf)

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

    def _find_loss(self) -> nn.Module | None:
        """Return the loss on the run's device if it is a module with tensors of its own.

        Raises:
            ValueError: ranks would train its parameters apart from each other.
        """
        loss_fn = getattr(self.model_call, "loss_fn", None)
        loss = getattr(loss_fn, "__self__", loss_fn)  # of a bound method
        if not isinstance(loss, nn.Module):
            return None
        of_model = {*map(id, self.model.parameters()), *map(id, self.model.buffers())}
        own = [t for t in (*loss.parameters(), *loss.buffers()) if id(t) not in of_model]
        if self.ranks.mode is not None and any(t.requires_grad for t in own):
            has = f"{type(loss).__name__} has parameters, which ranks do not share"
            msg = f"loss_fn: {has}; train a model that holds it and returns its loss"
            raise ValueError(msg)
        return loss.to(self.device) if own else None

    def _make_checkpointer(self, folder: Any) -> Checkpointer:
        known = {*map(id, self.model.parameters())}
        known |= set() if self.loss is None else {*map(id, self.loss.parameters())}
        if any(
            id(p) not in known for group in self.optimizer.param_groups for p in group["params"]
        ):
            has = "has parameters of neither the model nor loss_fn, which checkpoints leave out"
            msg = f"optimizer: {has}: give the module that has them as loss_fn"
            raise ValueError(msg)
        parts: dict[str, Any] = {"run": self, "model": self.model, "optimizer": self.optimizer}
        parts |= {"loader": self.data, "scaler": self.scaler, "scheduler": self.schedule}
        parts |= {} if self.loss is None else {"loss_fn": self.loss}
        parts |= {
            "tracker": self.tracker,
            "best": self.config.mode if self.config.keep_best else None,
        }
        checkpointer = _Checkpointer(folder, keep=self.config.keep, **parts)
        checkpointer._devices = [self.device]
        newest = checkpointer._folder.newest()
        if newest is not None and not self.config.resume:
            has = f"{checkpointer._folder.title} has the checkpoint of step {newest}"
            msg = f"resume: expected True, as {has}; another folder starts anew"
            raise ValueError(msg)
        return checkpointer

    def _resume(self, checkpointer: Checkpointer) -> None:
        """Restore the newest checkpoint, if there is one, and say so.

        Raises:
            ValueError: nothing is left to train.
        """
        step = checkpointer.restore()
        if step is None:
            return
        self.step, former = step, self.former_total
        if not self.data.can_resume:  # the run ended within an epoch
            self.epoch, self.data.n_consumed = self.epoch + 1, 0
        if not checkpointer._as_many:
            seed_all(self.config.seed, self.ranks.rank, self.step)
            if self.total is not None:
                self.schedule.rescale(former, self.total)
        at = f"step {step} of {self._length()}"
        if self.has_finished:
            remedy = "more max_steps or epochs continue it, another checkpoint_dir starts anew"
            msg = f"{checkpointer._folder.title}: nothing is left to train at {at}: {remedy}"
            raise ValueError(msg)
        said = f"resumed at {at}"
        if checkpointer._as_many and self.total != former:
            self.schedule.set_lr()
            said += f", a longer run than {former}: its next learning rate is {self.schedule.lr:g}"
        if self.ranks.rank == 0:
            _LOG.warning("%s: %s", checkpointer._folder.title, said)

    @property
    def has_finished(self) -> bool:
        """Whether no step and no evaluation is left."""
        config = self.config
        if config.max_steps is None:
            has_trained = self.epoch >= config.epochs
        else:
            has_trained = self.step >= config.max_steps
        has_trained = has_trained or self.is_stopped
        return has_trained and (not self.evaluates or self.evaluated_at == self.step)

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
