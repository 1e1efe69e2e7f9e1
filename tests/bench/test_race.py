"""The statistics of the benchmark: builds, intervals, verdicts, the gate."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import time

import numpy as np
import pytest
from support.fake_clock import FakeClock

from fastamp.bench import apart, cores, environment, record
from fastamp.bench.cores import Cores, Waiting
from fastamp.bench.race import (
    SAID,
    Build,
    Case,
    Interval,
    Plan,
    Race,
    Visit,
    collect,
    find_noise,
    run_build,
    run_race,
)
from fastamp.bench.record import Measurement, compare_arms
from fastamp.bench.tasks import BrokenTask, expect

PLAN = Plan(rounds=64, warmup=0, builds=(3,))


@pytest.fixture
def clock(monkeypatch):
    return FakeClock(monkeypatch)


def case_of(clock, arms, **options):
    """Return a build of arms that say how long they take."""
    calls = {name: lambda arm=arm: clock.spend(arm()) for name, arm in arms.items()}
    return Case(arms=calls, **options)


# The order of visits, and what becomes of them


def test_a_block_is_a_random_order_and_its_reverse(clock):
    build = run_build(case_of(clock, {name: lambda: 1.0 for name in "abc"}), PLAN, seed=1)
    orders = ["".join(round_) for round_ in build.rounds]
    assert orders[1::2] == [order[::-1] for order in orders[::2]]
    assert len(orders) == 64
    assert set(orders) == {"".join(order) for order in itertools.permutations("abc")}


def test_a_machine_that_slows_down_steadily_does_not_move_the_ratio(clock):
    now = itertools.count()

    def arm(seconds):
        return lambda: seconds * (1 + 0.01 * next(now))

    race = run_race(lambda: case_of(clock, {"stock": arm(1.5), "ours": arm(1.0)}), PLAN)
    assert race.ratio("ours").value == pytest.approx(1.5, rel=1e-3)
    first, last = (list(race.rounds[i].values())[i].elapsed_s for i in (0, -1))
    assert last / first > 1.5  # as much as what is to be found


@pytest.mark.parametrize(("warmup", "rounds", "left_out"), [(4, 10, 4), (3, 10, 4), (3, 9, 3)])
def test_the_warmup_is_left_out_and_the_rest_is_whole_blocks(clock, warmup, rounds, left_out):
    times_s = iter([9.0] * left_out + [1.0] * (rounds - left_out))
    case = case_of(clock, {"a": lambda: next(times_s)})
    build = run_build(case, Plan(rounds=rounds, warmup=warmup))
    assert (len(build.warmup), len(build.rounds)) == (left_out, rounds - left_out)
    assert {round_["a"].elapsed_s for round_ in build.rounds} == {1.0}


def test_a_visit_that_left_out_work_is_counted_and_in_no_ratio(clock):
    calls = itertools.count()
    skips = {4, 9}
    now = iter(range(1000))
    arms = {"a": lambda: 2.0, "b": lambda: 1e-3 if next(calls) in skips else 1.0}
    skipped = {"skipped": lambda name: name == "b" and next(now) in skips}
    plan = Plan(rounds=16, warmup=0, builds=(1,))
    race = run_race(lambda: case_of(clock, arms, **skipped), plan)
    assert [round_["b"].skipped for round_ in race.rounds].count(True) == 2
    assert race.ratio("b").value == pytest.approx(2.0)
    assert race.times_s("b") == pytest.approx([1.0] * 14)


def test_a_visit_of_many_calls_is_their_median_each_prepared_off_the_clock(clock):
    times_s, prepared = itertools.cycle([1.0, 2.0, 90.0]), []

    def prepare(name):
        prepared.append(name)
        clock.spend(5.0)

    arms = {name: lambda: next(times_s) for name in "ab"}
    build = run_build(case_of(clock, arms, calls=3, before=prepare), Plan(rounds=6, warmup=0))
    assert [visit.elapsed_s for r in build.rounds for visit in r.values()] == [2.0] * 12
    assert "".join(prepared) == "".join(3 * name for round_ in build.rounds for name in round_)


def test_a_build_whose_time_is_over_still_has_a_warm_round_and_a_block(clock):
    build = run_build(case_of(clock, {"a": lambda: 60.0}), Plan(build_s=1.0))
    assert (len(build.warmup), len(build.rounds)) == (1, 2)


# Builds


def test_every_build_makes_its_arms_anew_and_has_one_ratio(clock):
    made = iter([1.1, 1.2, 1.3, 1.4, 1.5])

    def make():
        ratio = next(made)
        return case_of(clock, {"stock": lambda: ratio, "ours": lambda: 1.0})

    race = run_race(make, Plan(rounds=40, warmup=0, builds=(5,)))
    logs = [math.log(ratio) for ratio in (1.1, 1.2, 1.3, 1.4, 1.5)]
    assert len(race.builds) == 5
    assert race.time_s("ours").value == pytest.approx(1.0)
    assert race.ratio("ours").value == pytest.approx(math.exp(np.mean(logs)))
    half = 3.2976 * np.std(logs, ddof=1) / math.sqrt(5)  # Student's at 97 %, four degrees
    found = race.ratio("ours")
    assert math.log(found.high / found.low) / 2 == pytest.approx(half, rel=1e-3)


def planted(truth, bias, seed, *, noise=0.01):
    """Return builds of two arms, each at a place of its own that makes it faster or slower."""
    rng = np.random.default_rng(seed)

    def build(names, _):
        places = 1 + rng.uniform(-bias, bias, 2)
        times_s = dict(zip(("stock", "ours"), places * (truth, 1.0), strict=True))
        rounds = [
            {arm: Visit(time_s * math.exp(noise * rng.normal())) for arm, time_s in times_s.items()}
            for _ in range(4)
        ]
        return {name: Build(arms=[*times_s], rounds=rounds) for name in names}

    return build


def judge_often(truth, bias, runs=400):
    """Count the verdicts on a planted ratio, in so many races."""
    said = dict.fromkeys(SAID, 0)
    for seed in range(runs):
        race = collect(planted(truth, bias, seed), ["x"], Plan())["x"]
        said[race.ratio("ours").verdict] += 1
    return {verdict: count / runs for verdict, count in said.items()}


@pytest.mark.parametrize(
    ("truth", "bias", "right", "least"),
    [
        (1.00, 0.15, "equal", 0.0),
        (1.03, 0.15, "faster", 0.0),
        (1.05, 0.15, "faster", 0.0),
        (1.20, 0.15, "faster", 0.95),
        (1.00, 0.0, "equal", 0.7),
        (1.03, 0.0, "faster", 0.95),
        (1.05, 0.0, "faster", 0.95),
        (1 / 1.05, 0.0, "slower", 0.95),
    ],
)
def test_a_planted_ratio_has_at_most_5_percent_false_verdicts(truth, bias, right, least):
    said = judge_often(truth, bias)
    assert 1 - said[right] - said["cannot tell"] <= 0.05
    assert said[right] >= least


def test_intervals_hold_the_truth_in_95_percent_of_races_though_narrow_ones_end_early():
    held = 0
    for seed in range(1000):
        race = collect(planted(1.5, 0.03, seed), ["x"], Plan())["x"]
        held += race.ratio("ours").low <= 1.5 <= race.ratio("ours").high
    assert held >= 940


def test_a_race_ends_when_its_intervals_are_narrow_and_only_after_some_numbers_of_builds():
    counts = {
        len(collect(planted(1.2, 0.03, seed), ["x"], Plan())["x"].builds) for seed in range(40)
    }
    assert counts <= {5, 8, 12}
    assert len(counts) > 1
    assert len(collect(planted(1.2, 0.0, 0), ["x"], Plan())["x"].builds) == 5


def test_a_race_whose_time_is_over_has_five_builds_all_the_same(clock):
    def build(names, _):
        clock.spend(100.0)
        return planted(1.2, 0.15, 0)(names, 0)

    assert len(collect(build, ["x"], Plan(limit_s=10.0))["x"].builds) == 5


def test_a_race_that_is_done_is_built_no_more_beside_one_that_is_not():
    wide, narrow, seen = planted(1.2, 0.15, 0), planted(1.2, 0.0, 0), []

    def build(names, number):
        seen.append(names)
        return {name: (wide if name == "wide" else narrow)([name], number)[name] for name in names}

    races = collect(build, ["wide", "narrow"], Plan())
    assert [len(races[name].builds) for name in ("wide", "narrow")] == [12, 5]
    assert seen[5:] == [["wide"]] * 7


# Fresh processes


def test_a_build_apart_is_another_process_whose_broken_task_is_raised_here(processes):
    assert apart.run_apart(os.getpid) != os.getpid()
    with pytest.raises(BrokenTask, match="make: expected more, got less"):
        apart.run_apart(expect, False, "make", "more", "less")


def test_a_process_that_dies_or_fails_is_an_error_and_no_wait(processes, capfd):
    with pytest.raises(BrokenTask, match="ended with status 7: its traceback is above, or a step"):
        apart.run_apart(os._exit, 7)
    with pytest.raises(BrokenTask, match="ended with status 1"):
        apart.run_apart(int, "seven")
    assert "invalid literal" in capfd.readouterr().err


def test_a_process_that_dies_before_it_reads_its_work_is_an_error_and_no_wait(processes):
    multiprocessing.resource_tracker.ensure_running()  # by the same executable
    spawn = multiprocessing.get_context("spawn")
    python, large = multiprocessing.spawn.get_executable(), bytes(10_000_000)
    spawn.set_executable("/bin/false")
    try:
        with pytest.raises(BrokenTask):
            apart.run_apart(len, large)
    finally:
        spawn.set_executable(python)
    assert apart.run_apart(len, large) == len(large)


# The gate


def schedule(folder, busy_s, *threads):
    """Write the times of two cores and of another one, and of threads, as the kernel does."""
    ticks = [100 + int(time_s * os.sysconf("SC_CLK_TCK")) for time_s in (busy_s, 0, 9 * busy_s)]
    lines = [f"cpu{core} {each} 0 0 9 9 0 0 0 0 0" for core, each in enumerate(ticks)]
    (folder / "stat").write_text("\n".join([f"cpu {sum(ticks)} 0 0 9 9 0 0 0", *lines, "ctxt 7"]))
    for name, times_s in enumerate(threads):
        path = folder / "self" / "task" / str(name)
        path.mkdir(parents=True, exist_ok=True)
        ran, waited = (5_000 + int(time_s * 1e9) for time_s in times_s)
        (path / "schedstat").write_text(f"{ran} {waited} 7\n")


@pytest.mark.parametrize(
    ("threads", "ended_s", "busy_s", "own", "share"),
    [
        ([(10.0, 0.0)], 0.0, 10.0, {0, 1}, 0.0),
        ([(5.0, 5.0), (5.0, 5.0)], 0.0, 20.0, {7, 8}, 0.5),  # two busy neighbours
        ([(6.7, 3.3), (6.7, 3.3)], 0.0, 20.0, {0, 1}, 0.33),  # one
        ([(10.0, 10.0), (10.0, 10.0)], 0.0, 20.0, {0, 1}, 0.0),  # four threads on two cores
        ([(9.0, 8.0)], 10.0, 20.0, {0, 1}, 0.05),  # two workers of its own have ended
        ([(9.0, 8.0)], 0.0, 12.0, {0, 1}, 0.25),  # a core was idle most of the time
    ],
)
def test_a_neighbour_is_time_that_threads_waited_for_a_core_that_others_had(
    threads, ended_s, busy_s, own, share, tmp_path, monkeypatch
):
    ended = iter([os.times_result((0, 0, 3, 1, 0)), os.times_result((0, 0, 3 + ended_s, 1, 0))])
    monkeypatch.undo()
    monkeypatch.setattr(cores, "PROCESSES", tmp_path)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: own)
    monkeypatch.setattr(cores.os, "times", lambda: next(ended))
    schedule(tmp_path, 0.0, (0.0, 0.0))
    counted = Cores()
    schedule(tmp_path, busy_s, *threads)  # the second thread is new
    assert counted.waiting().share == pytest.approx(share, abs=0.01)


def test_a_platform_that_counts_no_waiting_says_so(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cores, "PROCESSES", tmp_path)
    assert Cores().waiting() is None
    race = Race(arms=["a", "b"], builds=[Build(arms=["a", "b"], rounds=[])])
    assert find_noise({"x": race}) == ""
    assert record._describe_builds({"x": race})[0].endswith("waited for a core: not counted here")


def test_this_kernel_counts_a_thread_that_runs_or_does_not_count(monkeypatch):
    monkeypatch.undo()
    counted, end_s = Cores(), time.thread_time() + 0.05
    while time.thread_time() < end_s:
        pass
    found = counted.waiting()
    assert found is None or found.ran_s > 0.03


def busy_race(waited_s, times_s=(1.05, 1.0)):
    arms = dict(zip(("stock", "ours"), map(Visit, times_s), strict=True))
    build = Build(arms=[*arms], rounds=[arms] * 4, waiting=Waiting(9.0, waited_s))
    return Race(arms=[*arms], builds=[build] * 5)


@pytest.mark.parametrize(("waited_s", "is_noisy"), [(0.9, False), (1.1, True)])
def test_beyond_10_percent_of_waiting_there_is_no_verdict_and_no_sentence(waited_s, is_noisy):
    races = {"quiet": busy_race(0.0), "x": busy_race(waited_s)}
    said = find_noise(races)
    assert bool(said) == is_noisy
    assert ("in x its threads waited for a core in 11% of their time" in said) == is_noisy
    exact, ends = Interval.exact(0.1), (0.4, 1.0)
    measurements = [
        compare_arms(races["x"], "speedup", "ours", "stock", target=(0.5, 2.0)),
        Measurement(name="none", interval=None, target=(0.5, 2.0)),
        compare_arms(races["x"], "speedup/b", "ours", "stock"),
        Measurement(name="memory", interval=exact, target=ends, is_counted=True),
    ]
    verdicts = [each.verdict for each in record.doubt(measurements, races)]
    assert verdicts[1::2] == ["n/a", "fail"]  # a figure that is counted is not excused
    assert verdicts[::2] == (["inconclusive", "cannot tell"] if is_noisy else ["pass", "faster"])
    report = record.Report(table=[{"arm": "a"}], races=races, sentence="It is faster.")
    made = record.make_record(report, {"environment": environment.describe("cpu")})
    lines = record.render(made).splitlines()
    assert said.startswith(lines[0]) if is_noisy else lines[0] == "It is faster."
    assert ("It is faster." in lines) == (not is_noisy)
    [counted] = record._describe_builds({"x": busy_race(99.0)})
    assert counted.endswith("; threads waited for a core: at most 91.7% of the time")
    assert len(counted) <= 100


# Intervals and verdicts


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ((1.001, 1.4), "faster"),
        ((0.7, 0.999), "slower"),
        ((0.99, 1.01), "equal"),
        ((0.86, 2.63), "cannot tell"),
        ((0.99, 1.05), "cannot tell"),
        ((math.nan, math.nan), "cannot tell"),
    ],
)
def test_a_ratio_that_may_be_either_is_not_called_equal(ends, verdict):
    assert Interval(value=1.0, low=ends[0], high=ends[1]).verdict == verdict
