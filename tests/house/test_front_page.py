"""The table and the picture that people see first: what the records of the bench give."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def front(monkeypatch, tmp_path):
    """Return the script, with copies of all that it reads and writes."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module("front_page")
    results = tmp_path / "results"
    shutil.copytree(script.RESULTS, results)
    pages = {Path(shutil.copy(page, tmp_path)): docs for page, docs in script.PAGES.items()}
    picture, measured = (Path(shutil.copy(x, tmp_path)) for x in (script.PICTURE, script.MEASURED))
    new = {"RESULTS": results, "PAGES": pages, "PICTURE": picture, "MEASURED": measured}
    for name, path in new.items():
        monkeypatch.setattr(script, name, path)
    return script


def test_the_front_pages_are_what_the_records_give_eight_rows_two_without_a_gain(front, capsys):
    assert front.main(["--check"]) == 0, capsys.readouterr().out
    figures = front.read_figures(front.read_records())
    gains = [row.ratio.low >= front.GAIN for rows in figures.values() for row in rows]
    assert (gains.count(True), gains.count(False)) == (6, 2)
    drawn = front.PICTURE.read_text()
    assert ET.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314 - our own
    assert drawn.count('<circle class="good"') == 6
    assert drawn.count('<circle class="soft"') == 2


def test_pages_and_a_picture_that_differ_from_a_record_are_named_and_made_anew(front, capsys):
    path = front.RESULTS / "loader.json"
    record = json.loads(path.read_text())
    [rows] = [each for each in record["measurements"] if each["name"] == "speedup/tensors"]
    rows["interval"] = {"value": 3.21, "low": 3.2, "high": 3.22}
    path.write_text(json.dumps(record))
    assert front.main(["--check"]) == front.main(["--check"]) == 1
    said = capsys.readouterr().out.splitlines()
    names = ("README.md", "index.md", "measured.md", "gains.svg")
    assert said == [f"{name} is not what the records give" for name in names] * 2
    assert front.main([]) == front.main(["--check"]) == 0
    for path in (*front.PAGES, front.MEASURED, front.PICTURE):
        assert path.read_text().count("3.21x [3.20, 3.22]") >= 1


def test_a_measurement_keeps_the_record_but_none_of_a_machine_too_noisy(front, monkeypatch, capsys):
    before = json.loads((front.RESULTS / "loader.json").read_text())
    new = before | {"losses": {"a": [1.0]}, "created": "2030-01-01"}
    new["races"] = {name: race | {"builds": [[[]], [[]]]} for name, race in before["races"].items()}

    def run(words, *, check, cwd):
        assert (cwd / "benchmarks").is_dir()
        assert (words[1:5], check) == (["-I", "-m", "fastamp.bench", "loader"], True)
        Path(words[-1]).write_text(json.dumps(new))

    monkeypatch.setattr(front.subprocess, "run", run)
    assert front.measure("loader") == ""
    written = json.loads((front.RESULTS / "loader.json").read_text())
    races = {name: race | {"builds": 2} for name, race in before["races"].items()}
    assert written == before | {"created": "2030-01-01", "races": races}
    new |= {"noise": "the machine is too noisy", "losses": {}}
    assert front.main(["--measure", "loader"]) == 3
    assert capsys.readouterr().out == "loader: the machine is too noisy; nothing is kept\n"
    assert json.loads((front.RESULTS / "loader.json").read_text()) == written


def test_a_record_without_a_row_is_refused_by_the_name_of_the_row(front):
    path = front.RESULTS / "jobs.json"
    record = json.loads(path.read_text())
    record["measurements"] = [m for m in record["measurements"] if "images" not in m["name"]]
    path.write_text(json.dumps(record))
    with pytest.raises(SystemExit, match=r"has no examples/task_images\.py/fastamp/bf16: --m"):
        front.main(["--check"])
