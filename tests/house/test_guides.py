"""The guides: their figures stand in the measurements, and the index has a line for each."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = sorted(path for path in (DOCS / "guides").glob("*.md") if path.name != "index.md")
FIGURE = re.compile(r"\d[\d.]*x \[[\d., ]+\]|\d[\d.]+ ms")


def test_every_figure_of_a_guide_stands_in_the_measurements():
    [measured] = DOCS.rglob("measured.md")
    known = set(FIGURE.findall(measured.read_text()))
    known |= {f"{figure} ms" for figure in re.findall(r"\d+\.\d+", measured.read_text())}
    for page in GUIDES:
        figures = FIGURE.findall(" ".join(page.read_text().split()))
        assert {figure for figure in figures if figure not in known} == set(), page.name


def test_the_index_has_a_line_for_every_guide():
    index = (DOCS / "guides" / "index.md").read_text()
    listed, names = re.findall(r"\]\((.+)\.md\)", index), [page.stem for page in GUIDES]
    assert sorted(listed) == names
    assert [line for line in index.splitlines() if line in names] == listed  # the toctree
