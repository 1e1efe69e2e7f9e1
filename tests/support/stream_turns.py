"""Threads of the model of streams: they take turns by a seed, and each has a vector clock.

A clock holds what a thread, or a stream, knows to have happened.
"""

from __future__ import annotations

import contextlib
import random
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.stream_devices import Stream

Clock = dict[str, int]


def join(clock: Clock, other: Clock) -> None:
    for name, time in other.items():
        if clock.get(name, 0) < time:
            clock[name] = time


def is_before(clock: Clock, other: Clock) -> bool:
    return all(other.get(name, 0) >= time for name, time in clock.items())


class Deadlock(BaseException):
    """No thread can go on."""


class Thread:
    """In place of threading.Thread: runs while it has the turn."""

    model: Turns

    def __init__(self, target: Callable[..., None], args: Any = (), **_: Any) -> None:
        model = self.model
        self.name, self._target, self._args = f"thread {len(model.threads)}", target, args
        self.clock: Clock = {}
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.weight = model.rng.choice((0.1, 1.0, 1.0, 5.0))
        self.turn, self.alive, self.native_id = threading.Semaphore(0), False, 0
        self.ready: Callable[[], bool] = lambda: True
        model.threads.append(self)

    def start(self) -> None:
        self.alive, self.clock = True, dict(self.model.current.clock)
        threading.Thread(target=self._run, daemon=True).start()
        self.model.switch()

    def _run(self) -> None:
        self.turn.acquire()
        with contextlib.suppress(Deadlock), self.model:
            try:
                self._target(*self._args)
            except BaseException as error:  # noqa: BLE001 - a thread that dies is a fault
                self.model.report(f"{self.name} ended with {error!r}")
            self._target = self._args = None  # dies in its turn
        self.alive = False
        self.model.hand_on(self)

    def join(self, timeout: float | None = None) -> None:
        if self is self.model.current:
            msg = "cannot join current thread"
            raise RuntimeError(msg)
        self.model.switch(lambda: not self.alive)
        join(self.model.current.clock, self.clock)

    def is_alive(self) -> bool:
        return self.alive


class Pool:
    """In place of a ThreadPoolExecutor of one thread."""

    model: Turns

    def __init__(self, *_: Any) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.ends = False
        self.clock: Clock = {}
        self.thread = self.model.Thread(self._serve)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future = self.model.Future()
        self.jobs.append((future, partial(function, *args)))
        join(self.clock, self.model.current.clock)
        if self.thread.alive:
            self.model.switch()
        else:
            self.thread.start()
        return future

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        self.ends = True
        if cancel_futures:
            self.jobs.clear()
        if wait and self.thread.alive:
            self.thread.join()

    def _serve(self) -> None:
        while True:
            self.model.switch(lambda: bool(self.jobs) or self.ends)
            if not self.jobs:
                return
            join(self.model.current.clock, self.clock)
            future, call = self.jobs.pop(0)
            try:
                future.value = call()
            except Exception as error:  # noqa: BLE001 - as the pool's threads
                future.error = error
            future.is_done = True
            join(future.clock, self.model.current.clock)
            del future, call
            self.model.switch()


class Future:
    """In place of concurrent.futures.Future."""

    model: Turns

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.is_done, self.value, self.error = False, None, None

    def exception(self) -> BaseException | None:
        self.model.switch(lambda: self.is_done)
        join(self.model.current.clock, self.clock)
        return self.error

    def result(self) -> Any:
        if error := self.exception():
            raise error
        return self.value


class Lock:
    """In place of threading.RLock."""

    model: Turns

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.owners: list[Thread] = []

    def __enter__(self) -> None:
        me = self.model.current
        self.model.switch(lambda: self.owners in ([], [me] * len(self.owners)))
        self.owners.append(me)
        join(me.clock, self.clock)

    def __exit__(self, *_: object) -> None:
        join(self.clock, self.model.current.clock)
        self.owners.pop()


class Turns:
    """Lets one thread run at a time, and keeps what was found."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.found: list[str] = []
        self.threads: list[Thread] = []
        self.dead = False
        self.Thread, self.Lock = map(self.own, (Thread, Lock))
        self.Pool, self.Future = map(self.own, (Pool, Future))
        self.current = self.Thread(lambda: None)
        self.current.alive = True

    def own(self, kind: type) -> Any:
        """Return a subclass that has this model: it stands in for a class of torch or Python."""
        return type(kind.__name__, (kind,), {"model": self})

    def switch(self, ready: Callable[[], bool] | None = None) -> None:
        """Perhaps let another thread run; return when this one is ready and has the turn."""
        me = self.current
        if ready is None and (len(self.threads) == 1 or self.rng.random() < 0.5):
            return
        me.ready = ready or (lambda: True)
        self.hand_on(me)

    def hand_on(self, me: Thread) -> None:
        able = [thread for thread in self.threads if thread.alive and thread.ready()]
        if not able:
            self.dead = True
            for thread in self.threads:
                thread.turn.release()
        else:
            (self.current,) = self.rng.choices(able, [thread.weight for thread in able])
            if self.current is me:
                return
            self.current.turn.release()
        if me.alive:
            me.turn.acquire()
            if self.dead:
                raise Deadlock

    def report(self, fault: str) -> None:
        if fault not in self.found:
            self.found.append(fault)
