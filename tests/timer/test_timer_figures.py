"""What the timer tells: figures, tables and files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support import reference

from fastamp import Timer


def durations(shape: str, size: int = 100_000) -> np.ndarray:
    """Return nanoseconds."""
    rng = np.random.default_rng(0)
    if shape == "lognormal":
        return rng.lognormal(13, 2, size).astype(np.int64)
    if shape == "bimodal":
        fast, slow = rng.normal(2e4, 500, size), rng.normal(3e9, 1e8, size)
        return np.where(rng.random(size) < 0.7, fast, slow).astype(np.int64)
    return np.full(size, 123_456_789)


def record(timer: Timer, name: str, values_ns: np.ndarray) -> None:
    """Count durations that nobody waited for."""
    region = timer(name)
    for value in values_ns.tolist():
        region.add(value)


@pytest.mark.parametrize("shape", ["lognormal", "bimodal", "constant"])
def test_figures_are_exact_and_percentiles_within_a_bucket(timer, shape):
    values_ns = durations(shape)
    record(timer, shape, values_ns)
    stats = timer.summary()[shape]
    expected = reference.durations(values_ns)
    for name in ("count", "total", "mean", "min", "max"):
        assert getattr(stats, name) == expected[name], name
    for name in ("p50", "p90", "p99"):
        assert getattr(stats, name) == pytest.approx(expected[name], rel=0.032), name


def test_no_bucket_is_wider_than_promised_and_all_are_the_same_everywhere(timer):
    exact = [*range(200), *(2**k + d for k in range(8, 50) for d in (-1, 0, 1)), 2**62]
    for value in exact:
        timer.reset()
        record(timer, "x", np.array([value]))
        stats = timer.summary()["x"]
        assert stats.histogram == ((reference.bucket(value), 1),), value
        assert stats.p50 == stats.min == stats.max == value / 1e9


def test_json_has_the_summary_and_the_time_since_the_first_region_or_the_reset(
    monkeypatch, tmp_path
):
    now = [10.0]
    monkeypatch.setattr("fastamp.timer.timer.perf_counter", lambda: now[0])
    timer, path = Timer("cpu"), tmp_path / "timer.json"

    def content():
        timer.to_json(path)
        return json.loads(path.read_text())

    assert content() == {"schema": 1, "unit": "s", "device": "cpu", "elapsed": 0, "regions": {}}
    timer.reset()  # of nothing
    for name, at, expected in (("x", 11.0, 0), ("y", 14.0, 3), ("x", 15.0, 4)):
        now[0] = at
        record(timer, name, durations("bimodal", 1000))
        assert content()["elapsed"] == expected
    stats = timer.summary()["x"]
    histogram = [*map(list, stats.histogram)]
    assert content()["regions"]["x"] == {**stats._asdict(), "histogram": histogram}
    timer.reset()
    now[0] = 17.0
    assert content()["elapsed"] == 2
    with pytest.raises(OSError, match=r"'/proc/x\.json'$"):
        timer.to_json("/proc/x.json")


def test_the_table_has_a_line_for_each_region(timer):
    with timer("step"), timer("forward"):
        pass
    record(timer, "fixed", np.array([2_500_000, 2_500_000]))
    lines = timer.table().splitlines()
    assert lines[0].split()[:3] == ["region", "count", "total"]
    assert [line.split()[0] for line in lines[1:]] == ["step", "step/forward", "fixed"]
    assert lines[-1].split() == ["fixed", "2", "5", "ms", *["2.5", "ms"] * 6]
    assert Timer("cpu").table().startswith("region")
