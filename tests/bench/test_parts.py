"""Where the time of a user's step goes, from the regions of a timer."""

from __future__ import annotations

import math

import pytest

import fastamp
from fastamp.bench.parts import read_profile


def summary(**regions):
    """Return a timer's summary of (milliseconds, visits); "__" stands for "/"."""
    timer = fastamp.Timer("cpu")
    found = {}
    for name, (time_ms, count) in regions.items():
        region = timer("x")
        for _ in range(count):
            region.add(round(time_ms * 1e6))
        found[name.replace("__", "/")] = timer.summary()["x"]
        timer.reset()
    return found


def parts_ms(regions):
    profile = read_profile(regions, "cpu")
    return profile.steps, {p: round(t.value * 1e3, 6) for p, t in profile.parts.items()}


def test_regions_are_sorted_by_their_names_and_nested_ones_are_counted_once():
    regions = summary(
        data=(2, 20), train=(20, 20), train__forward=(8, 20), train__forward__attention=(3, 20),
        train__backward=(6, 20), train__backward__step=(1, 10), step=(4, 10), train__log=(1, 20),
        eval=(99, 3), eval__forward=(98, 3), checkpoint=(50, 2),
    )  # fmt: skip
    steps, parts = parts_ms(regions)
    assert steps == 10  # two batches are accumulated for each
    assert parts == {"data": 4, "forward": 16, "backward": 11, "step": 5, "other": 12}
    whole = summary(step=(9, 5), step__forward=(2, 5), step__backward=(3, 5), step__log=(1, 5))
    assert parts_ms(whole) == (5, {"forward": 2, "backward": 3, "step": 4})


def test_a_step_alone_is_the_whole_step():
    assert parts_ms(summary(data=(1, 5), step=(9, 5))) == (5, {"data": 1, "other": 9})
    assert parts_ms(summary(forward=(1, 5), step=(9, 5))) == (5, {"forward": 1, "step": 9})
    assert parts_ms(summary(step=(9, 5))) == (5, {"other": 9})
    for name in ("mine", "forward_pass", "other"):
        with pytest.raises(ValueError, match="no region is named after a part of a step: 'data'"):
            read_profile(summary(**{name: (1, 5)}), "cpu")


def test_the_longest_visit_is_left_out_and_the_rest_has_an_interval():
    timer = fastamp.Timer("cpu")
    for time_ms in (5000, *range(90, 111)):
        timer("forward").add(time_ms * 1_000_000)
    found = read_profile(timer.summary(), "cpu").parts["forward"]
    assert found.value == pytest.approx(0.1)
    # The standard deviation of 90 to 110 is 6.06, without the longest visit, which is no part.
    assert found.high - found.value == pytest.approx(1.96 * 6.06e-3 / math.sqrt(21), rel=0.1)
    assert found.value - found.low == pytest.approx(found.high - found.value)
