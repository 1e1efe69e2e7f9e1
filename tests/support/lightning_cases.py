"""What ranks do in Lightning and Fabric: functions for their processes."""

from __future__ import annotations

import logging
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.devices import NATIVE
from support.trainers import LOSS, make_model
from torch.distributed.fsdp import fully_shard

import fastamp

ROWS, BATCH, OVERFLOW, SAVED = 48, 4, 2, 8  # each rank has six batches in an epoch
LAUNCHED = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launch() -> None:
    """Set the variables of a launcher, where there are ranks."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if dist.is_initialized():
        rank, count = str(dist.get_rank()), str(dist.get_world_size())
        values = (rank, rank, "0", count, "localhost", "29500")
        os.environ |= dict(zip(LAUNCHED, values, strict=True))


def leave() -> None:
    for name in LAUNCHED:
        os.environ.pop(name, None)


def make_rows() -> Any:
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(ROWS, 16, generator=generator),
        torch.randint(4, (ROWS,), generator=generator),
    )
    return fastamp.ArrayDataset(x, y, torch.arange(ROWS))


def make_optimizer(parameters: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def make_module(seen: list[list[int]], *, sharded: bool, overflow: bool) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def configure_model(self):
            if sharded:
                for part in (self.model[0], self.model[2], self.model):
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, batch_idx):
            x, y, rows = batch
            seen.append(rows.tolist())
            loss = LOSS(self.model(x), y)
            first = not dist.is_initialized() or dist.get_rank() == 0
            if overflow and batch_idx == OVERFLOW and first:  # of one rank alone
                loss = loss * math.inf
            return loss

        def configure_optimizers(self):
            optimizer, schedule = make_optimizer(self.parameters())
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module()


def fit(
    precision: str = "32-true",
    *,
    strategy: str,
    share: str = "shard",
    overflow: bool = False,
    folder: Any = None,
) -> dict[str, Any]:
    """Train for two epochs; resume from a checkpoint in the folder, if there is one, or save it.

    Args:
        precision: of the plugin.
        strategy: "ddp" or "fsdp2".
        share: "shard" gives a sharded loader, "lightning" leaves it to Lightning.
        overflow: in one step of each epoch.
        folder: of a checkpoint, of the step SAVED.
    """
    import lightning.pytorch as pl

    from fastamp.integrations.lightning import AmpPrecision

    launch()
    try:
        count = dist.get_world_size() if dist.is_initialized() else 1
        sharded, chosen = strategy == "fsdp2", strategy
        if sharded:
            chosen = pl.strategies.ModelParallelStrategy(
                data_parallel_size=count, tensor_parallel_size=1, process_group_backend="gloo"
            )
        scaler = fastamp.GradScaler("cpu", 1024.0) if precision == "16-mixed" else None
        path = folder and Path(folder) / "run.ckpt"
        there = folder and path.exists()

        class Save(pl.Callback):
            def on_train_batch_end(self, trainer, *_):
                if trainer.global_step == SAVED:
                    trainer.save_checkpoint(path)

        plugin = AmpPrecision(precision, "cpu", scaler)
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=count,
            strategy=chosen,
            plugins=[plugin],
            gradient_clip_val=0.1,
            max_epochs=2,
            callbacks=[Save()] if folder and not there else None,
            use_distributed_sampler=share == "lightning",
            **dict.fromkeys(quiet, False),
        )
        options = {"seed": 3, "shard": True} if share == "shard" else {"seed": 3}
        loader = fastamp.DataLoader(make_rows(), BATCH, shuffle=True, **options)
        seen: list[list[int]] = []
        module = make_module(seen, sharded=sharded, overflow=overflow)
        trainer.fit(module, loader, ckpt_path=path if there else None)
        used = trainer.train_dataloader
        weights = [getattr(p, "full_tensor", lambda p=p: p)() for p in module.parameters()]
        return {
            "weights": [weight.detach().clone() for weight in weights],
            "seen": seen,
            "kind": type(used).__name__,
            "path": used.stats().path,
            "way": plugin.scaler.last_step.way,
            "skipped": plugin.scaler.skipped_steps,
            "rate": trainer.lr_scheduler_configs[0].scheduler.get_last_lr(),
        }
    finally:
        leave()


def train_by_hand(
    batches: list[list[int]], precision: str, *, overflow: bool = True
) -> list[torch.Tensor]:
    """Train on the samples of all ranks together."""
    data, model = make_rows(), make_model()
    optimizer, schedule = make_optimizer(model.parameters())
    scaler = fastamp.GradScaler("cpu", 1024.0, enabled=precision == "16-mixed")
    for i, rows in enumerate(batches):
        x, y, _ = (torch.stack(column) for column in zip(*(data[row] for row in rows), strict=True))
        dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
        with torch.autocast("cpu", dtype, enabled=precision != "32-true"):
            loss = LOSS(model(x), y)
        if overflow and i % 6 == OVERFLOW:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=0.1, zero_grad=True)
        scaler.update()
        if not scaler.last_step.skipped:
            schedule.step()
    return [parameter.detach() for parameter in model.parameters()]


def run_fabric(precision: str, *, ours: bool) -> list[Any]:
    """Train in Fabric, as the guide does or with Fabric's own clip and step; return the rest."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    launch()
    try:
        is_fp16 = precision == "16-mixed"
        options: dict[str, Any] = {"precision": "32-true" if is_fp16 else precision}
        if is_fp16 and not ours:
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            options = {"plugins": [MixedPrecision(precision, "cpu", scaler)]}
        count = dist.get_world_size() if dist.is_initialized() else 1
        strategy = "ddp" if count > 1 else "auto"
        fabric = Fabric(accelerator="cpu", devices=count, strategy=strategy, **options)
        fabric.launch()
        model = make_model()
        inside, schedule = make_optimizer(model.parameters())
        wrapped, optimizer = fabric.setup(model, inside)
        own = fastamp.GradScaler("cpu", 1024.0, enabled=is_fp16 and ours)
        seen = []
        for x, y, rows in fabric.setup_dataloaders(fastamp.DataLoader(make_rows(), BATCH, seed=0)):
            seen.append(rows)
            with torch.autocast("cpu", torch.float16, enabled=own.is_enabled()):
                loss = LOSS(wrapped(x), y)
            fabric.backward(own.scale(loss))
            if own.is_enabled():
                own.step(optimizer.optimizer, max_norm=0.1, zero_grad=True)
                own.update()
            elif ours:
                report = fastamp.optimizer_step(optimizer.optimizer, max_norm=0.1, zero_grad=True)
                assert report.way.startswith(NATIVE), report.way
            else:
                fabric.clip_gradients(wrapped, optimizer, max_norm=0.1)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        return [*seen, *model.state_dict().values()]
    finally:
        leave()
