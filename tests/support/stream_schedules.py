"""Programs that use fastamp on several streams, devices and threads, drawn from seeds.

They run on the model of torch.cuda.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from support.stream_model import Model
from support.stream_turns import Deadlock
from torch.utils._pytree import tree_leaves

import fastamp
from fastamp import _ops
from fastamp.data import copies as prefetching
from fastamp.data import making, runners
from fastamp.metrics import tracker as trackers
from fastamp.timer import events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ALL = ("devices", "streams", "captures", "refilled", "slices", "made there", "errors")
"""The features that a program may have."""


class Batches:
    """Batches that Python makes, and errors between them."""

    def __init__(self, model: Model, there: int, features: tuple[str, ...]) -> None:
        self.rng, self.there, self.features = model.rng, there, features
        self.left = self.rng.randint(2, 6)
        self.buffer = torch.empty(3, 4, pin_memory=True)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        self.left -= 1
        if "errors" in self.features and self.rng.random() < 0.1:
            raise LookupError
        return {"x": self.make(), "y": [self.make(), "text"]}

    def make(self) -> torch.Tensor:
        kind = self.rng.choice(("fresh", "pinned", *self.features))
        if kind == "refilled":
            self.buffer.fill_(self.left)
            return self.buffer
        if kind == "made there":
            return torch.empty(3, 4, device=f"cuda:{self.there}").fill_(1.0)
        made = torch.empty(3, 4, pin_memory=kind == "pinned" or self.rng.random() < 0.5).fill_(1.0)
        return made[:, :-1] if kind == "slices" else made


class Program:
    """A thread of a program on the model, which takes batches from a device."""

    def __init__(self, model: Model, features: tuple[str, ...]) -> None:
        self.model, self.rng, self.features = model, model.rng, features
        several = "devices" in features
        self.here, self.there = (self.rng.randrange(2) if several else 1 for _ in range(2))
        model.set_device(self.here)
        model.contexts.clear()
        self.streams = [model.defaults[self.there]]
        if "streams" in features:
            self.streams += [model.Stream(self.there) for _ in range(2)]
        if "made there" not in features:  # whose batches have to be waited for
            model.consumers.update(stream.name for stream in self.streams)

    def compute(self, *tensors: torch.Tensor) -> None:
        """Read tensors on the current stream, with memory of its own, and write to some."""
        scratch = torch.empty(3, 4, device=f"cuda:{self.there}")
        changed = tensors[:1] if self.rng.random() < 0.3 else ()
        stream = self.model.current_stream(self.there)
        self.model.kernel(*tensors, writes=(scratch, *changed), stream=stream)

    def capture(self) -> None:
        if "captures" in self.features and self.rng.random() < 0.3:
            with self.model.capture(self.model.Stream(self.there)):
                torch.empty(3, 4, device=f"cuda:{self.there}")

    def consume(self, batches: Iterator[Any]) -> None:
        """Take batches, compute with them, and keep them or not; change streams in between."""
        model, rng, kept = self.model, self.rng, []
        end = rng.choice((1, 3, 100))
        for _ in range(end):
            if rng.random() < 0.3:
                model.current.streams[self.there] = rng.choice(self.streams)
            self.capture()
            try:
                batch = next(batches)
            except StopIteration:
                break
            except LookupError:
                continue
            tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
            if any(str(tensor.device) != f"cuda:{self.there}" for tensor in tensors):
                model.report("a batch on another device")
            stream = model.current_stream(self.there)
            self.compute(*tensors)
            if rng.random() < 0.3:
                kept.append((stream, tensors))
            for mine, old in kept[:1]:
                if mine is stream:
                    self.compute(*old)
            if rng.random() < 0.2:
                stream.synchronize()
            if rng.random() < 0.3:
                kept.clear()
            del batch, tensors

    def check(self) -> None:
        """Wait for all threads, and check what they have left."""
        for thread in self.model.threads[1:]:
            thread.join()
        if self.here == self.there and self.model.contexts - {self.there}:
            self.model.report("a context on another device")
        if self.model.num_staged:
            self.model.report("a copy goes through pageable memory")


def prefetched(model: Model, features: tuple[str, ...], module: Any) -> None:
    """Passes of fastamp.prefetch, one after the other."""
    program = Program(model, features)
    for _ in range(model.rng.choice((1, 1, 2))):
        made = Batches(model, program.there, features)
        device = "cuda" if program.here == program.there else f"cuda:{program.there}"
        batches = iter(module.prefetch(made, device, thread=model.rng.random() < 0.5))
        program.consume(batches)
        del batches
        made.buffer.fill_(0.0)
    program.check()


def loaded(model: Model, features: tuple[str, ...], module: Any) -> None:
    """A pass of fastamp.DataLoader: gathered, item by item, or of threads."""
    program = Program(model, features)
    data = torch.arange(24.0).reshape(12, 2), torch.arange(12, dtype=torch.uint8)
    dataset = torch.utils.data.TensorDataset(*data)
    kind = model.rng.choice(("gathered", "on the device", "item by item", "threads"))
    options = {"num_workers": 2, "worker": "thread"} if kind == "threads" else {}
    device = f"cuda:{program.there}"
    if kind == "on the device":
        dataset = torch.utils.data.TensorDataset(*(column.to(device) for column in data))
    elif kind != "gathered":
        dataset = [*dataset]
    model.num_staged = 0  # for a dataset that is moved there
    loader = fastamp.DataLoader(dataset, 3, device=device, shuffle=True, **options)
    begun = iter(loader)
    program.consume(begun)
    del begun, loader
    if "captures" not in features and model.contexts - {program.there}:
        model.report("a context where nothing is computed")
    program.check()


def tracked(model: Model, features: tuple[str, ...], module: Any) -> None:
    """Scalars of a device that one thread logs, while another logs numbers."""
    del module
    program = Program(model, features)
    rng, tracker = model.rng, fastamp.MetricsTracker()

    def log_numbers() -> None:
        for step in range(12):
            tracker.log_scalar("number", float(step), step)
            model.switch()

    thread = model.Thread(log_numbers)
    thread.start()
    loss = torch.empty((), device=f"cuda:{program.there}")
    expected = []
    for step in range(8):
        if rng.random() < 0.3:
            new = rng.choice(program.streams)
            new.wait_stream(model.current_stream(program.there))
            model.current.streams[program.there] = new
        loss.fill_(float(step))
        expected.append(float(step))
        tracker.log_scalar("loss", loss, step)
        program.capture()
    thread.join()
    if tracker.history("loss")[1].tolist() != expected:
        model.report("other values")
    tracker.close()
    program.check()


def timed(model: Model, features: tuple[str, ...], module: Any) -> None:
    """Regions of two threads that one timer times."""
    del module
    program = Program(model, features)
    timer = fastamp.Timer(f"cuda:{program.there}")

    def work() -> None:
        for _ in range(6):
            with timer("region"):
                model.switch()
            if model.rng.random() < 0.3:
                timer.summary()

    thread = model.Thread(work)
    thread.start()
    for _ in range(6):
        model.current.streams[program.there] = model.rng.choice(program.streams)
        with timer("region"):
            program.capture()
    thread.join()
    if timer.summary()["region"].count != 12:
        model.report("other counts")
    program.check()


PROGRAMS: dict[str, Callable[..., None]] = {
    "prefetch": prefetched,
    "loader": loaded,
    "tracker": tracked,
    "timer": timed,
}


def run(
    name: str, seed: int, features: tuple[str, ...] | None = None, module: Any = prefetching
) -> list[str]:
    """Run a program by a seed, and return what was found."""
    model = Model(seed)
    if features is None:
        features = tuple(feature for feature in ALL if model.rng.random() < 0.5)
    with (
        model.installed(module, runners, making, trackers, events) as patch,
        _ops.use_only("fallback"),
    ):
        patch.setattr(trackers, "QUEUE", 4)
        patch.setattr(module, "_LATE", model.rng.choice((1, 32)), raising=False)
        for each in {module, prefetching}:
            patch.setattr(each, "_sides", {})
        try:
            PROGRAMS[name](model, features, module)
        except Deadlock:
            model.report("no thread can go on")
    return model.found
