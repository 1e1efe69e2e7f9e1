"""What a soak does at random: each job is a part of fastamp in use, or abandoned in the middle.

A job takes a generator of random numbers and an empty folder. It checks what it gets, and may leave
behind what a program may drop: passes, threads, loaders, trackers, open regions.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from random import Random

import torch
from support.loading import Squares
from support.processes import CONTEXT
from support.trainable import act_at, make_data, outcome, run

import fastamp

ROWS = 500
COLUMN = torch.arange(ROWS * 6, dtype=torch.float32).reshape(ROWS, 6)
NAMES = [f"x{i}" for i in range(20)]
RUN = {"max_steps": 10, "checkpoint_every": 2}
dropped: list[threading.Thread] = []


class BrokenError(Exception):
    """What datasets, sinks and regions of a soak raise."""


class Shared:
    """Objects that live as long as the soak."""

    def __init__(self) -> None:
        self.loader = fastamp.DataLoader(COLUMN, 16, shuffle=True, seed=1)
        self.timer = fastamp.Timer("cpu")
        self.tracker = fastamp.MetricsTracker(64, sinks=[break_sometimes])
        self.training = Training()
        self.tracker.watch(self.training.scaler)
        self.expected = outcome(*run(**RUN))
        process = CONTEXT.Process(target=int)  # its server stays
        process.start()
        process.join()


class Training:
    """A model with its optimizer and scaler; one thread at a time steps it."""

    def __init__(self) -> None:
        layers = [torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.scaler = fastamp.GradScaler("cpu", init_scale=1024.0, growth_interval=50)
        self.lock = threading.Lock()

    def step(self, x: torch.Tensor, *, overflows: bool = False) -> None:
        """Take a step, or overflow."""
        with self.lock:
            self.optimizer.zero_grad()
            loss = self.model(x / ROWS).square().mean() * (math.inf if overflows else 1)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer, max_norm=1.0)
            self.scaler.update()
            assert bool(self.scaler.last_step.found_inf) == overflows
            if self.scaler.get_scale() < 1:
                self.scaler.update(1024.0)

    def step_without_model(self) -> None:
        """Take a step in a forked child, where MKL may wait for a thread that was left behind."""
        self.scaler.scale(torch.zeros(()))
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.scaler.step(self.optimizer, max_norm=1.0)
        self.scaler.update()
        assert not self.scaler.last_step.skipped


def break_sometimes(scalars):
    if scalars[0][1] % 7 == 0:
        raise BrokenError


shared = functools.cache(Shared)


def check_rows(batch, rows=None):
    """Compare a batch of COLUMN with what it must be."""
    rows = (batch[:, 0] / 6).long() if rows is None else rows
    assert torch.equal(batch, COLUMN[rows])


def make_loader(rng, dataset=COLUMN, **options):
    """Return a loader with options at random, that can be resumed."""
    options |= {"batch_size": rng.choice([1, 7, 64]), "drop_last": rng.random() < 0.5}
    return fastamp.DataLoader(dataset, shuffle=True, seed=rng.randrange(99), **options)


def gathered(rng, folder):
    """Drop a pass in the middle, and resume it in another loader."""
    seed = rng.random()
    loader, other = (make_loader(Random(seed)) for _ in range(2))
    batches = iter(loader)
    kept = [next(batches) for _ in range(rng.randrange(5))]
    other.load_state_dict(loader.state_dict())
    expected = list(batches) if rng.random() < 0.5 else [next(batches)]
    assert all(map(torch.equal, other, expected))
    for batch in kept:
        check_rows(batch)
    next(iter(loader))  # dropped at once


def fetched(rng, folder):
    """Read a dataset that fails at a random item, and go on behind it or not."""
    loader = make_loader(rng, Squares(60, bad=rng.randrange(80)))
    batches, n, n_good = iter(loader), rng.randrange(1, 30), 0
    for _ in range(n):
        with suppress(FileNotFoundError):
            batch = next(batches, None)
            n_good += 1
            assert batch is None or torch.equal(batch["y"], batch["x"][:, 0].square())
    assert n_good >= n - 1


def prefetched(rng, folder):
    """Drop or close a pass of `prefetch`, over a generator that may fail."""
    bad = rng.randrange(30)

    def generate():
        for i in range(20):
            if i == bad:
                raise BrokenError
            yield COLUMN[i : i + 1]

    batches = iter(fastamp.prefetch(generate(), thread=rng.random() < 0.5))
    with suppress(BrokenError):
        for batch in itertools.islice(batches, rng.randrange(25)):
            check_rows(batch)


def stepped(rng, folder):
    """Step a model of its own, or the shared one, with overflows."""
    training = shared().training if rng.random() < 0.5 else Training()
    for _ in range(rng.randrange(1, 20)):
        training.step(COLUMN[:8], overflows=rng.random() < 0.1)


def timed(rng, folder):
    """Time regions, some of which an exception leaves."""
    own = fastamp.Timer("cpu")
    for timer in (own, shared().timer):
        for _ in range(rng.randrange(30)):
            with suppress(BrokenError), timer(rng.choice(NAMES)), timer("inner"):
                if rng.random() < 0.2:
                    raise BrokenError
    own.to_json(folder / "timer.json")
    shared().timer.summary()
    if rng.random() < 0.1:
        shared().timer.reset()


def tracked(rng, folder):
    """Log to trackers with sinks, of which some fail, and restore one from another's state."""
    kept = []
    tracker = fastamp.MetricsTracker(rng.randrange(2, 50), sinks=[break_sometimes, kept.extend])
    watching = fastamp.MetricsTracker()
    watching.watch(shared().training.scaler)  # and is dropped
    for step in range(rng.randrange(1, 200)):
        tracker.log_scalar(rng.choice(NAMES), torch.tensor(step / 2), step)
        shared().tracker.log_scalar(rng.choice(NAMES), step, step)
    other = fastamp.MetricsTracker()
    other.load_state_dict(tracker.state_dict())
    assert other.summary() == tracker.summary()
    shared().tracker.flush()
    assert len(kept) == sum(stats.count for stats in other.summary().values())
    tracker.close()  # one with sinks is otherwise kept until the program ends


def threads(rng, folder):
    """Start threads that nobody joins: each ends in the middle of a pass and of a region."""

    def use(rng):
        own = make_loader(rng)
        batches = iter(own if rng.random() < 0.5 else fastamp.prefetch(own))
        shared().timer.start("of a thread")
        for batch in itertools.islice(batches, rng.randrange(6)):
            check_rows(batch)
            shared().tracker.log_scalar("of a thread", batch[0, 0], 1)
        if rng.random() < 0.5:
            shared().timer.stop("of a thread")
        else:
            raise BrokenError

    for _ in range(rng.randrange(1, 4)):
        thread = threading.Thread(target=use, args=(Random(rng.random()),), daemon=True)
        thread.start()
        dropped.append(thread)


def workers(rng, folder):
    """Read with workers, of which one may be killed, and drop the pass with batches under way."""
    kills = rng.random() < 0.2
    try:
        read_with_workers(rng, kills=kills)
        gc.collect()  # torch tells of a worker that died as long as its pass is there
    except RuntimeError as error:
        if not (kills and "DataLoader worker" in str(error)):
            raise


def read_with_workers(rng, *, kills):
    dataset = Squares(60, bad=rng.randrange(120))
    options = {"num_workers": 2, "multiprocessing_context": rng.choice(["fork", CONTEXT])}
    loader = make_loader(rng, dataset, persistent_workers=rng.random() < 0.3, **options)
    try:
        for i, batch in zip(range(rng.randrange(30)), loader, strict=False):
            assert torch.equal(batch["y"], batch["x"][:, 0].square())
            if i == 1 and kills:
                rng.choice(multiprocessing.active_children()).kill()
    except FileNotFoundError:
        assert dataset.bad < len(dataset)


def forked(rng, folder):
    """Fork with passes, regions and a tracker alive; the child uses them and exits."""
    before = iter(fastamp.prefetch(shared().loader))
    next(before)
    state = shared().loader.state_dict()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # libgomp's threads stay behind
            own = fastamp.DataLoader(COLUMN, 16, shuffle=True, seed=1)
            own.load_state_dict(state)
            for batch in itertools.islice(own, rng.randrange(5)):
                check_rows(batch)
            with shared().timer("in a child"):
                shared().training.step_without_model()
            status = 0
        finally:
            os._exit(status)
    if rng.random() < 0.3:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert status in {0, signal.SIGKILL}, status
    check_rows(next(before))


def interrupted(rng, folder):
    """Press Ctrl-C at a random moment of a pass, and begin another one."""
    heard = []

    def hear(*_):
        heard.append(True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hear)
    later = threading.Timer(rng.random() / 50, os.kill, (os.getpid(), signal.SIGINT))
    loader = make_loader(rng)

    def read():  # in Python 3.13 a loop's jump to its beginning lies outside of a `try` around it
        later.start()
        while not heard:  # what is raised in a destructor, Python drops
            for batch in loader:
                check_rows(batch)

    try:
        read()
    except KeyboardInterrupt:
        check_rows(next(iter(loader)))
    later.join()
    signal.signal(signal.SIGINT, before)


def trained(rng, folder):
    """Train with checkpoints, be interrupted or fail, resume, and come to the same to the bit."""
    number = rng.choice([signal.SIGTERM, signal.SIGINT, None])

    def act():
        if number is None:
            raise BrokenError
        os.kill(os.getpid(), number)

    for _ in range(rng.randrange(3)):
        loss_fn = act_at(rng.randrange(1, RUN["max_steps"]), act)
        with suppress(BrokenError, SystemExit, KeyboardInterrupt):
            run(folder, loss_fn=loss_fn, **RUN)
    tracker = fastamp.MetricsTracker(sinks=[break_sometimes])
    assert outcome(*run(folder, tracker=tracker, **RUN)) == shared().expected
    tracker.close()


def iterated(rng, folder):
    """Train on a loader whose dataset fails, in `fine_tune`, without checkpoints."""
    bad = rng.randrange(96)
    x, y = make_data()

    class Failing(torch.utils.data.Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            if i == bad:
                raise BrokenError
            return x[i], y[i]

    with suppress(BrokenError):
        run(data=Failing(), **RUN)


PEACEFUL = (gathered, fetched, prefetched, stepped, timed, tracked, threads)
"""Jobs that may run side by side, each in a thread."""
ALONE = (workers, forked, interrupted, trained, iterated)
"""Jobs of the main thread, while no other one runs: they fork, hear signals, or draw what must be
repeatable."""
