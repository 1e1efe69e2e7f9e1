"""README and documentation: programs run, links lead somewhere, the reference is whole.

`nox -s docs` builds it, and finds wrong links in it and pages that no index lists.
"""

from __future__ import annotations

import ast
import re
import textwrap
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import NamedTuple

import pytest
import torch
from support.processes import run_python

from fastamp import integrations
from fastamp.bench.__main__ import COMMANDS
from fastamp.bench.tasks import EXAMPLE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts]
GUIDES = sorted(path for path in (DOCS / "guides").glob("*.md") if path.name != "index.md")
FIGURE = re.compile(r"\d[\d.]*x \[[\d., ]+\]|\d[\d.]+ ms")
# What a block may be called that does not run; a directive's name stands in braces.
OTHERS = {"sh", "diff", "text", "json", "yaml", "toml"}
INTEGRATIONS = "fastamp.integrations."
EXTRAS = ("accelerate", "lightning", "transformers", "wandb")
REFERENCE = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
DESCRIBED = re.findall(r"^\.\. (?:auto|py:)(?!module)\w+:: (\w[\w.]*)", REFERENCE, re.MULTILINE)
# torchrun's, for one process
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
STRICTLY = """
import logging
import warnings
import torch
torch.set_num_threads(1)  # tiny sizes; several threads wait for each other on a busy machine
warnings.simplefilter("error")
# dynamo's, at the first compilation
warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
# torch's, at its own loader in a page's program, without a GPU
warnings.filterwarnings("ignore", "'pin_memory' argument is set as true", UserWarning)
# Lightning 2.6 asks torch 2.13's pytree in the way of torch 2.6
warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.`", FutureWarning)
# torchao 0.18, of its CUDA code on a CPU and of torch 2.13
logging.getLogger("torchao").setLevel("ERROR")
logging.getLogger("torch.utils._pytree").setLevel("ERROR")
"""
RUN_PAGE = """
for program in {programs!r}:
    exec(compile(program, {page!r}, "exec"), {{"__name__": "__main__"}})
"""
RUN_EXAMPLES = """
import doctest, importlib, os, sys, tempfile
import numpy, torch, fastamp

names, runner = {"np": numpy, "torch": torch, "fastamp": fastamp}, doctest.DocTestRunner()
for path in sys.argv[1:]:
    module, _, name = path.rpartition(".")
    described = getattr(importlib.import_module(module), name)
    tests = doctest.DocTestFinder().find(described, path, extraglobs=names)
    if path not in {test.name for test in tests}:
        print(path, "has no example")
    for test in tests:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            runner.run(test)
            os.chdir("/")  # the folder goes
"""


class Block(NamedTuple):
    """A fenced block: its language or directive, its text, and the line of it, from 0."""

    language: str
    line: int
    text: str


def read_blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    fenced = re.compile(r"^( *)(```+)([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
    return [
        Block(match[3].strip(), page.count("\n", 0, match.start(4)), textwrap.dedent(match[4]))
        for match in fenced.finditer(page)
    ]


def apply(diff: str, program: str) -> str:
    """Return a program changed by a diff: each line that stays or goes is the next such line."""
    rest, made = program.split("\n"), []
    for line in filter(None, diff.split("\n")):
        if line[0] == "+":
            made.append(line[1:])
            continue
        place = rest.index(line[1:])
        made += rest[: place + (line[0] == " ")]
        rest = rest[place + 1 :]
    return "\n".join(made + rest)


def read_programs(page: str) -> list[str]:
    """Return the programs of a page.

    Each `py` block, the reader's own code, is one, and each `diff` after it makes another one of
    the last. A `python` block continues the last program that no `py` block is.
    """
    programs: list[str] = []
    continued = False
    for block in read_blocks(page):
        if block.language == "py" or (block.language == "python" and not continued):
            programs.append("\n" * block.line + block.text)
        elif block.language == "diff" and programs:
            programs.append(apply(block.text, programs[-1]))
        elif block.language == "python":
            programs[-1] += "\n" * (block.line - programs[-1].count("\n")) + block.text
        else:
            continue
        continued = block.language != "py"
    return programs


def can_run(program: str) -> bool:
    """Say whether the packages that a program imports are there."""
    names = re.findall(r"^(?:from|import) (\w+)", program, re.MULTILINE)
    return all(find_spec(name) for name in names)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


PROGRAMS = {page: read_programs(page.read_text()) for page in (README, *PAGES)}


@pytest.mark.parametrize("page", [page for page in PROGRAMS if PROGRAMS[page]], ids=name_of)
def test_the_programs_of_a_page_run_in_silence(page, tmp_path):
    programs = [program for program in PROGRAMS[page] if can_run(program)]
    if not programs:
        pytest.skip("a package of the page's programs is missing")
    if page.name == "muon.md" and not hasattr(torch.optim, "Muon"):
        pytest.skip("Muon comes with torch 2.9")
    pages = {"ranks.md", "your-loop.md", "sharded-checkpoints.md", "metrics.md"}
    if page.name in pages and torch.__version__ < (2, 10):
        pytest.skip("FSDP2, torch.compile, torch's checkpoints or an old W&B warn here")
    code = RUN_PAGE.format(programs=programs, page=name_of(page))
    done = run_python(STRICTLY + code, cwd=tmp_path, **ONE_RANK)
    assert (done.returncode, done.stderr, done.survivors) == (0, "", []), done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_of_a_page_says_whether_it_runs(page):
    languages = {block.language for block in read_blocks(page.read_text())} - OTHERS
    directives = {each for each in languages if re.match(r"\{(?!code)[\w-]+\}", each)}
    assert languages - directives <= {"py", "python"}


def test_the_reference_has_every_public_name_once():
    pytest.importorskip("lightning")  # whose classes two modules derive from
    modules = [each.name for each in iter_modules(integrations.__path__, INTEGRATIONS)]
    public = {
        f"{module}.{name}"
        for module in ("fastamp", *modules)
        for name in getattr(import_module(module), "__all__", ())
    }
    assert sorted({*DESCRIBED}) == sorted(DESCRIBED)
    assert public - {*DESCRIBED} == set()


def test_the_reference_has_every_command_of_the_bench():
    shown = re.findall(r"^```\{command-help\} fastamp\.bench (\w+)$", REFERENCE, re.MULTILINE)
    assert shown == [*COMMANDS]


def test_the_start_shows_the_task_that_the_help_shows():
    programs = read_blocks((DOCS / "start" / "worth-it.md").read_text())
    assert ast.dump(ast.parse(programs[0].text)) == ast.dump(ast.parse(EXAMPLE))


@pytest.mark.parametrize("needs", [(), EXTRAS], ids=["fastamp", "integrations"])
def test_every_public_name_has_an_example_that_runs(needs, tmp_path):
    for package in needs:
        pytest.importorskip(package)
    described = sorted({*DESCRIBED} - {"fastamp.__version__"})
    names = [name for name in described if name.startswith(INTEGRATIONS) == bool(needs)]
    done = run_python(STRICTLY + RUN_EXAMPLES, *names, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *PAGES], ids=name_of)
def test_links_lead_to_files_that_are_there(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_has_a_program_and_at_most_110_lines():
    assert PROGRAMS[README]
    assert README.read_text().count("\n") <= 110


def test_every_figure_of_a_guide_stands_in_the_measurements():
    text = " ".join(next(DOCS.rglob("measured.md")).read_text().split())
    known = {*FIGURE.findall(text), *(f"{found} ms" for found in re.findall(r"\d+\.\d+", text))}
    for page in GUIDES:
        figures = FIGURE.findall(" ".join(page.read_text().split()))
        assert {figure for figure in figures if figure not in known} == set(), page.name
