"""Whole trainings that ranks run, for the tests of train/, and their results."""

from __future__ import annotations

import math
import signal

import pytest
import torch
from support import ranks as started_ranks
from support.trainable import CURVES, CrashError, crash
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fastamp
from fastamp.bench.gpt import GPT, Shape
from fastamp.train import CheckpointError

BLOCK, N, N_HELD_OUT = 8, 96, 20


def make_data(n=N):
    """Return windows of bytes that follow a rule, the bytes after each, and the window numbers."""
    first = torch.randint(256, (n, 1), generator=torch.Generator().manual_seed(n))
    tokens = (first + 3 * torch.arange(BLOCK + 1)) % 256
    return tokens[:, :-1], tokens[:, 1:], torch.arange(n)


def in_batches(batches):
    """Return a loader of given batches, as a list would be one of samples."""
    return fastamp.DataLoader(list(batches), batch_size=None)


class Dropping(torch.nn.Module):
    """A GPT with dropout of its logits, so that random numbers matter."""

    def __init__(self, layers, dropout):
        super().__init__()
        self.gpt = GPT(Shape(layers=layers, heads=2, width=16, block_size=BLOCK))
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, tokens):
        return self.dropout(self.gpt(tokens))


class Watching(fastamp.ModelCall):
    """Keeps the numbers of the samples trained on, and does something before one of the batches."""

    def __init__(self, at=0, action=None, overflow_at=0):
        super().__init__()
        self.seen, self.at, self.action, self.overflow_at = [], at, action, overflow_at

    def split(self, batch):
        tokens, following, numbers = batch
        if torch.is_grad_enabled():
            self.seen.append(numbers.tolist())
            if len(self.seen) == self.at:
                self.action()
        return tokens, following

    def loss(self, output, target):
        overflows = torch.is_grad_enabled() and len(self.seen) == self.overflow_at
        return super().loss(output, target) * (math.inf if overflows else 1)


def train(
    folder=None,
    *,
    layers=1,
    dropout=0.0,
    stop_at=0,
    action=crash,
    overflow_at=0,
    data=None,
    parallel=None,
    **fields,
):
    """Train a tiny GPT, and return all that a test may look at."""
    settings = {"epochs": 2, "batch_size": 8, "lr": 0.01, "warmup_steps": 3, "eval_every": 5}
    settings |= {"checkpoint_dir": folder, "checkpoint_every": 3, "log_every": 4, "keep": 9}
    watching = Watching(stop_at, action, overflow_at)
    settings |= {"model_call": watching}
    fields |= {} if folder else {"checkpoint_every": None}
    torch.manual_seed(0)
    model = Dropping(layers, dropout)
    try:
        result = fastamp.fine_tune(
            in_ranks(model, parallel),
            data or make_data(),
            make_data(N_HELD_OUT),
            fastamp.TrainConfig(**(settings | fields)),
        )
    except CrashError:
        return {"seen": watching.seen}
    weights = whole_weights(model)
    curves = {name: [part.tolist() for part in getattr(result, name)] for name in CURVES}
    counts = {"steps": result.steps, "skipped": result.skipped_steps, "seen": watching.seen}
    return counts | {"weights": weights, "curves": curves}


def in_ranks(model, mode):
    """Return the model as the ranks share it; None is in DDP if there are ranks."""
    if mode == "fsdp":
        return torch.distributed.fsdp.fully_shard(model)
    return DistributedDataParallel(model) if torch.distributed.is_initialized() else model


def train_by_hand(folder, mode, stop_at=0, signal_at=0):
    """Train in a loop of one's own, with a checkpoint every 3 steps; return the weights."""
    torch.manual_seed(0)
    model = Dropping(1, 0.2)
    called = in_ranks(model, mode)
    torch.manual_seed(_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = fastamp.ArrayDataset(*make_data())
    loader = fastamp.DataLoader(dataset, 4, shuffle=True, shard=True, seed=3)
    parts = {"model": called, "optimizer": optimizer, "loader": loader}
    try:
        checkpointer = fastamp.Checkpointer(folder, **parts)
        step = checkpointer.restore() or 0
        with checkpointer.on_signal():
            while step < 14:
                for tokens, following, _ in loader:
                    logits = called(tokens).flatten(0, 1)
                    torch.nn.functional.cross_entropy(logits, following.flatten()).backward()
                    fastamp.optimizer_step(optimizer, max_norm=1.0, zero_grad=True)
                    step += 1
                    if step == signal_at and _rank() == 1:
                        signal.raise_signal(signal.SIGTERM)
                    if step == stop_at:
                        return None
                    checkpointer.save(step, every=1000 if signal_at else 3)
                    if step == 14:
                        break
    except CheckpointError as error:
        return str(error)
    except SystemExit as ended:
        return ended.code
    return {name: weight.tobytes() for name, weight in whole_weights(model).items()}


def whole_weights(model):
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).numpy().copy()
        for name, t in model.state_dict().items()
    }


def _rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def train_and_overflow_on_one(mode):
    at = 5 if torch.distributed.get_rank() == 1 else 0
    return train(parallel=mode, overflow_at=at, precision="16-mixed", max_steps=10)


def draws_and_pauses(accumulate):
    """Return what this rank draws in its third batch, and how often DDP exchanged nothing."""
    drawn, pauses, no_sync = [], [], DistributedDataParallel.no_sync

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            DistributedDataParallel, "no_sync", lambda self: pauses.append(1) or no_sync(self)
        )
        look = {"stop_at": 3, "action": lambda: drawn.append(torch.rand(1).item())}
        train(accumulate=accumulate, epochs=1, **look)
    return drawn[0], len(pauses)


def train_from_a_list(folder, stop_at=0):
    """Train on batches that a rank has cut for itself."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    columns = [column[rank::count].split(16 // count) for column in make_data()]
    try:
        return train(folder, stop_at=stop_at, data=in_batches(zip(*columns, strict=True)))
    except CheckpointError as error:
        return str(error)


def train_on_fewer_batches(mode, of):
    """Return the error of training where the second rank has a batch less than the first one."""
    data = {"train_data": make_data(), "val_data": make_data(32)}
    columns = [column[: len(column) - 8 * _rank()].split(8) for column in data[of]]
    data[of] = in_batches(zip(*columns, strict=True))
    config = fastamp.TrainConfig(max_steps=20, model_call=Watching(), device="cpu")
    return error_of_call(
        lambda: fastamp.fine_tune(in_ranks(Dropping(1, 0.0), mode), **data, config=config)
    )


def train_without_sharing():
    """Return the error of training a model that the ranks do not share."""
    return error_of_call(lambda: fastamp.fine_tune(torch.nn.Linear(2, 1), make_data()))


def error_of_call(call):
    try:
        call()
    except (OSError, RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


def call(args, fields):
    return train(*args, **fields)


def run(started, count, *args, **fields):
    """Train on so many ranks; return what all have in common, and the samples of each."""
    results = started.run(count, call, args, fields)
    seen = [result.pop("seen") for result in results]
    for result in results:
        assert repr(result.get("curves")) == repr(results[0].get("curves"))
    return results[0], seen


def bits(result):
    weights = {name: weight.tobytes() for name, weight in result["weights"].items()}
    return weights, repr(result["curves"]), result["steps"], result["skipped"]


@pytest.fixture(scope="module")
def four():
    with started_ranks.start(4) as started:
        yield started


def at_large(*values):
    return pytest.param(*values, marks=pytest.mark.at_large)
