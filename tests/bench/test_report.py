"""The pages that the benchmark writes, and its other commands: what is shown is what is saved."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import math
import re
import shutil
import subprocess
import sys
import traceback
from functools import partial
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.fake_clock import FakeClock
from torch.utils.data import TensorDataset, default_collate

import fastamp
from fastamp import _ops
from fastamp.bench import arms, crops, latency, loader, measure, page, selftest, step, timer
from fastamp.bench.__main__ import main
from fastamp.bench.race import Interval, Plan
from fastamp.bench.record import PLAIN, SCHEMA_VERSION, Case, _finite, run_cases
from fastamp.train.options import progress

TINY = "--layers 1 --heads 2 --width 32 --block-size 16 --batch-size 4"
COMMANDS = {
    "amp": f"amp {TINY} --steps 12 --device cpu",
    "step": "step --shapes 3x1000,2gx10 --work norm adamw-open --device cpu",
    "loader": "loader --data tensors collate slow --device cpu",
    "timer": "timer --device cpu",
    "latency": "latency --batch-sizes 1,2 --device cpu",
    "selftest": "selftest",
}
QUICK = Plan(rounds=8, warmup=2)
VOID = {"meta", "link", "line", "circle", "polyline"}


def fake_work(patch):
    """Let the selftest's work pass on a clock of its own."""
    clock = FakeClock(patch, noise=0.01)
    patch.setattr(selftest, "_work", lambda units: clock.spend(units * 6e-6))


def small_tensors(generator):
    """1,000 rows of 3."""
    rows = torch.rand(1000, 3, generator=generator)
    return loader.Data(TensorDataset(rows), 256, [rows])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Run every command once; return its page, its record and what it printed, by name."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "text").write_bytes(bytes(range(200)) * 50)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "peak_memory", lambda *_: None)
        patch.setitem(loader.DATA, "tensors", small_tensors)
        patch.setattr(torch, "compile", lambda step: step)  # which takes seconds
        patch.setitem(sys.modules, "deepspeed", None)
        for command in (step, loader, timer, latency):
            patch.setattr(command, "PLAN", QUICK)
        patch.setattr(
            latency, "SHAPES", {"cpu": latency.Shape(layers=1, heads=1, width=8, block_size=8)}
        )
        for name, command in COMMANDS.items():
            files = [folder / f"{name}.html", folder / f"{name}.json"]
            words = [*command.split(), "--report", str(files[0]), "--json", str(files[1])]
            words += ["--data", str(folder / "text")] if command.startswith("amp") else []
            shown = io.StringIO()
            patch.setattr(sys, "stdout", shown)
            if name == "selftest":  # the last one
                fake_work(patch)
            assert main(words) == 0
            found[name] = (files[0], json.loads(files[1].read_text()), shown.getvalue())
    return found


class Page(HTMLParser):
    """Checks that tags nest, and collects cells and paragraphs, references and tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.shown, self.references, self.tags = [], [], [], set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        attrs = dict(attrs)
        self.references += [v for k, v in attrs.items() if k in {"src", "href", "xlink:href"}]
        if tag in {"th", "td", "p"}:
            self.shown.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"th", "td", "p"} & set(self.open):
            self.shown[-1] += data


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_and_the_terminal_show_what_the_record_says(written, name):
    path, record, shown = written[name]
    page_ = Page(path.read_text()).shown
    cells = [*record["table"][0], *(cell for row in record["table"] for cell in row.values())]
    paragraphs = [verdict["text"] for verdict in record["verdicts"]] + record["notes"]
    paragraphs += record["closing"] + [record["sentence"]] * bool(record["sentence"])
    assert len(cells) >= 10
    assert {*cells, *paragraphs} <= set(page_)
    assert set(page_) <= {*cells, *paragraphs, record["created"], *legends(record)}
    for text in [*cells, *paragraphs]:
        assert text in shown


def legends(record):
    arms = "".join(f"\u25a0 {arm} " for arm in record["losses"])
    return [f"{arms} steps 1 to {len(curve)}" for curve in record["losses"].values()]


def numbers(value):
    if isinstance(value, dict):
        return [x for key, item in value.items() if key != "rounds" for x in numbers(item)]
    if isinstance(value, list):
        return [x for item in value for x in numbers(item)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_figure_of_the_table_is_a_number_of_the_record(written, name):
    _, record, _ = written[name]
    known = np.array(numbers([record[key] for key in ("details", "races", "metrics")]))
    cells = [cell for row in record["table"] for cell in list(row.values())[1:]]
    texts = [text for cell in cells for text in re.findall(r"(?<![\w.-])-?\d+(?:\.\d+)?", cell)]
    assert len(texts) >= 6
    for text in texts:
        half = 0.51 * 10.0 ** -len(text.partition(".")[2])
        scaled = np.outer([1, 1e2, 1e3, 1e6, 2**-20], known)
        assert (np.abs(scaled - float(text)) <= half).any(), text


def test_a_record_of_another_shape_needs_another_schema_version(written):
    interval, visit = {"value", "low", "high"}, {"arm", "elapsed_s", "skipped"}
    details = {
        "amp": {"parameters", "tokens_per_s", "peak_memory_nbytes", "validation"}
        | {"profiles", "advice"},
        "step": {f"{shape}/{w}" for shape in ("3x1000", "2gx10") for w in ("norm", "adamw-open")},
        "loader": {"tensors", "collate", "slow"},
        "timer": {"timer"},
        "latency": {"1", "2"},
        "selftest": {"true_ratio"},
    }
    assert SCHEMA_VERSION == 5  # together with what follows
    for name, (_, record, _) in written.items():
        first, race_ = next(iter(record["table"])), next(iter(record["races"].values()))
        arm = race_["arms"][race_["base"]]
        head = {"schema_version", "command", "created", "environment", "job", "table", "notes"}
        head |= {"closing", "sentence"}
        assert set(record) == head | {"verdicts", "metrics", "details", "losses", "races"}
        assert set(map(type, first.values())) == {str}
        assert set(race_) == {"base", "warmup_rounds", "blocks", "placebo", "arms", "rounds"}
        assert set(arm) == {"time_s", "skipped", "speedup"}
        assert set(arm["time_s"]) == {"median", "low", "high"}
        assert set(race_["placebo"]) == set(arm["speedup"]) == interval
        assert set(race_["rounds"][0][0]) == visit
        assert all(set(metric) == interval for metric in record["metrics"].values())
        for verdict in record["verdicts"]:
            parts = {"name", "figure", "ends", "unit", "verdict", "reason", "text"}
            assert set(verdict) == parts
        assert set(record["details"]) == details[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_stands_alone(written, name):
    text = written[name][0].read_text()
    found = Page(text)
    assert found.references == ["data:,"]
    assert "script" not in found.tags
    assert not re.search(r"https?:|@import|url\(", text)


def test_a_page_has_all_arms_and_what_the_user_typed_is_text(written):
    path, record, _ = written["amp"]
    text = path.read_text()
    assert "<b>" not in page.make(record | {"notes": ["<b>"], "command": "<b>"})
    assert text.count("<polyline") == len(record["losses"]) == 3
    circles = sum(len(round_) for round_ in record["races"]["training"]["rounds"])
    assert text.count("<circle") == circles - 3 * record["races"]["training"]["warmup_rounds"]
    assert record["environment"]["torch"] in text


def test_many_visits_are_drawn_as_quantiles_and_outliers_are_counted(written):
    path, record, _ = written["selftest"]
    assert len(record["races"]["selftest"]["rounds"]) > 2 * page.DOTS
    assert path.read_text().count("<circle") <= 3 * page.DOTS
    assert "beyond the axis" in path.read_text()


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.9, 1.1), (1.0, 1.0), (3.2, 3.3), (120.0, 9000.0), (0.0, 0.0)]
)
def test_an_axis_has_a_few_round_numbers_around_its_values(low, high):
    ticks = page._ticks(low, high)
    assert 1 <= len(ticks) <= 7
    assert ticks[0] <= low
    assert high <= ticks[-1]


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium")
@pytest.mark.parametrize(("scheme", "paper"), [(1, "rgb(255, 255, 255)"), (0, "rgb(13, 17, 23)")])
def test_pages_fit_a_phone_and_a_desktop_in_light_and_dark(written, tmp_path, scheme, paper):
    frames = "".join(
        f'<iframe src="{path.as_uri()}" width="{width}" height="900" style="border:0"></iframe>'
        for path, _, _ in written.values()
        for width in (400, 1400)
    )
    look = (
        "onload = () => document.body.textContent = [...document.querySelectorAll('iframe')].map("
        "f => { const d = f.contentDocument.documentElement; return f.width + ' ' + d.scrollWidth"
        " + ' ' + f.contentWindow.getComputedStyle(d.querySelector('body')).backgroundColor })"
        ".join(';')"
    )
    wrapper = tmp_path / "all.html"
    wrapper.write_text(f"<!doctype html><body>{frames}<script>{look}</script>")
    done = subprocess.run(
        [
            *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(
                "--allow-file-access-from-files",
                "--enable-logging=stderr",
                "--window-size=1500,900",
            ),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--hide-scrollbars"),
            *(f"--blink-settings=preferredColorScheme={scheme}", wrapper.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr
    body = re.search(r"<body>(.*)</body>", done.stdout)[1]
    assert body.split(";") == [f"{width} {width} {paper}" for _ in written for width in (400, 1400)]


# The other commands


def test_a_case_is_held_to_its_base_and_to_the_plain_arm(monkeypatch):
    clock = FakeClock(monkeypatch)
    times_s = {"torch": 2.0, PLAIN: 1.0, "fastamp": 0.5}
    case = Case(arms={arm: partial(clock.spend, time_s) for arm, time_s in times_s.items()})
    args = argparse.Namespace(device="cpu", seed=0)
    found = run_cases(args, QUICK, ["x"], lambda _: case, [])
    assert {name: metric.value for name, metric in found.metrics.items()} == {
        "speedup/x": pytest.approx(4.0),
        "of_plain/x": pytest.approx(2.0),
    }
    cells = [row["of plain [95 %]"].split("x")[0] for row in found.table]
    assert cells == ["", "", "2.000"]


def test_an_arm_is_at_most_six_frames_from_the_command(monkeypatch, tmp_path):
    stacks = []

    def look(*_):
        names = [frame.name for frame in traceback.extract_stack()]
        stacks.append(names[names.index("main") :])
        return torch.zeros(())

    monkeypatch.setattr(step, "PLAN", QUICK)
    monkeypatch.setattr(step.Side, "check", lambda *_, **__: None)
    monkeypatch.setattr(step.Side, "fastamp", look)
    main(["step", "--shapes", "3x10", "--work", "norm", "--device", "cpu"])
    assert stacks[0] == ["main", "_run", "run_cases", "run_race", "look"]
    monkeypatch.setattr(measure, "peak_memory", lambda *_: None)
    monkeypatch.setattr(arms.Run, "train_step", lambda run, *_: run.losses.append(look()))
    (tmp_path / "text").write_bytes(bytes(range(200)) * 50)
    stacks.clear()
    main([*COMMANDS["amp"].split(), "--data", str(tmp_path / "text")])
    assert stacks[0][:5] == ["main", "_run", "train_arms", "run_race", "_step"]


@pytest.mark.parametrize("name", ["tensors", "tokens", "images"])
def test_the_plain_gather_gives_the_batches_of_default_collate(name):
    data = loader.DATA[name](torch.Generator().manual_seed(0))
    expected = default_collate([data.dataset[i] for i in range(data.batch_size)])
    plain = loader.plain_batches(data, shuffle=False)
    loader.check(plain, [expected])
    with pytest.raises(AssertionError, match="not equal"):
        loader.check(plain, [[part + 1 for part in expected]])
    rows = [batch[0].clone() for batch in loader.plain_batches(data, shuffle=True)()]
    assert len(rows) == len(data.dataset) // data.batch_size
    assert not torch.equal(rows[0], expected[0])


def test_augmented_images_are_checked_before_they_are_timed():
    pixels = torch.randint(1, 256, (64, 3, 32, 32), dtype=torch.uint8)
    tensors = [pixels, torch.arange(64)]
    ours = fastamp.ArrayDataset(*tensors, augment=crops.make_augmentations())
    data = loader.Data(ours, 32, tensors, crops.Samples(*tensors))
    batches = next(loader.plain_batches(data, shuffle=True)())
    for found in (default_collate([*data.by_torch]), default_collate([*ours]), batches):
        crops.check_augmented(iter([found]), pixels)
        wrong = found[0].roll(1, 2)
        with pytest.raises(AssertionError, match="no crop and flip"):
            crops.check_augmented(iter([[wrong, found[1]]]), pixels)
    with pytest.raises(AssertionError, match="no batch"):
        crops.check_augmented(iter([]), pixels)


def test_a_loader_whose_batches_are_wrong_or_missing_is_not_timed(monkeypatch):
    monkeypatch.setattr(loader, "fastamp_batches", lambda *_, **__: lambda: iter([]))
    with pytest.raises(AssertionError, match="length"):
        main(["loader", "--data", "dicts", "--device", "cpu"])


@pytest.mark.parametrize(("region", "verdict"), [(0.99, "pass"), (1.01, "fail")])
@pytest.mark.parametrize(("backend", "most"), [("cpu", 3.0), ("fallback", 8.0)])
def test_a_region_is_held_to_the_cost_of_two_reads_of_a_clock(
    region, verdict, backend, most, monkeypatch, capsys
):
    if backend not in fastamp.backends():
        pytest.skip(f"backend {backend} is not available")
    clock = FakeClock(monkeypatch)
    costs = dict.fromkeys(timer.STATEMENTS, 1.0) | {"region": region * most}
    visits = {
        arm: SimpleNamespace(timeit=lambda number, cost=cost: clock.spend(number * cost))
        for arm, cost in costs.items()
    }
    monkeypatch.setattr(timer, "make_visits", lambda _device: visits)
    monkeypatch.setattr(timer, "PLAN", QUICK)
    with _ops.use_only(backend):
        assert main(["timer", "--check", "--device", "cpu"]) == ["pass", "fail"].index(verdict)
    assert f"(target <= {most:g}x): {verdict}, against two reads" in capsys.readouterr().out


def test_a_selftest_says_what_a_region_costs(written):
    _, record, shown = written["selftest"]
    found = re.search(r"a region of fastamp.Timer costs (\d+) ns", shown)
    assert 10 < int(found[1]) < 100_000
    assert found[0] in record["notes"]


def test_the_first_requests_are_not_counted_as_latency():
    calls = []
    server = latency.Server(calls.append, torch.zeros(1), None)
    server.serve()
    assert len(calls) == 2 * latency.REQUESTS
    assert server.timer.summary()["request"].count == latency.REQUESTS
    found = server.percentiles()
    assert 0 < found["p50 ms"] <= found["p90 ms"] <= found["p99 ms"]


def test_every_batch_size_has_percentiles(written):
    _, record, shown = written["latency"]
    assert set(record["details"]) == {"1", "2"}
    for by_arm in record["details"].values():
        for found in by_arm.values():
            assert 0 < found["p50 ms"] <= found["p90 ms"] <= found["p99 ms"]
    assert "p99 ms" in shown


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


def test_a_figure_that_is_not_finite_is_null_and_shown_as_such():
    assert [_finite(value) for value in (math.nan, 1.0, math.inf, "x")] == [None, 1.0, None, "x"]
    assert Interval(value=1.0, low=-math.inf, high=2.0).text(".1f") == "1.0 [n/a, 2.0]"


def test_help_lists_the_commands_and_the_exit_statuses(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for command in ("amp", "step", "loader", "timer", "latency", "selftest"):
        assert f" {command} " in text
    assert "3 the environment does not allow a verdict" in text
