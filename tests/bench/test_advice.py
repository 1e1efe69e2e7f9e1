"""Where the time of a step goes, and how much of it can be saved at most."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import fastamp
from fastamp.bench import environment
from fastamp.bench.advice import VANISHES, Profile, advise, read_profile
from fastamp.bench.facts import Facts, describe
from fastamp.bench.race import Interval


@pytest.fixture(autouse=True)
def with_units(monkeypatch):
    monkeypatch.setattr(environment, "cpu_features", lambda: {"amx_bf16"})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)


def exact(**parts_s):
    return {part: Interval.exact(time_s) for part, time_s in parts_s.items()}


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


def test_a_part_that_vanishes_is_the_most_that_waiting_can_bring():
    profile = Profile(device="cpu", steps=9, parts=exact(data=0.3, forward=0.6, waits=0.1))
    found = {each.part: each.gain for each in advise(profile)}
    assert found["loader"] == Interval(
        value=pytest.approx(math.sqrt(1 / 0.7)), low=1.0, high=pytest.approx(1 / 0.7)
    )
    assert found["waits"].high == pytest.approx(1 / 0.9)
    assert {each.part for each in advise(profile)} >= {"loader", "precision", "waits"}
    for syncs, remedy in ((0, "torch.compile"), (2, "no .item()"), (None, "no .item()")):
        waiting = Profile(device="cpu", steps=9, parts=exact(waits=0.5, other=0.5), syncs=syncs)
        assert advise(waiting)[0].what.startswith(remedy)
    all_data = Profile(device="cpu", steps=9, parts=exact(data=0.3))
    assert advise(all_data)[0].gain.high == math.inf
    assert "1.00x or more as fast" in advise(all_data)[0].text()


def test_a_ratio_of_the_step_is_a_gain_of_the_whole_by_its_share():
    facts = Facts(optimizer="AdamW", fused=False, scaler="torch.GradScaler", dtype="float16")
    parts = exact(forward=0.5) | {"step": Interval(value=0.5, low=0.4, high=0.6)}
    profile = Profile(device="cuda:0", steps=9, parts=parts, facts=facts)
    gain = profile.gain(Interval(value=5.0, low=4.0, high=6.0), "step")
    assert gain.value == pytest.approx(1 / 0.6)
    assert gain.low == pytest.approx(0.9 / (0.5 + 0.4 / 4))
    assert gain.high == pytest.approx(1.1 / (0.5 + 0.6 / 6))
    fused = profile.gain(Interval.exact(2.0), "step")
    found = advise(profile, {"step": gain, "fused": fused}, "raced elsewhere")
    assert [(each.part, each.gain) for each in found] == [("step", gain), ("fused", fused)]
    assert "scaler.step(optimizer, max_norm=...)" in found[0].what
    assert found[0].text().endswith("x as fast; raced elsewhere")
    assert [each.part for each in advise(profile)] == ["step"]  # nothing is known of a fused one


@pytest.mark.parametrize("low", [-math.inf, -0.3])
def test_few_visits_promise_no_more_than_a_step_without_the_part(low):
    parts = {"data": Interval(value=0.5, low=low, high=1 - low), "step": Interval.exact(0.5)}
    profile = Profile(device="cpu", steps=2, parts=parts)
    gain = profile.gain(Interval(value=2.0, low=low, high=math.inf), "data")
    assert (gain.low, gain.high) == (0.0, 2.0)
    assert gain.value == pytest.approx(1 / 0.75)
    gain = profile.gain(VANISHES, "data")
    assert (gain.low, gain.high) == (1.0, 2.0)


def test_what_is_done_already_or_helps_nobody_is_no_advice():
    parts = exact(data=0.001, forward=0.6, step=0.399)
    for fused in (True, False):  # fastamp updates it, fused or not
        facts = Facts(optimizer="AdamW", fused=fused, by_fastamp=True, dtype="bfloat16")
        (found,) = advise(Profile(device="cuda", steps=9, parts=parts, facts=facts))
        assert (found.part, found.gain) == ("nothing", Interval.exact(1.0))
        assert "60%" in found.text()
    facts = Facts(optimizer="SGD", fused=False, by_fastamp=False, sparse=True, dtype="bfloat16")
    (found,) = advise(Profile(device="cuda", steps=9, parts=parts, facts=facts))
    assert found.part == "nothing"  # torch makes the step of sparse gradients


@pytest.mark.parametrize(
    ("optimizer", "advised"),
    [("SparseAdam", ["nothing"]), ("SGD and Lion", ["nothing"]), ("SGD and AdamW", ["step"])],
)
def test_only_optimizers_that_fastamp_updates_itself_are_promised_a_gain(optimizer, advised):
    facts = Facts(optimizer=optimizer, dtype="bfloat16")
    found = advise(Profile(device="cuda", steps=9, parts=exact(step=0.5), facts=facts))
    assert [each.part for each in found] == advised


def test_what_was_raced_on_the_job_is_given_as_it_is():
    gains = {"step": Interval(value=1.01, low=0.99, high=1.03), "loader": Interval.exact(1.5)}
    parts = exact(data=0.1, forward=0.1, step=0.8)
    profile = Profile(device="cpu", steps=9, parts=parts, facts=Facts(fused=True, dtype="bfloat16"))
    (found,) = advise(profile, gains=gains)
    assert (found.part, found.gain, found.why) == ("loader", gains["loader"], "raced on this job")
    (found, _) = advise(profile, gains=gains | {"precision": Interval.exact(1.7)})  # of FP32 to it
    assert (found.what, found.gain.value) == ("train in FP32 here: leave out torch.autocast", 1.7)
    for low, high in ((0.0, math.inf), (0.98, 1.9)):
        unclear = Interval(value=1.6, low=low, high=high)  # its interval is not above 1
        found = advise(profile, gains=gains | {"step": unclear})
        assert [each.part for each in found] == ["loader"]


def test_facts_are_those_of_all_optimizers_and_name_what_is_none():
    first = torch.nn.Linear(3, 2)
    fused = torch.optim.SGD([first.weight], lr=0.1, fused=True)
    both = [fused, torch.optim.AdamW([first.bias])]
    found = describe(both, scaler=torch.amp.GradScaler("cpu", enabled=False), dtype=torch.bfloat16)
    assert (found.optimizer, found.fused, found.by_fastamp) == ("SGD and AdamW", False, False)
    assert (found.sizes, found.scaler, found.dtype) == (((2, 1), (6, 1)), "none", "bfloat16")
    assert describe(fused).fused
    assert describe(scaler=fastamp.GradScaler("cpu", enabled=False)).by_fastamp
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    rows = torch.optim.SGD(embedding.parameters())
    assert describe(rows).sparse is None
    embedding(torch.tensor([1])).sum().backward()
    assert describe(rows).sparse
    assert describe() == Facts()
    with pytest.raises(TypeError, match="optimizer: expected a torch"):
        describe([first])


def test_data_that_a_gpu_gathers_may_live_there():
    parts = exact(data=0.4, forward=0.6)
    for loader, path, advised in (
        ("torch.DataLoader", "gathered", ["loader", "resident"]),
        ("fastamp.DataLoader", "gathered", ["loader", "resident"]),
        ("fastamp.DataLoader", "gathered on cuda:0", ["loader"]),
        ("torch.DataLoader", "item by item: the dataset is a Mine", ["loader"]),
        ("mine.Loader", None, ["loader"]),
    ):
        facts = Facts(loader=loader, path=path, workers=2, dtype="bfloat16")
        profile = Profile(device="cuda", steps=9, parts=parts, facts=facts)
        assert [each.part for each in advise(profile)] == advised


class Rows(torch.utils.data.Dataset):
    """Arrays behind a `__getitem__`, as most people write it."""

    def __init__(self):
        self.x = torch.ones(8, 2)

    def __getitem__(self, index):
        return self.x[index]

    def __len__(self):
        return 8


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.ones(8, 2))


@pytest.mark.parametrize("make", [DataLoader, fastamp.DataLoader])
def test_arrays_are_advised_before_workers_where_they_can_be_made(make):
    def say(dataset, **options):
        loader = make(dataset, 4, **options)
        list(loader)
        profile = Profile(
            device="cpu", steps=9, parts=exact(data=0.5), facts=describe(loader=loader)
        )
        return advise(profile)[0].what

    said = say(Rows())
    assert "fastamp.in_memory(dataset) or another ArrayDataset, if its items never ch" in said
    assert said.index("in_memory") < said.index("; else num_workers=") < said.index("worker=")
    for dataset, options in ((Stream(), {}), (Rows(), {"collate_fn": torch.stack})):
        said = say(dataset, **options)
        assert "in_memory" not in said  # is not for these
        assert "num_workers=" in said
        assert ("worker='thread'" in said) == isinstance(dataset, Rows)  # threads refuse streams
    for dataset in (TensorDataset(torch.ones(8, 2)), Subset(Rows().x, [3, 1]), torch.ones(8, 2)):
        assert "workers" not in say(dataset)
