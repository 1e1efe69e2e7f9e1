"""A training run: what it consists of, and how it is saved and resumed."""

import math
from typing import Any

from torch import nn

from fastamp.metrics import MetricsTracker
from fastamp.metrics.sinks import Scalar
from fastamp.step import GradScaler
from fastamp.timer import Timer
from fastamp.train.batches import Batches
from fastamp.train.check import ANY, attempt, check, check_equal, check_model, check_optimizer
from fastamp.train.checkpoint import Checkpoints
from fastamp.train.config import TrainConfig
from fastamp.train.model_call import ModelCall
from fastamp.train.optimizer import Schedule, make_optimizer
from fastamp.train.random_state import check_rng_state, rng_state, seed_all, set_rng_state
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
            options["fused"] = None  # torch's fused SGD and Adagrad do not support DTensors
        self.optimizer = make_optimizer(model, config.optimizer, **options)
        self.scaler = GradScaler(self.device.type, enabled=self.precision == "16-mixed")
        self.schedule = Schedule(
            self.optimizer, self.scaler, lambda n: config.lr_factor(n, self.total)
        )
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
            own = own or self.own_state()
            state = own | self._shared_state()
            if self.ranks.mode is not None:
                state["ranks"] = self.ranks.gather(own)
            self.checkpoints.save(self.step, state, self.model, self.optimizer)
        self.saved_at = place

    def _shared_state(self) -> dict[str, Any]:
        """Return what is the same on all ranks, but for the tensors of model and optimizer."""
        state = {name: getattr(self, name).state_dict() for name in _SHARED}
        place = (self.step, self.epoch, self.evaluated_at)
        state |= {"config": self._identity(), "place": place, "has_ended": self.has_ended}
        return state | {"n_with_state": len(self.optimizer.state)}

    def _resume(self) -> None:
        if self.checkpoints is None:
            return
        state = self.checkpoints.load(self._check)
        if state is None:
            return
        own, as_many = self._own(state)
        parts = {name: (getattr(self, name), state[name]) for name in _SHARED}
        parts = {"data": (self.data, own["data"]), **parts}
        self.checkpoints.restore(state, parts, self.model, self.optimizer)
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

    def _check(self, state: dict[str, Any]) -> None:
        """Raise a ValueError that says why a checkpoint cannot be resumed; nothing changes."""
        of_rank = {"data": dict.fromkeys(("n_consumed", "rng", "loader"), ANY), "rng": ANY}
        shared, at = self._shared_state(), ""
        like = of_rank | dict.fromkeys([*shared, "format", "model"], ANY)
        like |= {"optimizer": {"state": ANY, "param_groups": ANY}}
        if self.ranks.mode is not None:
            like |= {"ranks": ANY, "files": ANY}
        check(state, like, at)
        if self.ranks.mode is not None:
            found = state["ranks"]
            n_found = len(found) if isinstance(found, list) and found else self.ranks.count
            check(found, [of_rank] * n_found, "['ranks']")
            at = f"['ranks'][{self.ranks.rank if n_found == self.ranks.count else 0}]"
        own, as_many = self._own(state)
        identity = shared.pop("config")
        check_equal(state["config"], identity, "['config']", set() if as_many else _OF_RANKS)
        check(state["config"].get("total_steps"), self.total, "['config']['total_steps']")
        check_model(state["model"], self.model.state_dict())
        for name, value in (shared | {"tracker": ANY, "n_with_state": 0}).items():
            check(state[name], value, f"[{name!r}]")
        check_equal(state["scaler"], shared["scaler"], "['scaler']", {"scale", "_growth_tracker"})
        attempt(lambda: MetricsTracker().load_state_dict(state["tracker"]), "['tracker']")
        check_optimizer(state["optimizer"], self.optimizer, state["n_with_state"])
        self.data.check(own["data"], f"{at}['data']")
        attempt(lambda: check_rng_state(own["rng"], self.device), f"{at}['rng']")
        if not (as_many or self.data.is_shared) and own["data"]["n_consumed"]:
            msg = f"{len(state['ranks'])} ranks wrote it within a pass over loaders of their own"
            raise ValueError(msg)

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
