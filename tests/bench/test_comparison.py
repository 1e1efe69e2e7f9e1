"""`fastamp.bench.compare`: callables of a program of one's own, raced in turn."""

from __future__ import annotations

from functools import partial

import pytest
from support.fake_clock import FakeClock

import fastamp.bench
from fastamp.bench import comparison, race


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that the callables move, also for the call that is timed first."""
    made = FakeClock(monkeypatch, noise=0.001)
    monkeypatch.setattr(comparison, "timeit", lambda call, number: made.time(call))
    return made


def test_callables_take_turns_and_a_ratio_has_ends_and_a_verdict(clock):
    calls = {"torch": [], "fastamp": []}

    def make(name, time_s):
        def call():
            calls[name].append(clock.now_s)
            clock.spend(time_s)

        return call

    found = fastamp.bench.compare({"torch": make("torch", 0.3), "fastamp": make("fastamp", 0.2)})
    ratio = found.ratio("fastamp", "torch")
    assert ratio.low < 1.5 < ratio.high
    assert ratio.value == pytest.approx(1.5, rel=1e-2)
    assert (ratio.verdict, found.ratio("torch", "fastamp").verdict) == ("faster", "slower")
    assert found.ratio("torch", "torch").verdict == "equal"
    assert all(len(each) >= 15 for each in calls.values())
    order = sorted((time_s, name) for name, times_s in calls.items() for time_s in times_s)
    names = [name for _, name in order]
    assert all(len({*names[place : place + 3]}) == 2 for place in range(len(names) - 2))


def test_its_text_is_a_table_of_all_callables(clock):
    times_s = {"a": 0.2, "b": 0.1, "c": 0.2}
    arms = {name: partial(clock.spend, time_s) for name, time_s in times_s.items()}
    head, a, b, c = str(fastamp.bench.compare(arms)).splitlines()
    assert "times as fast as a [95 %]" in head
    assert float(a.split()[1]) == pytest.approx(200, rel=1e-2)
    assert b.split()[0] == "b"
    assert "2.00x [" in b
    assert b.endswith("faster")
    assert c.endswith("equal")


def test_a_busy_machine_cannot_tell(clock, monkeypatch):
    monkeypatch.setattr(race.Race, "waiting", lambda _: 0.5)
    found = fastamp.bench.compare({n: partial(clock.spend, t) for n, t in (("a", 2), ("b", 1))})
    assert found.ratio("b", "a").verdict == "cannot tell"
    assert "this machine is too busy" in str(found).splitlines()[-1]


def test_a_short_callable_is_called_several_times_in_a_visit(clock):
    calls = []

    def short():
        calls.append(1)
        clock.spend(1e-3)

    fastamp.bench.compare({"a": short, "b": partial(clock.spend, 1.0)}, build_s=1e-9)
    assert len(calls) % 10 == 1  # and one before
    assert len(calls) > 150


def test_a_wrong_argument_is_named(clock):
    for callables in ({"a": max}, [max, min], {"a": max, "b": 3}):
        with pytest.raises(TypeError, match="callables: expected two or more by name"):
            fastamp.bench.compare(callables)
    with pytest.raises(ValueError, match="build_s: expected a number above 0, got 0"):
        fastamp.bench.compare({"a": max, "b": min}, build_s=0)
    found = fastamp.bench.compare({n: partial(clock.spend, 1.0) for n in "ab"})
    with pytest.raises(KeyError, match="'c'"):
        found.ratio("c", "a")
