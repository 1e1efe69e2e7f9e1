"""A training run: what it consists of, and how it is saved and resumed."""

import math
from typing import Any

import torch
from torch import nn

from fastamp.metrics import MetricsTracker
from fastamp.metrics.sinks import Scalar
from fastamp.step import GradScaler
from fastamp.timer import Timer
from fastamp.train.batches import Batches
from fastamp.train.checkpoint import CheckpointError, Checkpoints
from fastamp.train.config import TrainConfig
from fastamp.train.model_call import ModelCall
from fastamp.train.optimizer import Schedule, make_optimizer
from fastamp.train.random_state import rng_state, seed_all, set_rng_state
from fastamp.train.ranks import Ranks

# Two runs are the same if these agree, and the optimizer, the precision and the schedule's length.
_FIXED = ["batch_size", "accumulate", "seed", "lr", "weight_decay", "max_norm", "schedule"]
_FIXED += ["warmup_steps"]
_SHARED = ("schedule", "scaler", "tracker")  # parts whose states are the same on all ranks
_OF_RANKS = {"batch_size", "accumulate", "total_steps"}  # another number of ranks may change them


class Run:
    """A run at some step: everything that a checkpoint keeps."""

    def __init__(
        self, model: nn.Module, train_data: Any, val_data: Any, config: TrainConfig, ranks: Ranks
    ) -> None:
        self.config, self.model, self.ranks = config, model, ranks
        self.device, self.precision = config.chosen_device, config.effective_precision
        self.checkpoints = self._make_checkpoints()
        self.data = Batches("train_data", train_data, config, ranks, shuffle=True)
        self.held_out = None
        if val_data is not None:
            self.held_out = Batches("val_data", val_data, config, ranks, shuffle=False)
        self.total = self._count_steps()
        self.trained, self.evaluated = ranks.spread(model, config)
        self.model_call = config.model_call or ModelCall(config.loss_fn)
        options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        if ranks.mode == "fsdp" and config.max_norm is None:
            options["fused"] = False  # torch's fused SGD and Adagrad do not support DTensors
        self.optimizer = make_optimizer(model, config.optimizer, **options)
        self.schedule = Schedule(self.optimizer, lambda n: config.lr_factor(n, self.total))
        self.scaler = GradScaler(self.device.type, enabled=self.precision == "16-mixed")
        self.timer = Timer(self.device)
        self.tracker = MetricsTracker(sinks=[] if config.tracker is None else [self._hand_on])
        self.step = self.epoch = self.evaluated_at = 0
        self.has_ended = False  # the pass over the data; its last step may not be done yet
        self.saved_at: tuple[int, ...] = ()
        self._resume()
        self.tracker.watch(self.scaler, first_step=self.step + 1)

    def own_state(self) -> dict[str, Any]:
        """Return what differs between the ranks."""
        return {"data": self.data.state_dict(), "rng": rng_state(self.device)}

    def save(self, own: dict[str, Any] | None = None) -> None:
        """Write a checkpoint unless this step has one; `own` is a former state of this rank."""
        place = (self.step, self.epoch, self.evaluated_at)
        if self.checkpoints is None or self.saved_at == place:
            return
        with self.timer("checkpoint"):
            self.schedule.advance()
            own = own or self.own_state()
            state = own | {name: getattr(self, name).state_dict() for name in _SHARED}
            state |= {"config": self._identity(), "place": place, "has_ended": self.has_ended}
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
        try:  # the user's model and optimizer change last
            self.data.load_state_dict(own["data"])
            for name in _SHARED:
                getattr(self, name).load_state_dict(state[name])
            self.checkpoints.restore(state, self.model, self.optimizer)
        except ValueError as error:
            msg = f"checkpoint_dir={self.config.checkpoint_dir}: its newest one does not fit: "
            raise CheckpointError(msg + str(error)) from error
        self.saved_at, self.has_ended = state["place"], state["has_ended"]
        self.step, self.epoch, self.evaluated_at = self.saved_at
        if as_many:
            set_rng_state(own["rng"], self.device)
            return
        seed_all(self.config.seed, self.ranks.rank, self.step)
        if self.total is not None:
            self.schedule.rescale(state["config"]["total_steps"], self.total)

    def _make_checkpoints(self) -> Checkpoints | None:
        config, kind = self.config, Checkpoints
        if config.checkpoint_dir is None:
            return None
        if self.ranks.mode is not None:
            from fastamp.train.sharded_checkpoint import ShardedCheckpoints  # noqa: PLC0415 - slow

            kind = ShardedCheckpoints
        return kind(config.checkpoint_dir, keep=config.keep, resume=config.resume, ranks=self.ranks)

    def _own(self, state: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return this rank's part of a checkpoint, and whether as many ranks wrote it."""
        everyone = state.get("ranks", [state])
        as_many = len(everyone) == self.ranks.count
        return everyone[self.ranks.rank if as_many else 0], as_many

    def _identity(self) -> dict[str, Any]:
        """Return what must be equal for a run to be resumed."""
        own = {"optimizer": type(self.optimizer).__name__, "precision": self.precision}
        fixed = {name: getattr(self.config, name) for name in _FIXED}
        return {"total_steps": self.total, **own, **fixed}

    def _find_problem(self, state: dict[str, Any]) -> str | None:
        """Return why a checkpoint cannot be resumed, None if it can."""
        own, as_many = self._own(state)
        if not (as_many or self.data.is_shared) and own["data"]["n_consumed"]:
            return f"{len(state['ranks'])} ranks wrote it within a pass over loaders of their own"
        pairs = [(state["config"], self._identity())]
        pairs += [(_describe(state["model"]), _describe(self.model.state_dict()))]
        may_differ = set() if as_many else _OF_RANKS
        for theirs, ours in pairs:
            for name in {**ours, **theirs}:
                if name not in may_differ and theirs.get(name) != ours.get(name):
                    return f"it has {name}={theirs.get(name)!r}, this run {ours.get(name)!r}"
        return None

    def _hand_on(self, scalars: list[Scalar]) -> None:
        """Pass our tracker's scalars on to the user's."""
        assert self.config.tracker is not None  # noqa: S101 - else this is no sink
        for name, step, value in scalars:
            self.config.tracker.log_scalar(name, value, step)
        self.config.tracker.flush()

    def _count_steps(self) -> int | None:
        """Return the length of the schedule in steps, None if it has none."""
        config = self.config
        if config.schedule == "constant":
            return None
        if config.max_steps is not None:
            return config.max_steps
        try:
            return config.epochs * math.ceil(len(self.data.loader) / config.accumulate)
        except TypeError:
            problem = "needs max_steps for data without a length"
            msg = f"schedule: {config.schedule!r} {problem}, or be 'constant'"
            raise ValueError(msg) from None


def _describe(state: dict[str, Any]) -> dict[str, str]:
    """Return the dtypes and shapes of the tensors in a model's state."""
    tensors = {name: t for name, t in state.items() if isinstance(t, torch.Tensor)}
    return {name: f"{t.dtype} {[*t.shape]}" for name, t in tensors.items()}
