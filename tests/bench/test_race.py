"""The statistics of the benchmark: the order of visits, intervals, verdicts, baselines."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import subprocess

import numpy as np
import pytest
from support.fake_clock import FakeClock

from fastamp.bench import environment, record, timer
from fastamp.bench.__main__ import main
from fastamp.bench.baseline import bound, hold
from fastamp.bench.race import (
    AGAIN,
    Interval,
    Plan,
    Race,
    Visit,
    bootstrap,
    find_noise,
    run_race,
    verdict_on,
)

PLAN = Plan(rounds=64, warmup=0)


@pytest.fixture
def race_of(monkeypatch):
    """Return a race on a fake clock, of arms that return how long they took."""
    clock = FakeClock(monkeypatch)

    def run(arms, plan, **options):
        calls = {name: lambda arm=arm: clock.spend(arm()) for name, arm in arms.items()}
        return run_race(calls, plan, **options)

    return run


# The order of visits, and what becomes of them


def test_a_block_is_a_random_order_and_its_reverse(race_of):
    race = race_of({name: lambda: 1.0 for name in "abc"}, PLAN, seed=1)
    orders = ["".join(round_) for round_ in race.rounds]
    assert orders[1::2] == [order[::-1] for order in orders[::2]]
    assert len(orders) == 64
    assert set(orders) == {"".join(order) for order in itertools.permutations("abc")}


def test_a_machine_that_slows_down_steadily_does_not_move_the_ratio(race_of):
    now = itertools.count()

    def arm(seconds):
        return lambda: seconds * (1 + 0.01 * next(now))

    race = race_of({"stock": arm(1.5), "ours": arm(1.0)}, PLAN)
    assert race.ratio("ours").value == pytest.approx(1.5, rel=1e-3)
    first, last = (list(race.rounds[i].values())[i].elapsed_s for i in (0, -1))
    assert last / first > 1.5  # as much as what is to be found
    placebo = race.placebo()
    assert placebo.low < 1 < placebo.high


@pytest.mark.parametrize(("warmup", "rounds", "left_out"), [(4, 10, 4), (3, 10, 4), (3, 9, 3)])
def test_the_warmup_is_left_out_and_the_rest_is_whole_blocks(race_of, warmup, rounds, left_out):
    times_s = iter([9.0] * left_out + [1.0] * (rounds - left_out))
    race = race_of({"a": lambda: next(times_s)}, Plan(rounds=rounds, warmup=warmup))
    assert (race.warmup_rounds, len(race.rounds)) == (left_out, rounds)
    assert race.times_s("a") == pytest.approx([1.0] * (rounds - left_out))


def test_a_visit_that_left_out_work_is_counted_and_in_no_ratio(race_of):
    calls = itertools.count()
    skips = {4, 9}
    now = iter(range(1000))
    race = race_of(
        {"a": lambda: 2.0, "b": lambda: 1e-3 if next(calls) in skips else 1.0},
        Plan(rounds=16, warmup=0),
        skipped=lambda name: name == "b" and next(now) in skips,
    )
    assert race.skipped("b") == 2
    assert race.ratio("b").value == pytest.approx(2.0)
    assert race.times_s("b") == pytest.approx([1.0] * 14)


def test_a_visit_of_many_calls_is_their_median_each_prepared_off_the_clock(monkeypatch):
    clock = FakeClock(monkeypatch)
    times_s, prepared = itertools.cycle([1.0, 2.0, 90.0]), []

    def prepare(name):
        prepared.append(name)
        clock.spend(5.0)

    arms = {name: lambda: clock.spend(next(times_s)) for name in "ab"}
    race = run_race(arms, Plan(rounds=6, warmup=0), calls=3, before=prepare)
    assert race.times_s("a") == race.times_s("b") == [2.0] * 6
    assert "".join(prepared) == "".join(3 * name for round_ in race.rounds for name in round_)


def test_a_race_stops_when_all_intervals_are_narrow_or_its_time_is_over(race_of):
    rng = np.random.default_rng(0)
    arms = {name: lambda: math.exp(rng.normal(0, 0.05)) for name in "ab"}
    narrow = race_of(arms, Plan(rounds=4000, warmup=0, half_width=0.02))
    assert 12 <= len(narrow.blocks()) < 200
    assert math.log(narrow.ratio("b").high / narrow.ratio("b").low) <= 0.04
    assert len(race_of(arms, Plan(rounds=4000, warmup=0, limit_s=0)).blocks()) == 3


def test_the_base_again_is_the_placebo_where_it_runs(race_of):
    race = race_of({"a": lambda: 2.0, AGAIN: lambda: 1.0}, PLAN)
    assert race.placebo().value == pytest.approx(2.0)


# Intervals and verdicts


@pytest.mark.parametrize("blocks", [5, 12, 60])
@pytest.mark.parametrize("hits", [0.0, 0.25])
def test_an_interval_covers_the_truth_as_often_as_it_says(blocks, hits):
    rng = np.random.default_rng(blocks)
    covered = 0
    for _ in range(200):
        noise = rng.normal(0, 0.01, (blocks, 4))
        noise += (rng.random((blocks, 4)) < hits) * rng.exponential(0.5, (blocks, 4))
        found = bootstrap((noise @ [0.5, 0.5, -0.5, -0.5]).tolist())
        covered += found.low <= 0 <= found.high
    assert covered >= 180  # of 190 expected, 3.2 standard deviations


def test_neighbours_that_resemble_each_other_widen_the_interval():
    rng = np.random.default_rng(0)
    alone = rng.normal(0, 1, 320)
    runs = np.repeat(alone[:32], 10)
    widths = [bootstrap(values.tolist()) for values in (alone, runs)]
    assert widths[1].high - widths[1].low > 2 * (widths[0].high - widths[0].low)
    few = np.repeat(alone[:20], 2)  # 40, in runs of 2
    widths = [bootstrap(values.tolist()) for values in (rng.permutation(few), few)]
    assert widths[1].high - widths[1].low > 1.1 * (widths[0].high - widths[0].low)


def test_few_blocks_have_no_interval_and_none_no_figure():
    two = bootstrap([1.0, 2.0])
    assert (two.value, two.low, two.high) == (1.5, -math.inf, math.inf)
    assert math.isnan(bootstrap([]).value)
    assert verdict_on(two, 0) == "inconclusive"


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ((1.5, 1.6), "pass"),
        ((1.4, 1.4999), "fail"),
        ((1.4, 1.5), "inconclusive"),
        ((math.nan, math.nan), "inconclusive"),
    ],
)
def test_only_an_interval_that_clears_the_target_passes(ends, verdict):
    assert verdict_on(Interval(value=1.5, low=ends[0], high=ends[1]), low=1.5) == verdict


# A thousand races whose truth is known


def simulate(race_of, seed, rounds, ratio, name="ours"):
    """Race on a machine that drifts, with heavy tails, and now and then a busy neighbour."""
    rng = np.random.default_rng(seed)
    drift = itertools.accumulate(iter(lambda: 0.002 * rng.normal() + 0.3 / rounds, None))

    def arm(time_s):
        def spend():
            busy = rng.exponential(0.5) * (rng.random() < 0.1)
            return time_s * math.exp(next(drift) + 0.02 * rng.standard_t(3) + busy)

        return spend

    arms = {"stock": arm(ratio), name: arm(1.0)}
    return race_of(arms, Plan(rounds=rounds, warmup=0), seed=seed)


def test_intervals_hold_the_truth_in_94_percent_of_a_thousand_races(race_of):
    held = 0
    for seed in range(1000):
        found = simulate(race_of, seed, (12, 24, 48)[seed % 3], 1.5).ratio("ours")
        held += found.low <= 1.5 <= found.high
    assert held >= 940


def test_every_planted_slowdown_of_5_percent_is_found(race_of):
    races = [simulate(race_of, seed, 128, 1 / 1.05) for seed in range(20)]
    assert [race.ratio("ours").high < 1 for race in races] == [True] * 20
    assert [find_noise({"x": race}) for race in races] == [""] * 20


@pytest.mark.parametrize("name", [AGAIN, "ours"])
def test_a_placebo_that_leaves_1_out_is_a_machine_too_noisy_for_a_verdict(race_of, name):
    race = simulate(race_of, 0, 128, 1 / 1.05, name)
    said = find_noise({"x": race})
    assert said.startswith("the machine is too noisy for a verdict: " * (name == AGAIN))
    assert bool(said) == (name == AGAIN)
    measurements = [
        record.judge("a", race.ratio(name), (0.5, 2.0), "x", "why"),
        record.judge("b", None, (0.5, 2.0), "x", "why"),
    ]
    expected = ["inconclusive" if said else "pass", "n/a"]
    assert [each.verdict for each in record.doubt(measurements, {"x": race})] == expected
    report = record.Report(table=[{"arm": "a"}], races={"x": race})
    run = {"environment": environment.describe("cpu")}
    first = record.render(record.make_record(report, run)).splitlines()[0]
    assert first == (said or "arm")


@pytest.mark.parametrize(
    ("again", "is_noisy"), [(1.0005, False), (0.9995, False), (1.02, True), (0.98, True)]
)
def test_a_placebo_within_1_percent_of_1_voids_no_verdict(race_of, again, is_noisy):
    rng = np.random.default_rng(0)
    times_s = {"stock": 2.0, AGAIN: 2 / again, "ours": 1.0}
    arms = {
        name: lambda time_s=time_s: time_s * math.exp(1e-3 * rng.normal())
        for name, time_s in times_s.items()
    }
    race = race_of(arms, Plan(rounds=400, warmup=0))
    placebo = race.placebo(0.99)
    assert not placebo.low <= 1 <= placebo.high
    assert bool(find_noise({"x": race})) == is_noisy


@pytest.mark.parametrize("confidence", [0.95, 0.99])
def test_a_placebo_leaves_1_out_as_seldom_as_its_confidence_says(confidence):
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(600):
        found = bootstrap(rng.standard_t(3, 12).tolist(), confidence=confidence)
        missed += not found.low <= 0 <= found.high
    assert missed <= 600 * (1 - confidence) + 3 * math.sqrt(600 * (1 - confidence))


# Baselines


TIMER = ["timer", "--device", "cpu"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Run a command once, and return the file."""
    path = tmp_path_factory.mktemp("saved") / "base.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timer, "PLAN", Plan(rounds=8, warmup=2))
        assert main([*TIMER, "--json", str(path)]) == 0
    return path


def metric(value, spread):
    return Interval(value=value, low=value * (1 - spread), high=value * (1 + spread))


@pytest.mark.parametrize(
    ("new", "spread", "bound_", "verdict"),
    [
        (1.0, 0.01, "m:-5%", "pass"),
        (0.97, 0.04, "m:-5%", "pass"),  # no regression that far is seen
        (0.9, 0.01, "m:-5%", "fail"),
        (0.94, 0.03, "m:-5%", "fail"),
        (0.94, 0.06, "m:-5%", "inconclusive"),
        (1.2, 0.01, "m:-5%", "pass"),
        (1.2, 0.01, "m:+10%", "fail"),
        (0.5, 0.01, "m:+10%", "pass"),
        (math.nan, 0.01, "m:-5%", "inconclusive"),
    ],
)
def test_a_regression_is_beyond_the_bound_and_no_chance(new, spread, bound_, verdict):
    saved = {"value": 1.0, "low": 1 - spread, "high": 1 + spread}
    name, most = bound(bound_)
    assert hold(name, metric(new, spread), saved, most).verdict == verdict


def test_a_baseline_without_an_interval_proves_nothing():
    saved = {"value": 1.0, "low": 0.0, "high": None}
    found = hold("m", metric(0.5, 0.01), saved, -0.05)
    assert (found.verdict, found.interval.high) == ("inconclusive", math.inf)
    assert hold("m", metric(1.0, 0.01), saved, -0.05).verdict == "inconclusive"  # no loss is seen


def test_a_change_of_a_metric_below_0_is_no_percentage():
    saved = {"value": -2.3, "low": -2.4, "high": -2.2}
    found = hold("m", metric(-2.0, 0.01), saved, -0.05)
    assert (found.verdict, found.reason) == ("inconclusive", "-2 against -2.3")


@pytest.mark.parametrize(
    "text", ["speedup", "speedup:5%", "speedup:-5", "speedup:-0%", ":-5%", "a:-100%"]
)
def test_a_bound_is_a_metric_and_a_signed_change(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a metric and a change"):
        bound(text)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("schema_version",), 2, f"schema_version is 2, not {record.SCHEMA_VERSION}"),
        (("command",), "amp", "command is amp, not timer"),
        (("job", "regions"), 7, "regions is 7, not 2000"),
        (("environment", "device_name"), "a toaster", "device_name is a toaster, not "),
    ],
)
def test_a_baseline_of_something_else_is_refused_before_any_work(
    saved, tmp_path, place, value, message, monkeypatch, capsys
):
    monkeypatch.setattr(timer, "run_cases", None)
    record = json.loads(saved.read_text())
    inside = record
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record))
    held = ["--fail-on", "of_old:-5%"] * (place == ("schema_version",))
    assert main([*TIMER, "--baseline", str(other), *held]) == 3
    assert f"no verdict: the baseline cannot be compared: {message}" in capsys.readouterr().err


def test_a_metric_that_the_baseline_lacks_is_a_bad_argument(saved, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*TIMER, "--baseline", str(saved), "--fail-on", "speed:-5%"])
    assert exit_.value.code == 2
    message = "argument --fail-on: 'speed' is no metric of the baseline, which has speedup"
    assert message in capsys.readouterr().err


def test_the_environment_names_the_commit_of_the_working_directory(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.describe("cpu")["git_revision"] is None
    git("init")
    git("-c", "user.name=a", "-c", "user.email=b@c", "commit", "--allow-empty", "-m", "x")
    assert re.fullmatch(r"[0-9a-f]{40}", environment.describe("cpu")["git_revision"])
    monkeypatch.setenv("PATH", "")
    assert environment.describe("cpu")["git_revision"] is None


def test_times_and_ratios_of_a_race_come_from_its_visits():
    rounds = [{"a": Visit(a), "b": Visit(1.0)} for a in (2.0, 8.0)] * 3
    race = Race(arms=["a", "b"], rounds=rounds)
    assert race.time_s("a").value == pytest.approx(4.0)
    assert race.ratio("b").value == pytest.approx(4.0)
    assert race.ratio("a", "b").value == pytest.approx(0.25)
