"""The pages that the benchmark writes, and its other commands: what is shown is what is saved."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import math
import re
import sys
from functools import partial
from html.parser import HTMLParser

import pytest
import torch
from support.bench_pages import COMMANDS, JOBS, QUICK, RUNS, write_all
from support.fake_clock import FakeClock

from fastamp._progress import progress
from fastamp.bench import latency, page
from fastamp.bench.comparison import PLAIN, run_cases
from fastamp.bench.race import Case, Interval, Plan, run_race

VOID = {"meta", "link"}
MADE_UP = [*RUNS, "all"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Run every command once; return its page, its record and what it printed, by name."""
    with pytest.MonkeyPatch.context() as patch:
        return write_all(tmp_path_factory.mktemp("pages"), patch)


class Page(HTMLParser):
    """Checks that tags nest, and collects the texts of some, references, pictures and tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.references, self.pictures, self.tags = [], [], [], set()
        self.texts = {tag: [] for tag in ("h1", "h2", "p", "th", "td", "text")}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        attrs = dict(attrs)
        self.references += [v for k, v in attrs.items() if k in {"src", "href", "xlink:href"}]
        if tag == "svg":
            self.pictures.append((self.texts["h2"][-1], attrs))
        if tag in self.texts:
            self.texts[tag].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in {*self.texts} & set(self.open):
            self.texts[tag][-1] += data


@pytest.mark.parametrize("name", [*COMMANDS, *MADE_UP])
def test_a_page_and_the_terminal_show_what_the_record_says(written, name):
    path, record, shown = written[name]
    texts = Page(path.read_text()).texts
    cells = [*record["table"][0], *(cell for row in record["table"] for cell in row.values())]
    paragraphs = [*filter(None, (record["noise"], *record["failures"], record["sentence"]))]
    paragraphs += [each["text"] for each in record["measurements"] if each["target"]]
    assert texts["p"][: len(paragraphs)] == paragraphs
    notes = record["notes"]
    assert len(cells) >= 10
    assert {*cells} <= {*texts["th"], *texts["td"]}
    assert {*notes} <= {*texts["p"]}
    words = " ".join(shown.split())
    for text in [*cells, *paragraphs, *notes]:
        assert " ".join(text.split()) in words


@pytest.mark.parametrize("name", MADE_UP)
def test_every_comparison_has_a_row_with_its_target_and_verdict(written, name):
    path, record, _ = written[name]
    found = Page(path.read_text())
    ratios = [each for each in record["measurements"] if each["unit"] == "x"]
    assert len(ratios) >= (4 if name in RUNS else 6)
    for each in ratios:
        row = page.find_point(each).words
        assert row in found.texts["text"]
        assert f"{each['name']} {row}" in found.pictures[0][1]["aria-label"]
        assert row.endswith(each["verdict"])
        assert ("(target >= " in row) == bool(each["target"])
    if name in RUNS:
        speedup = next(each for each in ratios if each["name"] == "speedup")
        assert speedup["verdict"] == {"gain": "pass", "loss": "fail"}.get(name, "inconclusive")
        assert (speedup["arm"], speedup["base"]) == ("fastamp bf16", "torch fp32")
    else:
        assert {f"{job}/fastamp/bf16" for job in JOBS} <= {each["name"] for each in ratios}


@pytest.mark.parametrize("name", [*COMMANDS, *MADE_UP])
def test_a_page_stands_alone_and_has_the_colours_of_the_scheme(written, name):
    path, record, _ = written[name]
    text = path.read_text()
    found = Page(text)
    assert [each for each in found.references if not each.startswith("#")] == ["data:,"]
    assert "script" not in found.tags
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    drawn = "".join(re.findall(r"(?s)<svg.*?</svg>", text))
    assert "<circle" in drawn
    assert not re.search(r"style=|(fill|stroke)=", drawn)  # the colours are the classes'
    assert "prefers-color-scheme: dark" in text
    if name == "gain":
        assert page.make(record) == text


def test_what_the_user_named_is_text(written):
    record = written["gain"][1]
    name = '<b>$x$ "&\u4e2d\udcff'
    text = json.dumps(record).replace("fastamp/bf16", json.dumps(name)[1:-1])
    found = Page(page.make(json.loads(text) | {"notes": ["<i>"], "command": "<u>"}))
    assert not {"b", "i", "u"} & found.tags
    assert name in found.texts["text"]
    assert found.texts["h1"] == ["fastamp bench: <u>"]


def test_a_figure_that_is_not_known_has_no_point():
    record = {"command": "doctor", "created": "2026-01-01", "environment": {}, "job": {}}
    record |= {"table": [{"device": "cpu"}], "notes": [], "measurements": []}
    record |= {"failures": [], "noise": "", "sentence": ""}
    unknown = {"name": "b", "interval": {"value": None, "low": 0.0, "high": None}, "base": "a"}
    unknown |= {"unit": "x", "target": None, "verdict": "", "reason": "", "text": "b n/a"}
    unknown |= {"excused": "", "noise": ""}
    found = Page(page.make(record | {"measurements": [unknown]}))
    assert "b n/a" in found.pictures[0][1]["aria-label"]
    assert "circle" not in found.tags


def test_a_point_lies_where_its_ratio_is_and_has_the_colour_of_its_verdict():
    points = [
        page.Point("low", "1x", (0.5, 1.0, 2.0), "soft"),
        page.Point("high", "4x", (-math.inf, 4.0, math.inf), "good", target=2.0),
    ]
    drawn = page.draw("x", points)
    low, high = map(float, re.findall(r'cx="([\d.]+)"', drawn))
    (start, end), (wide_start, wide_end) = re.findall(r"M([\d.]+) -4H([\d.]+)", drawn)
    [target] = re.findall(r"M([\d.]+) -14V6", drawn)
    steps = [float(start), low, float(end), high]  # each is twice the one before
    assert steps[1] - steps[0] == pytest.approx(steps[2] - steps[1], abs=0.2)
    assert float(target) == float(end)
    assert float(wide_start) == page.LEFT
    assert float(wide_end) == page.RIGHT
    assert re.findall(r'circle class="(\w+)"', drawn) == ["soft", "good"]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.98, 1.03, ["1x"]),
        (0.5, 2.0, ["0.5x", "1x", "2x"]),
        (1.0, 16.0, ["1x", "2x", "5x", "10x"]),
    ],
)
def test_the_axis_of_the_picture_has_round_numbers_with_1_among_them(low, high, ticks):
    points = [page.Point(name, ends=(end, end, end)) for name, end in (("a", low), ("b", high))]
    assert re.findall(r">([\d.]+x)</text>", page.draw("x", points)) == ticks


# The other commands


def test_a_case_is_held_to_its_base_and_to_the_plain_arm(monkeypatch):
    clock = FakeClock(monkeypatch)
    times_s = {"torch": 2.0, PLAIN: 1.0, "fastamp": 0.5}
    case = Case(arms={arm: partial(clock.spend, time_s) for arm, time_s in times_s.items()})
    args = argparse.Namespace(device="cpu", seed=0)
    found = run_cases(args, QUICK, {"x": lambda: case}, [])
    assert {each.name: each.interval.value for each in found.measurements} == {
        "speedup/x/plain": pytest.approx(2.0),
        "speedup/x": pytest.approx(4.0),
        "of_plain/x": pytest.approx(2.0),
    }
    cells = [row["of plain [95 %]"].split("x")[0] for row in found.table]
    assert cells == ["", "", "2.000"]


def test_a_request_ends_with_its_result_and_the_first_ones_are_not_counted(monkeypatch):
    calls, module = [], torch.get_device_module("cpu")
    monkeypatch.setattr(module, "synchronize", lambda *_: calls.append("wait"))
    model = lambda _: calls.append("request")  # noqa: E731
    case = Case(arms={"fp32": partial(latency.answer, model, torch.zeros(1), None)})
    found = run_race(lambda: case, Plan(rounds=8, builds=(1,)))
    assert calls == ["wait", "request", "wait"] * 8
    assert len(found.times_s("fp32")) == 4


def test_a_terminal_gets_a_progress_bar_where_tqdm_is_installed(monkeypatch):
    pytest.importorskip("tqdm")

    def shown(stream, *, terminal):
        stream.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stderr", stream)
        with progress(2) as tick:
            tick()
        return stream.getvalue()

    assert "/2" in shown(io.StringIO(), terminal=True)
    assert shown(io.StringIO(), terminal=False) == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert shown(io.StringIO(), terminal=True) == ""


def test_a_figure_that_is_not_finite_is_shown_as_such():
    assert Interval(value=1.0, low=-math.inf, high=2.0).text(".1f") == "1.0 [n/a, 2.0]"
    assert Interval(value=2.5, low=2.0, high=math.inf).text(".1f", "x") == "> 2.0x"
    few_blocks = Interval(value=2.0, low=0.0, high=math.inf)  # a ratio that may be anything
    assert few_blocks.text(".1f", "x") == "2.0x [0.0, n/a]"
