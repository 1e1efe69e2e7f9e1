"""How long this process waited for a core that another program had: its neighbours, counted.

The kernel counts for each thread how long it ran, and how long it was ready and waited for a core.
Where more of our own threads are ready than there are cores, they wait for each other: so a wait
counts no further than the time for which our cores ran other programs.
"""

import math
import os
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path
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
        self._start, self._busy_s = _read(), _count_busy_s()

    def waiting(self) -> Waiting | None:
        """Return the time that threads ran and waited; None where the kernel does not count it."""
        end, busy_s = _read(), _count_busy_s() - self._busy_s
        if not end:
            return None
        pairs = [(times, self._start.get(thread, (0.0, 0.0))) for thread, times in end.items()]
        ran_s, waited_s = (math.fsum(now[k] - before[k] for now, before in pairs) for k in (0, 1))
        return Waiting(ran_s, max(min(waited_s, busy_s - ran_s), 0.0))


def _count_busy_s() -> float:
    """Return for how long the cores that this process may use have run programs."""
    file, ticks = PROCESSES / "stat", {}
    if not file.exists():
        return 0.0
    for name, *times in map(str.split, file.read_text(encoding="ascii").splitlines()):
        if name.startswith("cpu"):
            user, nice, system, _idle, _wait, irq, soft_irq, stolen, *_ = map(int, times)
            ticks[name] = user + nice + system + irq + soft_irq + stolen
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    names = ours if ours <= {*ticks} else {"cpu"}  # all that a container with its own numbers has
    return sum(ticks[name] for name in names) / os.sysconf("SC_CLK_TCK")


def _read() -> dict[str, tuple[float, float]]:
    """Return the seconds that each thread ran and waited so far, and that ended workers ran."""
    found = {}
    for process in ("self", *(str(child.pid) for child in active_children())):
        for file in PROCESSES.glob(f"{process}/task/*/schedstat"):
            with suppress(OSError, ValueError):  # the thread has ended
                ran, waited, *_ = file.read_text(encoding="ascii").split()
                found[str(file)] = (1e-9 * int(ran), 1e-9 * int(waited))
    times = os.times()
    return found and {**found, "ended": (times.children_user + times.children_system, 0.0)}
