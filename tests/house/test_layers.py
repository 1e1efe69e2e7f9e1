"""Who may include or import whom, and that each file says first what lives in it.

The rules of the house stand in the tables below.
"""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STANDARD = r"\w+"
SHARED = [r"tensor/view\.h", r"parallel/\w+\.h", r"support/\w+\.h", STANDARD]
BINDING = [r"pybind11/\w+\.h", r"module\.h", r"tensor/\w+\.h", *SHARED]
# File, or folder with everything in it: what it may include. The longest match decides.
INCLUDES = {
    "module": BINDING,
    "support": [STANDARD],
    "parallel": [r"parallel/\w+\.h", r"(dlfcn|unistd)\.h", STANDARD],
    "tensor": [r"(tensor|support|pybind11)/\w+\.h", STANDARD],
    "tensor/view.h": [r"support/\w+\.h", STANDARD],
    "step": [r"step/\w+\.(h|cuh)", r"unistd\.h", *SHARED],
    **{name: [rf"{name}/\w+\.h", r"unistd\.h", *SHARED] for name in ("data", "timer")},
    **{f"{name}/bind": [rf"{name}/\w+\.h", *BINDING] for name in ("step", "data")},
    "timer/bind": [r"timer/\w+\.h", r"structmember\.h", *BINDING],
}

EXTENSION = "fastamp._native"
BOTTOM = {"fastamp.step", "fastamp.data", "fastamp.timer"}
SMALL = {"fastamp._files", "fastamp._progress"}
# Module, or package with everything in it: what else of fastamp it may import.
IMPORTS = {
    "fastamp": {"fastamp._ops", *BOTTOM, "fastamp.metrics", "fastamp.train"},
    "fastamp._files": set(),
    "fastamp._progress": set(),
    "fastamp._ops": set(),
    "fastamp._ops.types": {"fastamp._ops.private"},
    "fastamp._ops.choose": {EXTENSION, "fastamp._build"},
    "fastamp._ops.private": set(),
    **{name: {"fastamp._ops"} for name in BOTTOM},
    "fastamp.data": {"fastamp._ops", *SMALL},
    "fastamp.timer": {"fastamp._ops", "fastamp._files"},
    "fastamp.metrics": {"fastamp._files", *BOTTOM},
    "fastamp.train": {"fastamp.metrics", *SMALL, *BOTTOM},
    "fastamp.integrations": {"fastamp.train", "fastamp.metrics", *BOTTOM},
    "fastamp.bench": {"fastamp", "fastamp.train", "fastamp.metrics", *SMALL, *BOTTOM},
    "fastamp.bench.doctor": {"fastamp.bench", "fastamp._ops.choose"},
}
# These may not import what lies below them.
ALONE = {"fastamp", "fastamp._ops.types", "fastamp._ops.choose"}


def refused_includes(path: str, text: str) -> list[str]:
    """Name the includes that a file of csrc must not have."""
    included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)
    rule = max((rule for rule in INCLUDES if path.startswith(rule)), key=len)
    is_cuda = path.endswith((".cu", ".cuh")) or path == "step/device.h"
    allowed = [re.compile(each) for each in (*INCLUDES[rule], *[r"cuda_\w+\.h"] * is_cuda)]
    return [name for name in included if not any(p.fullmatch(name) for p in allowed)]


def imported(text: str) -> set[str]:
    """Name every fastamp module that a Python file imports, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {part if part in MODULES else str(node.module) for part in parts}
    return {name for name in names if name.split(".")[0] == "fastamp"}


def refused_imports(module: str, text: str) -> list[str]:
    """Name the imports that a module of fastamp must not have."""
    rule = max((r for r in IMPORTS if module == r or module.startswith(r + ".")), key=len)
    allowed = IMPORTS[rule] | (set() if rule in ALONE else {rule})
    return sorted(
        name
        for name in imported(text)
        if not any(name == a or (a != "fastamp" and name.startswith(a + ".")) for a in allowed)
    )


def sources(folder: str, *patterns: str) -> list[Path]:
    return sorted(p for pattern in patterns for p in (ROOT / folder).rglob(pattern))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


CXX = sources("csrc", "*.h", "*.cuh", "*.cpp", "*.cu")
PYTHON = sources("fastamp", "*.py")
LABORATORY = sources("benchmarks", "*.py")
MODULES = {EXTENSION, *map(module_of, PYTHON)}


@pytest.mark.parametrize("path", [*CXX, *PYTHON], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_uses_only_what_its_layer_may(path):
    if path in CXX:
        refused = refused_includes(path.relative_to(ROOT / "csrc").as_posix(), path.read_text())
    else:
        refused = refused_imports(module_of(path), path.read_text())
    assert refused == []


def test_nothing_imports_itself_in_a_circle():
    imports = {module_of(path): imported(path.read_text()) for path in PYTHON}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("step/math.h", "#include <cuda_runtime.h>"),
        ("step/cpu.cpp", '#include "tensor/tensors.h"'),
        ("data/gather.cpp", '  #  include "step/math.h"'),
        ("step/bind.cpp", "#include <ATen/ATen.h>"),
        ("tensor/view.h", "#include <pybind11/pybind11.h>"),
        ("fastamp.step.scaler", "from fastamp import _native"),
        ("fastamp.step.scaler", "from fastamp.data import loader"),
        ("fastamp.timer.events", "from fastamp.step import GradScaler"),
        ("fastamp._ops.fallback", "from fastamp._native import pack"),
        ("fastamp.metrics.watch", "from fastamp import _ops"),
        ("fastamp.train.loop", "from fastamp.bench.race import Plan"),
        ("fastamp.bench", "def f():\n    import fastamp._native"),
    ],
)
def test_what_is_forbidden_is_caught(file, line):
    refused = refused_includes if "/" in file else refused_imports
    assert len(refused(file, line)) == 1


def test_the_laboratory_uses_the_public_package_and_the_package_no_laboratory():
    scripts = "|".join(path.stem for path in LABORATORY)
    outside = re.compile(rf"^\s*(?:from|import) (?:{scripts}|benchmarks)\b", re.MULTILINE)
    assert [path for path in PYTHON if outside.search(path.read_text())] == []
    inside = {name for path in LABORATORY for name in imported(path.read_text())}
    assert [name for name in inside if name.startswith("fastamp._")] == []


def test_the_oracle_stands_alone():
    text = (ROOT / "tests/support/reference.py").read_text()
    assert imported(text) == set()
    modules = re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE)
    assert set(modules) <= {"__future__", "math", "typing", "collections", "numpy"}


def test_preprocessor_conditionals_live_in_one_file():
    conditional = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b", re.MULTILINE)
    assert [path.name for path in CXX if conditional.search(path.read_text())] == ["macros.h"]


def test_a_file_of_cpp_says_first_what_lives_in_it():  # ruff says so of Python
    assert [path for path in CXX if not re.match(r"//.{15}", path.read_text())] == []


def test_no_two_modules_have_the_same_name():
    commands = {"step", "loader", "timer"}  # of the bench, called as the feature that they measure
    names = [path.stem for path in PYTHON if not path.stem.startswith("__")]
    assert {name for name in names if names.count(name) > 1} <= commands


def test_nothing_is_built_with_fast_math():
    for path in (*CXX, ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"):
        text = path.read_text().replace("must not be built with -ffast-math", "")
        assert not re.search("use_fast_math|ffast-math", text), path.name
