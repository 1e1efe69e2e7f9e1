"""A job trained in Accelerate, Fabric, Lightning's Trainer or the Hugging Face Trainer.

Each function uses the model, the optimizer, the sampler and the losses of a Loop, and returns a
function that trains one visit. `ours` uses fastamp's loader and step, as the guides show.
"""

import importlib
import logging
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from threading import Semaphore, Thread
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler

import fastamp
from fastamp.bench.arms import Arm
from fastamp.bench.tasks import compute_loss, draw, find_make, make_training
from fastamp.bench.trainer import Trainer
from fastamp.integrations import accelerate, transformers

Epoch = Callable[[], object]
PRECISIONS = {  # as Accelerate and as Lightning name them
    None: ("no", "32-true"),
    torch.bfloat16: ("bf16", "bf16-mixed"),
    torch.float16: ("fp16", "16-mixed"),
}
QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


class Loop(Trainer):
    """Torch's loop over a task's dataset, in short epochs of one sampler."""

    def __init__(
        self, task: str, precision: str, device: str, seed: int, steps: int, workers: dict[str, Any]
    ) -> None:
        training = make_training(find_make(task), device, seed)
        super().__init__(Arm(name="torch", task=task, precision=precision), training, device)
        order = torch.Generator().manual_seed(seed)
        count = min(steps * training.batch_size, len(training.data))
        self.sampler = RandomSampler(training.data, num_samples=count, generator=order)
        self.workers = workers

    @cached_property
    def loader(self) -> DataLoader[Any]:
        """Return torch's loader, which only torch's own arm has."""
        return _make_loader(self, ours=False, **self.workers)

    def visit(self) -> None:
        """Train one short epoch."""
        batches = draw(self.loader, self.device)
        self.train(next(batches) for _ in range(len(self.loader)))


def _make_loader(loop: Loop, *, ours: bool, **options: Any) -> DataLoader[Any]:
    """Return a loader for frameworks that move batches themselves."""
    data = loop.training.data
    options |= {"sampler": loop.sampler, "generator": torch.Generator()}
    options |= {"batch_size": loop.training.batch_size, "drop_last": True}
    if ours:
        return fastamp.DataLoader(data, device=loop.device, **options)
    by_torch = getattr(data, "by_torch", data)
    return DataLoader(by_torch, pin_memory=loop.device == "cuda", **options)


def _find_loss(loop: Loop, model: Any, batch: Any) -> Tensor:
    """Return the loss of a batch, and append it to the loop's."""
    loss = compute_loss(loop.training, model, batch)
    loop.losses.append(loss.detach())
    return loss


def _choose_optimizer(loop: Loop, *, ours: bool) -> Optimizer:
    """Return the optimizer, unfused where Lightning without fastamp refuses to clip."""
    optimizer = loop.optimizers[0]
    refused = loop.dtype is not None and loop.training.max_norm is not None and not ours
    if not refused or "fused" not in optimizer.defaults:
        return optimizer
    groups = [{**group, "fused": None, "foreach": None} for group in optimizer.param_groups]
    kind: Any = type(optimizer)
    return kind(groups, fused=None)  # type: ignore[no-any-return]


def train_in_accelerate(
    loop: Loop, closing: ExitStack, *, ours: bool = False, **workers: Any
) -> Epoch:
    """Train as a script with Accelerate does."""
    module, state = map(importlib.import_module, ("accelerate", "accelerate.state"))
    state.AcceleratorState._reset_state(reset_partial_state=True)  # of the job before
    precision = PRECISIONS[loop.dtype][0]
    helper = module.Accelerator(mixed_precision=precision, cpu=loop.device == "cpu")
    closing.callback(helper.free_memory)
    if ours:
        accelerate.prepare(helper)
    loader = _make_loader(loop, ours=ours, **workers)
    model, optimizer, batches = helper.prepare(loop.model, loop.optimizers[0], loader)
    max_norm = loop.training.max_norm

    def epoch() -> None:
        for batch in batches:
            optimizer.zero_grad()
            with helper.autocast():
                loss = _find_loss(loop, model, batch)
            helper.backward(loss)
            if max_norm is not None:
                helper.clip_grad_norm_(loop.parameters, max_norm)
            optimizer.step()

    return epoch


def train_in_fabric(loop: Loop, _: ExitStack, *, ours: bool = False, **workers: Any) -> Epoch:
    """Train as a script with Lightning's Fabric does."""
    module = importlib.import_module("lightning.fabric")
    is_scaling = ours and loop.dtype is torch.float16  # by us: Fabric has a scaler of its own
    precision = PRECISIONS[None if is_scaling else loop.dtype][1]
    helper = module.Fabric(accelerator=loop.device, devices=1, precision=precision)
    scaler = fastamp.GradScaler(loop.device, enabled=is_scaling)
    model, optimizer = helper.setup(loop.model, _choose_optimizer(loop, ours=ours))
    batches = helper.setup_dataloaders(_make_loader(loop, ours=ours, **workers))
    max_norm = loop.training.max_norm

    def epoch() -> None:
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast(loop.device, torch.float16, enabled=is_scaling):
                loss = _find_loss(loop, model, batch)
            helper.backward(scaler.scale(loss))
            if ours:
                scaler.step(optimizer.optimizer, max_norm=max_norm)
                scaler.update()
                continue
            if max_norm is not None:
                helper.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)
            optimizer.step()

    return epoch


class _Turns:
    """A training in a thread of its own, which waits at the end of each epoch."""

    def __init__(self, train: Callable[["_Turns"], None]) -> None:
        self.ends = False
        self._error: BaseException | None = None
        self._turn, self._done = Semaphore(0), Semaphore(0)
        self._thread = Thread(target=self._run, args=(train,), daemon=True)
        self._thread.start()

    def _run(self, train: Callable[["_Turns"], None]) -> None:
        try:
            self.wait()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # advice on workers, which the race sets
                train(self)
        except BaseException as error:  # noqa: BLE001 - raised again by `epoch`
            self._error = error
        self._done.release()

    def wait(self) -> None:
        """Wait, in the training, for the next epoch."""
        self._turn.acquire()

    def end_epoch(self) -> None:
        """End one epoch, in the training, and wait for the next."""
        self._done.release()
        self.wait()

    def epoch(self) -> None:
        """Let the training run for one epoch, and wait for its end."""
        self._turn.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the training, and its thread."""
        self.ends = True
        self._turn.release()
        self._thread.join()


def train_in_lightning(
    loop: Loop, closing: ExitStack, *, ours: bool = False, **workers: Any
) -> Epoch:
    """Train in one `fit` of Lightning's Trainer, whose epochs are the visits."""
    pl = importlib.import_module("lightning.pytorch")
    for name in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.ERROR)
    optimizer = _choose_optimizer(loop, ours=ours)

    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        """The job, as a user of Lightning has it."""

        def __init__(self, turns: _Turns) -> None:
            super().__init__()
            self.inner, self.turns = loop.model, turns

        def training_step(self, batch: Any, _: int) -> Tensor:
            return _find_loss(loop, self.inner, batch)

        def configure_optimizers(self) -> Optimizer:
            return optimizer

        def on_train_epoch_end(self) -> None:
            self.turns.end_epoch()
            self.trainer.should_stop = self.turns.ends

    options: dict[str, Any] = {"precision": PRECISIONS[loop.dtype][1]}
    if ours:
        lightning = importlib.import_module("fastamp.integrations.lightning")
        options = {"plugins": [lightning.AmpPrecision(**options, device=loop.device)]}
    trainer = pl.Trainer(
        accelerator="gpu" if loop.device == "cuda" else "cpu",
        devices=1,
        max_epochs=-1,
        gradient_clip_val=loop.training.max_norm,
        **options,
        **dict.fromkeys(QUIET, False),
    )
    loader = _make_loader(loop, ours=ours, **workers)

    def train(turns: _Turns) -> None:
        if not turns.ends:
            trainer.fit(Module(turns), loader)

    turns = _Turns(train)
    closing.callback(turns.close)
    return turns.epoch


def train_in_transformers(
    loop: Loop, closing: ExitStack, *, ours: bool = False, **workers: Any
) -> Epoch:
    """Train in the Hugging Face Trainer, with one call of `train` for each visit."""
    hf = importlib.import_module("transformers")
    constant = torch.optim.lr_scheduler.LambdaLR(loop.optimizers[0], lambda _: 1.0)
    loader = _make_loader(loop, ours=ours, **workers)

    class Trainer(*((transformers.AmpTrainer,) if ours else ()), hf.Trainer):  # type: ignore[name-defined, misc]
        """The job, as a user of the Trainer has it."""

        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader)

        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Tensor:
            return _find_loss(loop, model, inputs)

    args = hf.TrainingArguments(
        closing.enter_context(tempfile.TemporaryDirectory()),
        use_cpu=loop.device == "cpu",
        fp16=loop.dtype is torch.float16,
        bf16=loop.dtype is torch.bfloat16,
        num_train_epochs=1,
        accelerator_config={"use_seedable_sampler": False},  # the loader has a sampler
        max_grad_norm=loop.training.max_norm or 0.0,  # 0 does not clip
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = Trainer(loop.model, args, train_dataset=[], optimizers=(loop.optimizers[0], constant))
    trainer.remove_callback(hf.PrinterCallback)
    return trainer.train  # type: ignore[no-any-return]


FRAMEWORKS: dict[str, Callable[..., Epoch]] = {
    "accelerate": train_in_accelerate,
    "fabric": train_in_fabric,
    "lightning": train_in_lightning,
    "transformers": train_in_transformers,
}
