"""Other people's loops over the jobs: Accelerate's, Lightning's, and the stock one with a loader.

They get what the stock loop has: its sampler, workers, fused optimizer and precision.
"""

import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from threading import Semaphore, Thread
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from fastamp.bench.loader import Batches
from fastamp.bench.loops import Loop, with_fused
from fastamp.bench.peers import ERRORS, why
from fastamp.bench.tasks import compute_loss
from fastamp.data import map_tensors

PRECISIONS = {  # as Accelerate and as Lightning name them
    None: ("no", "32-true"),
    torch.bfloat16: ("bf16", "bf16-mixed"),
    torch.float16: ("fp16", "16-mixed"),
}


def _make_loader(loop: Loop, **options: Any) -> DataLoader[Any]:
    """Return torch's loader, for frameworks that move batches themselves."""
    dataset, batch_size, collate_fn = loop.data.by_torch(), *loop.data[1:]
    options |= {"sampler": loop.sampler, "generator": torch.Generator()}
    options |= {"collate_fn": collate_fn, "pin_memory": loop.device == "cuda"}
    return DataLoader(dataset, batch_size, **options)


class _Accelerated:
    """A script's own loop, whose parts Accelerate has prepared."""

    def __init__(self, loop: Loop, workers: dict[str, Any]) -> None:
        accelerate, state = map(importlib.import_module, ("accelerate", "accelerate.state"))
        state.AcceleratorState._reset_state(reset_partial_state=True)  # of the job before
        precision = PRECISIONS[loop.dtype][0]
        self.helper = accelerate.Accelerator(mixed_precision=precision, cpu=loop.device == "cpu")
        parts = loop.model, loop.optimizer, _make_loader(loop, **workers)
        self.model, self.optimizer, self.batches = self.helper.prepare(*parts)
        self.training, self.losses = loop.training, loop.losses

    def epoch(self) -> None:
        """Train the steps of one visit."""
        for batch in self.batches:
            self.optimizer.zero_grad()
            with self.helper.autocast():
                loss = compute_loss(self.training, self.model, batch)
            self.helper.backward(loss)
            if self.training.max_norm is not None:
                self.helper.clip_grad_norm_(self.model.parameters(), self.training.max_norm)
            self.optimizer.step()
            self.losses.append(loss.detach())

    def close(self) -> None:
        """Let go of the job."""
        self.helper.free_memory()


class _Trained:
    """Lightning's Trainer, whose epochs are the visits: in between it waits, in its own thread."""

    def __init__(self, loop: Loop, workers: dict[str, Any]) -> None:
        lightning = importlib.import_module("lightning.pytorch")
        for name in ("pytorch", "fabric"):
            logging.getLogger(f"lightning.{name}").setLevel(logging.ERROR)
        self.error: BaseException | None = None
        self._ends = False
        self._turn, self._done = Semaphore(0), Semaphore(0)
        outer = self

        class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.inner = loop.model

            def training_step(self, batch: Any, _: int) -> torch.Tensor:
                loss = compute_loss(loop.training, self.inner, batch)
                loop.losses.append(loss.detach())
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return optimizer

            def on_train_start(self) -> None:
                outer._turn.acquire()

            def on_train_epoch_end(self) -> None:
                outer._done.release()
                outer._turn.acquire()
                self.trainer.should_stop = outer._ends

        optimizer, max_norm = loop.optimizer, loop.training.max_norm
        if loop.dtype is not None and max_norm is not None:  # Lightning refuses to clip fused ones
            optimizer = with_fused(optimizer, None)
        without = ("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar")
        trainer = lightning.Trainer(
            accelerator="gpu" if loop.device == "cuda" else "cpu",
            devices=1,
            max_epochs=-1,
            precision=PRECISIONS[loop.dtype][1],
            gradient_clip_val=max_norm,
            **dict.fromkeys(without, False),
        )
        fit = partial(trainer.fit, Module(), _make_loader(loop, **workers))
        self.thread = Thread(target=self._run, args=(fit,), daemon=True)
        self.thread.start()

    def _run(self, fit: Callable[[], None]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # advice on workers, which are those of the race
                fit()
        except BaseException as error:  # noqa: BLE001 - raised where the epoch is waited for
            self.error = error
        self._done.release()

    def epoch(self) -> None:
        """Train the steps of one visit."""
        self._turn.release()
        self._done.acquire()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the training, and its thread."""
        self._ends = True
        self._turn.release()
        self.thread.join()


class _Loaded:
    """The stock loop, with somebody else's loader."""

    def __init__(self, make: Callable[..., Any], loop: Loop, workers: dict[str, Any]) -> None:
        join = loop.data.collate_fn or default_collate
        loader = make(loop, join, workers.get("num_workers", 0))
        loop.batches = partial(_move, loader, loop.device)
        self.epoch = loop.epoch

    def close(self) -> None:
        """Nothing is held."""


def _move(loader: Any, device: str) -> Iterator[Any]:
    for batch in loader:
        yield (
            batch
            if device == "cpu"
            else map_tensors(partial(torch.Tensor.to, device=device), batch)
        )


def _make_torchdata(loop: Loop, join: Callable[[list[Any]], Any], num_workers: int) -> Batches:
    """Return a pipeline of torchdata's nodes, with threads in place of workers."""
    nodes, dataset = importlib.import_module("torchdata.nodes"), loop.data.by_torch()
    rows = nodes.Batcher(nodes.SamplerWrapper(loop.sampler), loop.data.batch_size)

    def fetch(batch: list[int]) -> Any:
        return join([dataset[row] for row in batch])

    threads = {"num_workers": num_workers, "method": "thread"}
    loader: Batches = nodes.Loader(nodes.ParallelMapper(rows, fetch, **threads))
    return loader


def _make_spdl(loop: Loop, join: Callable[[list[Any]], Any], num_workers: int) -> Batches:
    """Return SPDL's DataLoader, which always has a thread."""
    options: dict[str, Any] = {"num_threads": num_workers or 1, "output_order": "input"}
    options |= {"preprocessor": loop.data.by_torch().__getitem__, "aggregator": join}
    spdl = importlib.import_module("spdl.dataloader")
    loader: Batches = spdl.DataLoader(loop.sampler, batch_size=loop.data.batch_size, **options)
    return loader


PEERS: dict[str, Callable[..., Any]] = {
    "Accelerate": _Accelerated,
    "Lightning": _Trained,
    "torchdata": partial(_Loaded, _make_torchdata),
    "SPDL": partial(_Loaded, _make_spdl),
}


def list_peers() -> list[str]:
    """Return the peers that are installed."""
    return [name for name in PEERS if find_spec(name.lower()) is not None]


def make_peer(name: str, job: str, loop: Loop, workers: dict[str, Any]) -> Any:
    """Return a peer that has trained one visit; None, with a line on stderr, where it does not run.

    Args:
        name: of PEERS.
        job: whose name the line tells.
        loop: the stock loop over the job, which the peer takes over.
        workers: options of the stock loader.
    """
    peer: Any = None
    try:
        peer = PEERS[name](loop, workers)
        peer.epoch()
    except ERRORS as error:
        print(f"{job}: {name} is not raced: {why(error)}", file=sys.stderr)
        if peer is not None:
            with suppress(*ERRORS):
                peer.close()
        return None
    return peer
