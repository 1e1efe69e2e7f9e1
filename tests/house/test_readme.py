"""The README: its programs run as they stand, its links lead somewhere, and it stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.processes import run_python

ROOT = Path(__file__).parents[2]
DOCS = [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS)]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_runs_as_it_stands(program, tmp_path):
    done = run_python(f"import warnings; warnings.simplefilter('error')\n{program}", cwd=tmp_path)
    assert (done.returncode, done.stderr, done.left) == (0, "", [])
    assert done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_are_there(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_has_at_most_110_lines():
    text = (ROOT / "README.md").read_text()
    assert PROGRAMS
    assert text.count("\n") <= 110
