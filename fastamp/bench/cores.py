"""How long this process waited for a core that another program had: its neighbours, counted.

The kernel counts for each thread how long it ran, and how long it was ready and waited for a core.
Where more of our own threads are ready than there are cores, they wait for each other: so a wait
counts no further than the cores' time that they and our workers, also those that have ended, did
not use, and than the time for which the kernel says that others ran.
"""

import math
import os
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

MOST_WAITING = 0.1  # of the time of our threads: beyond it there is no verdict
PROCESSES = Path("/proc")


class Waiting(NamedTuple):
    """Seconds of all threads of this process and its workers."""

    ran_s: float
    waited_s: float  # for a core that others had

    @property
    def share(self) -> float:
        """The share of their time in which the threads waited."""
        return self.waited_s / max(self.ran_s + self.waited_s, 1e-9)


class Cores:
    """Counts from its making on."""

    def __init__(self) -> None:
        self._start_s, self._start = perf_counter(), _read()
        self._ended_s, self._busy_s = _count_ended_s(), _count_busy_s()

    def waiting(self) -> Waiting | None:
        """Return the time that threads ran and waited; None where the kernel does not count it."""
        elapsed_s, end = perf_counter() - self._start_s, _read()
        if not end:
            return None
        then = [self._start.get(thread, (0, 0)) for thread in end]
        sums = [[math.fsum(each) for each in zip(*t, strict=True)] for t in (end.values(), then)]
        ran_s, waited_s = (1e-9 * (now - before) for now, before in zip(*sums, strict=True))
        ran_s += _count_ended_s() - self._ended_s
        free_s = len(os.sched_getaffinity(0)) * elapsed_s - ran_s
        busy_s, others_s = _count_busy_s(), free_s
        if busy_s is not None and self._busy_s is not None:
            others_s = busy_s - self._busy_s - ran_s
        return Waiting(ran_s, max(min(waited_s, free_s, others_s), 0.0))


def _count_ended_s() -> float:
    """Return the processor time of processes that this one started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _count_busy_s() -> float | None:
    """Return the time for which cores have run programs; None where the kernel does not say."""
    try:
        _, *times = (PROCESSES / "stat").read_text(encoding="ascii").partition("\n")[0].split()
        user, nice, system, _idle, _wait, irq, soft_irq, stolen, *_ = map(int, times)
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK")


def _read() -> dict[str, tuple[int, int]]:
    """Return how long each thread ran and waited so far, in nanoseconds, by its file."""
    found = {}
    for process in ("self", *(str(child.pid) for child in active_children())):
        for file in PROCESSES.glob(f"{process}/task/*/schedstat"):
            with suppress(OSError, ValueError):  # the thread has ended
                ran, waited, *_ = file.read_text(encoding="ascii").split()
                found[str(file)] = (int(ran), int(waited))
    return found
