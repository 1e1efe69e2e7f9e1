"""Regions of the timer on the host: how they nest, what is counted, what is refused."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.autograd import profiler

from fastamp import Timer
from fastamp.timer.events import Extras


def counts(timer):
    return {path: stats.count for path, stats in timer.summary().items()}


def test_many_regions_take_no_memory(timer):
    def resident_nbytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    for i in range(500_000):
        if i == 100_000:
            before = resident_nbytes()
        with timer("x"):
            pass
    assert resident_nbytes() - before <= 128 * 1024
    assert counts(timer) == {"x": 500_000}


def test_nested_regions_are_named_by_their_path(timer):
    for _ in range(2):
        with timer("step"):
            with timer("forward"), timer("attention"):
                pass
            with timer("backward"):
                pass
    with timer("forward"):
        pass
    inside = {"step/forward": 2, "step/forward/attention": 2, "step/backward": 2}
    assert counts(timer) == {"step": 2, **inside, "forward": 1}


def test_a_decorated_function_is_a_region(timer):
    @timer.wrap("f")
    def double(x, *, y=0):
        """Double."""
        return 2 * x + y

    class Model:
        @timer.wrap("method")
        def forward(self, x):
            return double(x)

    assert (double(2, y=1), Model().forward(4)) == (5, 8)
    assert (double.__name__, double.__doc__) == ("double", "Double.")
    assert counts(timer) == {"f": 1, "method": 1, "method/f": 1}
    with pytest.raises(TypeError, match="name: expected a str, got <function"):
        timer.wrap(double)  # @timer.wrap


def test_each_wait_for_an_item_is_a_region_and_the_loops_body_is_not(timer):
    def broken():
        yield 1
        raise ZeroDivisionError

    batches, seen = timer.each("data", "abc"), []
    with timer("epoch"):
        for item in batches:
            with timer("step"):
                seen.append(item)
    for _ in timer.each("left", iter("abc")):
        break
    with pytest.raises(ZeroDivisionError):
        list(timer.each("broken", broken()))
    with timer("after"):
        pass
    assert (len(batches), seen) == (3, ["a", "b", "c"])
    waits = {"epoch/data": 4, "left": 1, "broken": 2}
    assert counts(timer) == {"epoch": 1, "epoch/step": 3, "after": 1, **waits}
    assert list(batches) == seen  # it may be read again
    with pytest.raises(TypeError, match="has no len"):
        len(timer.each("data", iter("ab")))


def test_a_recursive_function_is_one_region_at_any_depth(timer):
    @timer.wrap("f")
    def sum_to(n):
        if n == 500:
            raise ZeroDivisionError
        return n + sum_to(n - 1) if n else 0

    assert sum_to(300) == 45_150
    with pytest.raises(ZeroDivisionError):
        sum_to(600)
    with timer("outer"):
        assert sum_to(2) == 3
    assert counts(timer) == {"f": 2, "outer": 1, "outer/f": 1}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_module_has_a_new_timer(timer, copied):
    module = torch.nn.Linear(1, 1)
    module.timer = timer
    with timer("x"):
        other = copied(module).timer
    with other("y"):
        pass
    assert (list(timer.summary()), list(other.summary())) == (["x"], ["y"])


def test_functions_that_run_in_pieces_are_refused(timer):
    def generator():
        yield

    async def coroutine():
        pass

    async def both():
        yield

    for function in (generator, coroutine, both, functools.partial(coroutine)):
        with pytest.raises(TypeError, match=r"wrap\('x'\): .*generator or asynchronous"):
            timer.wrap("x")(function)


def test_an_exception_ends_the_region_and_leaves_the_nesting_right(timer):
    def fail():
        with timer("outer"):
            timer.start("left open")
            timer("inner").__enter__()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    timer("outer").__exit__(None, None, None)  # it is closed
    with timer("after"):
        pass
    expected = ["outer", "outer/left open", "outer/left open/inner", "after"]
    assert counts(timer) == dict.fromkeys(expected, 1)


def test_the_number_of_paths_is_bounded(timer):
    for i in range(1500):
        with timer(f"step {i}"), timer("inner"):
            pass
    found = counts(timer)
    assert len(found) <= 1001
    assert found["(other)"] > 0
    assert sum(found.values()) == 3000


def test_every_thread_nests_for_itself_and_counts_after_its_end(timer):
    def work(name: str) -> None:
        for _ in range(2000):
            with timer(name), timer("inner"):
                pass

    with timer("main"):
        threads = [threading.Thread(target=work, args=(f"t{i % 3}",)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    inner = {f"t{i}/inner": 4000 for i in range(3)}
    assert counts(timer) == {"main": 1, **{f"t{i}": 4000 for i in range(3)}, **inner}


def test_a_reset_forgets_and_open_regions_go_on(timer):
    with timer("before"):
        pass
    with timer("open"):
        timer.reset()
    assert counts(timer) == {"open": 1}


def test_the_profiler_sees_the_regions_only_while_it_is_on(timer):
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with timer("started before"):
        profile.start()
        with timer("forward"), timer("inner"):
            torch.ones(3).add(1)
        with timer("ends after"):
            profile.stop()
    with timer("off"):
        pass
    seen = {event.key for event in profile.key_averages()}
    assert {"started before/forward", "started before/forward/inner"} <= seen
    assert not {"off", "started before"} & seen
    assert timer.summary()["started before/forward/inner"].count == 1


def test_regions_stay_out_of_compiled_graphs(timer):
    import torch._dynamo

    @timer.wrap("wrapped")
    def double(x):
        return 2 * x

    def step(x):
        with timer("outer"):
            timer.start("inner")
            x = double(x) + 1
            timer.stop("inner")
        return x

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert compiled(torch.ones(3)).tolist() == [3.0] * 3
    assert counts(timer) == {}
    step(torch.ones(3))
    assert timer.summary()["outer/inner/wrapped"].count == 1


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("meta", ValueError, "device: expected 'cpu' or a CUDA device, got 'meta'"),
        ("gpu", RuntimeError, "device string: gpu"),
        ("cuda", RuntimeError, "device='cuda': no CUDA device is available here"),
    ],
)
def test_a_device_without_a_clock_is_refused(device, error, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(error, match=message):
        Timer(device)
    with Timer()("x"):
        pass


def test_a_region_runs_few_functions(timer, backend):
    """The bench measures what a region costs; this counts, which no other process can change."""
    with timer("x"):
        pass
    called = []
    sys.setprofile(lambda frame, event, _: called.append((event, frame.f_code.co_name)))
    try:
        with timer("x"):
            pass
    finally:
        sys.setprofile(None)
    python = [name for event, name in called if event == "call"]
    assert len(python) <= {"cpu": 2, "fallback": 7}[backend], python


def test_a_wrong_stop_names_what_is_open_and_changes_nothing(timer):
    with pytest.raises(RuntimeError, match=r"stop\('x'\): no region is open in this thread"):
        timer.stop("x")
    timer.start("a(other)")
    timer.start("b")
    for wrong in ("a(other)", "x"):
        with pytest.raises(RuntimeError, match=r"the innermost open region .* is 'a\(other\)/b'"):
            timer.stop(wrong)
    timer.stop("b")
    with pytest.raises(RuntimeError, match=r"stop\('x'\): the innermost open region .* is 'a\("):
        timer.stop("x")
    timer.stop("a(other)")
    assert counts(timer) == {"a(other)": 1, "a(other)/b": 1}


def test_a_region_that_ends_while_others_are_closed_closes_each_once(backend, monkeypatch):
    """The garbage collector may end a generator with a region, at any allocation."""
    ends = []

    def end(_start_ns, _end_ns):
        ends.append(len(ends) or gc.collect())

    monkeypatch.setattr(Extras, "begin", lambda _self, _region: end)
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)  # so that `begin` is called
    timer = Timer("cpu")

    def generator(name):
        with timer(name):
            yield

    outer, inner = generator("outer"), generator("inner")
    next(outer)
    next(inner)
    cycle = [inner]
    cycle.append(cycle)
    del cycle, inner
    timer("last").__enter__()
    outer.close()
    with timer("after"):
        pass
    paths = ["outer", "outer/inner", "outer/inner/last", "after"]
    assert counts(timer) == dict.fromkeys(paths, 1)
    assert len(ends) == 4


def test_endless_starts_are_refused_before_the_memory_is(timer):
    with timer("outer"):
        with pytest.raises(RuntimeError, match="region 'x': 200 are open around it; is a stop"):  # noqa: PT012
            for _ in range(1001):
                timer.start("x")
        timer.stop("x")
    with timer("outer"):
        pass
    assert counts(timer)["outer"] == 2


def test_timers_that_cross_do_not_close_each_other(backend):
    first, second = Timer("cpu"), Timer("cpu")
    first.start("a")
    with second("b"):
        first.start("c")
        with pytest.raises(RuntimeError, match="is 'a/c'"):
            first.stop("a")
        first.stop("c")
        first.stop("a")
        with second("d"):
            pass
    assert counts(first) == {"a": 1, "a/c": 1}
    assert counts(second) == {"b": 1, "b/d": 1}


def test_a_name_that_is_no_string_is_refused(timer):
    with pytest.raises(TypeError, match="name: expected a str, got b'x'"):
        timer(b"x")
    with pytest.raises(TypeError, match="unhashable"):
        timer([])


def test_a_region_measures_the_time_inside(timer):
    start_s = time.perf_counter()
    for _ in range(3):
        with timer("sleep"):
            time.sleep(0.02)
    stats = timer.summary()["sleep"]
    assert 0.02 <= stats.min <= stats.mean <= stats.max <= stats.total
    assert stats.host == stats.total <= time.perf_counter() - start_s
    assert stats.total == pytest.approx(3 * stats.mean)


def test_a_timer_frees_what_it_holds(backend):
    def count():
        gc.collect()
        return sum(isinstance(each, Extras | Timer) for each in gc.get_objects())

    before, timer = count(), Timer("cpu")
    with timer("x"), timer("y"):
        pass
    assert count() == before + 2
    del timer
    assert count() == before


def test_regions_end_also_if_the_end_of_one_inside_raises(backend, monkeypatch):
    ends = iter([OSError("broken")])

    def end(_start_ns, _end_ns):
        for error in ends:
            raise error

    monkeypatch.setattr(Extras, "begin", lambda *_: end)
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)  # so that `begin` is called
    timer = Timer("cpu")
    outer = timer("outer")
    for name in ("outer", "inner", "broken"):
        timer.start(name)
    with pytest.raises(OSError, match="broken"):
        outer.__exit__(None, None, None)
    assert counts(timer) == {"outer": 1, "outer/inner": 1, "outer/inner/broken": 1}
