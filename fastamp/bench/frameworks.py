"""A job in Accelerate, Fabric, Lightning and the Hugging Face Trainer, stock and with fastamp.

The stock arm has torch's loader and the framework's own step; both have the same optimizer, and the
same samples at first. A visit is an epoch, with all that the framework does around it.
"""

import argparse
import copy
import importlib
import importlib.util
import logging
import math
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler

import fastamp
from fastamp.bench.job_table import AGREE_STEPS, check_losses
from fastamp.bench.jobs import JOBS
from fastamp.bench.loops import find_data
from fastamp.bench.race import Plan, run_race, show
from fastamp.bench.record import Report, Task, judge
from fastamp.bench.tasks import Training, expect, find_make, make_optimizer, make_training
from fastamp.integrations import accelerate, fabric, lightning, transformers
from fastamp.train.options import progress, refuse

PLAN = Plan(rounds=4000, warmup=2, half_width=0.01, limit_s=20.0)
MOST_STEPS = 128  # of an epoch
Epoch = Callable[[], object]

METRICS = "speedup/FRAMEWORK, of fastamp over the framework alone, as in speedup/lightning"


class Side:
    """What one arm trains: its model, optimizer and loader, in FP32, or on a GPU in fp16."""

    def __init__(
        self, training: Training, device: str, seed: int, folder: str, *, ours: bool
    ) -> None:
        self.training, self.device, self.folder, self.ours = training, device, folder, ours
        self.precision = "16-mixed" if device == "cuda" else "32-true"
        self.max_norm = training.max_norm or math.inf
        self.model = copy.deepcopy(training.model).to(device)
        self.losses: MutableSequence[Tensor] = []
        data = find_data(training)
        expect(data.dataset is not None, "dataset", "one with a length", "batches alone")
        order = torch.Generator().manual_seed(seed)
        n_drawn = min(len(data.dataset), MOST_STEPS * data.batch_size)
        options: dict[str, Any] = {
            "sampler": RandomSampler(data.dataset, num_samples=n_drawn, generator=order),
            "drop_last": True,
            "collate_fn": data.collate_fn,
        }
        self.loader: DataLoader[Any]
        if ours:
            self.loader = fastamp.DataLoader(
                data.dataset, data.batch_size, device=device, **options
            )
        else:
            options |= {"pin_memory": device == "cuda"}
            self.loader = DataLoader(data.by_torch(), data.batch_size, **options)

    def make_optimizer(self, *, fused: bool | None = True) -> Optimizer:
        """Return the optimizer of the job."""
        return make_optimizer(self.training, self.model, fused=fused)

    def compute_loss(self, model: Any, batch: Any) -> Tensor:
        """Return the loss of a batch, and keep it."""
        x, y = batch
        loss: Tensor = self.training.loss(model(x), y)  # type: ignore[misc]
        self.losses.append(loss.detach())
        return loss


def _in_accelerate(side: Side) -> Epoch:
    module = importlib.import_module("accelerate")
    mixed = "fp16" if side.precision == "16-mixed" else "no"
    accelerator = module.Accelerator(cpu=side.device == "cpu", mixed_precision=mixed)
    if side.ours:
        accelerate.prepare(accelerator)
    model, optimizer, loader = accelerator.prepare(side.model, side.make_optimizer(), side.loader)

    def epoch() -> None:
        for batch in loader:
            with accelerator.autocast():
                loss = side.compute_loss(model, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), side.max_norm)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def _in_fabric(side: Side) -> Epoch:
    module = importlib.import_module("lightning.fabric")
    made = module.Fabric(accelerator=side.device, devices=1, precision=side.precision)
    if side.ours:
        fabric.prepare(made)
    # Fabric alone refuses to clip a fused optimizer in fp16.
    fused = True if side.ours or side.precision == "32-true" else None
    model, optimizer = made.setup(side.model, side.make_optimizer(fused=fused))
    loader = made.setup_dataloaders(side.loader)

    def epoch() -> None:
        for batch in loader:
            made.backward(side.compute_loss(model, batch))
            made.clip_gradients(model, optimizer, max_norm=side.max_norm, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def _in_lightning(side: Side) -> Epoch:
    pl = importlib.import_module("lightning.pytorch")
    fused = True if side.ours or side.precision == "32-true" else None
    optimizer = side.make_optimizer(fused=fused)

    class Module(pl.LightningModule):  # type: ignore[name-defined, misc]
        """The job, as a user of Lightning has it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = side.model

        def training_step(self, batch: Any, _: int) -> Tensor:
            return side.compute_loss(self.model, batch)

        def configure_optimizers(self) -> Optimizer:
            return optimizer

    options: dict[str, Any] = {"precision": side.precision}
    if side.ours:
        plugin = partial(lightning.AmpPrecision, side.precision, side.device, package=pl.__name__)
        options = {"plugins": [plugin()]}
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options |= dict.fromkeys(quiet, False)
    trainer = pl.Trainer(
        accelerator=side.device, devices=1, gradient_clip_val=side.max_norm, max_epochs=0, **options
    )
    module = Module()

    def epoch() -> None:
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, side.loader)

    return epoch


def _in_transformers(side: Side) -> Epoch:
    hf = importlib.import_module("transformers")
    optimizer = side.make_optimizer()
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    class Trainer(*((transformers.AmpTrainer,) if side.ours else ()), hf.Trainer):  # type: ignore[name-defined, misc]
        """The job, as a user of the Trainer has it."""

        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(side.loader)

        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Tensor:
            return side.compute_loss(model, inputs)

    args = hf.TrainingArguments(
        side.folder,
        use_cpu=side.device == "cpu",
        fp16=side.precision == "16-mixed",
        num_train_epochs=1,
        accelerator_config={"use_seedable_sampler": False},  # the loader has its order
        max_grad_norm=side.max_norm,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = Trainer(side.model, args, train_dataset=[], optimizers=(optimizer, constant))
    trainer.remove_callback(hf.PrinterCallback)
    return trainer.train  # type: ignore[no-any-return]


FRAMEWORKS: dict[str, Callable[[Side], Epoch]] = {
    "accelerate": _in_accelerate,
    "fabric": _in_fabric,
    "lightning": _in_lightning,
    "transformers": _in_transformers,
}
PACKAGES = {"fabric": "lightning"}  # whose names are others


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    add("names", nargs="*", metavar="NAME", help=f"of {', '.join(FRAMEWORKS)} (default: all)")
    add("--task", default="mlp", help="the job: one of `jobs`, or FILE.py:make (default: mlp)")


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and what does it."""
    names = list(dict.fromkeys(args.names or FRAMEWORKS))
    for name in names:
        if name not in FRAMEWORKS:
            refuse("NAME", name, f"is none of {', '.join(FRAMEWORKS)}")
    find_make(args.task)
    return {"frameworks": names, "task": args.task, "seed": args.seed}, partial(_run, args, names)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what frameworks say of the machine, and advise."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _run(args: argparse.Namespace, names: list[str]) -> Report:
    training = make_training(find_make(args.task), args.device, args.seed)
    is_same = find_data(training).is_repeatable()
    races, rows, missing = {}, [], []
    with progress(len(names)) as tick, _quiet(), tempfile.TemporaryDirectory() as folder:
        for name in names:
            package = PACKAGES.get(name, name)
            if importlib.util.find_spec(package) is None:
                missing.append(f"{name}: not installed, pip install {package}")
                continue
            arms, losses, steps = {}, {}, 1
            for arm in ("stock", "fastamp"):
                side = Side(training, args.device, args.seed, folder, ours=arm == "fastamp")
                torch.manual_seed(args.seed)  # of dropout
                arms[arm] = FRAMEWORKS[name](side)
                arms[arm]()
                losses[arm] = [float(loss) for loss in side.losses[:AGREE_STEPS]]
                steps, side.losses = len(side.losses), deque(maxlen=1)
            check_losses(name, losses, is_same=is_same, dtype=None)
            races[name] = run_race(arms, PLAN, device=args.device, seed=args.seed)
            times = {arm: 1e3 * races[name].quartiles_s(arm)[1] / steps for arm in arms}
            rows.append(
                {"framework": name}
                | {f"{arm} ms": show(time_ms, ".3f") for arm, time_ms in times.items()}
                | {"times as fast [95 %]": races[name].ratio("fastamp").text(".2f", "x")}
            )
            tick()
    metrics = {f"speedup/{name}": race.ratio("fastamp") for name, race in races.items()}
    why = "fastamp over the framework alone"
    verdicts = [judge(n, metrics[f"speedup/{n}"], (1.0, math.inf), "x", why) for n in races]
    about = " ".join(str(JOBS[args.task].__doc__).split()) if args.task in JOBS else "the user's"
    notes = [f"ms a step, with what the framework does around an epoch; {args.task}: {about}"]
    return Report(
        table=rows or [{"framework": "none"}],
        races=races,
        metrics=metrics,
        verdicts=verdicts,
        notes=[*notes, *missing],
    )
