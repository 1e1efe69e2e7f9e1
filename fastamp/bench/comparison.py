"""Callables of a program of one's own, raced in turn as the bench races its arms."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch

from fastamp._progress import progress
from fastamp.bench.race import UNTOLD, Case, Plan, Race, find_noise, run_race, show
from fastamp.timer.timer import align

VISIT_S = 0.01  # of a callable, about: short ones are called several times
MOST_CALLS = 50
PLAN = Plan(build_s=1.0, limit_s=60.0)


class Ratio(NamedTuple):
    """How many times as fast, its 95 % interval, and what that means."""

    value: float
    low: float
    high: float
    verdict: str
    """"faster", "slower", "equal" (within 2 %) or "cannot tell", also where the machine is busy."""


class Comparison:
    """What a race has found; `str()` of it is a table, with the first callable as the base."""

    def __init__(self, race: Race) -> None:
        self._race = race

    def ratio(self, name: str, base: str) -> Ratio:
        """Return how many times as fast one callable is as another one.

        Raises:
            KeyError: there is no such callable.
        """
        for each in (name, base):
            if each not in self._race.arms:
                msg = f"{each!r} is none of {', '.join(self._race.arms)}"
                raise KeyError(msg)
        found = self._race.ratio(name, base)
        verdict = UNTOLD if find_noise({"": self._race}) else found.verdict
        return Ratio(found.value, found.low, found.high, verdict)

    def __str__(self) -> str:
        base = self._race.arms[0]
        rows = [["", "median ms", f"times as fast as {base} [95 %]", "verdict"]]
        for name in self._race.arms:
            ratio = self._race.ratio(name).text(".2f", "x") if name != base else ""
            verdict = self.ratio(name, base).verdict if name != base else ""
            rows.append([name, show(1e3 * self._race.quartiles_s(name)[1], ".4g"), ratio, verdict])
        noise = find_noise({"the comparison": self._race})
        return "\n".join([*align(rows), *filter(None, [noise])])


def compare(
    callables: Mapping[str, Callable[[], object]],
    *,
    build_s: float = PLAN.build_s,
    device: torch.device | str | None = None,
) -> Comparison:
    """Race two or more callables: any loops, steps or passes of a program of one's own.

    They take turns in random mirrored order, so that a machine that slows down slows all of them
    down, in 5 to 12 parts, over which the interval is. Each is called at least 15 times. They live
    through the whole race, so it does not vary where their memory lies: run the program again for
    that.

    Args:
        callables: by name, without arguments. The first one is the base of the table.
        build_s: seconds of a part, after which no more calls begin.
        device: waited for after each call; None is CUDA where the program has used it.

    Raises:
        ValueError: there are fewer than two callables.
        TypeError: one cannot be called.

    Example:
        >>> import fastamp.bench
        >>> x = torch.randn(64, 64)
        >>> found = fastamp.bench.compare({"sum": x.sum, "norm": x.norm}, build_s=0.01)
        >>> found.ratio("norm", "sum").verdict in {"faster", "slower", "equal", "cannot tell"}
        True
    """
    if len(callables) < 2:
        msg = f"callables: expected two or more, got {len(callables)}"
        raise ValueError(msg)
    given: Mapping[str, Any] = callables
    for name, call in given.items():
        if not callable(call):
            msg = f"callables[{name!r}]: expected a function, got {type(call).__name__}"
            raise TypeError(msg)
    cuda: Any = torch.cuda
    kind = torch.device(device or ("cuda" if cuda.is_initialized() else "cpu")).type
    fastest_s = min(map(_time_s, callables.values()))
    calls = min(max(round(VISIT_S / max(fastest_s, 1e-9)), 1), MOST_CALLS)
    case, plan = Case(arms=callables, calls=calls), replace(PLAN, build_s=build_s)
    with progress(plan.builds[-1]) as tick:
        return Comparison(run_race(lambda: case, plan, device=kind, tick=tick))


def _time_s(call: Callable[[], object]) -> float:
    start_s = perf_counter()
    call()
    return perf_counter() - start_s
