"""Who may include or import whom. Every rule of the house stands in the two tables below."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STANDARD = r"\w+"
INCLUDES = {
    "core": [r"core/\w+\.h", STANDARD],
    "cpu": [r"(core|cpu)/\w+\.h", STANDARD, r"(unistd|dlfcn)\.h"],
    "cuda": [r"(core|cuda)/\w+\.(h|cuh)", STANDARD, r"cuda_\w+\.h"],
    "no_cuda": [r"core/\w+\.h", STANDARD],
    "bindings": [
        r"bindings/\w+\.h",
        r"core/(ops|types|math|collate|gather|timer)\.h",
        STANDARD,
        r"pybind11/\w+\.h",
        r"(dlfcn|structmember)\.h",
    ],
}

EXTENSION = "fastamp._native"
BACKENDS = {"fastamp._ops.fallback", "fastamp._ops.compiled", "fastamp._ops.compiled_cuda"}
PUBLIC = {
    "fastamp",
    "fastamp.step",
    "fastamp.step.clip",
    "fastamp.data",
    "fastamp.step.precision",
    "fastamp.timer",
}
ABOVE = {"fastamp.train", "fastamp.metrics", "fastamp.bench", "fastamp.integrations"}
# Module, or package with everything in it: which modules of fastamp it may import.
IMPORTS = {
    "fastamp": {"fastamp._ops", *PUBLIC, *ABOVE},
    "fastamp._ops": {"fastamp._ops.fallback", "fastamp._ops.sharded"},
    "fastamp._ops.fallback": {"fastamp._ops", "fastamp._ops.regions"},
    "fastamp._ops.regions": set(),
    "fastamp.timer.events": {"fastamp._ops"},
    "fastamp._ops.compiled": {"fastamp._ops", EXTENSION},
    "fastamp._ops.compiled_cuda": {"fastamp._ops", EXTENSION},
    "fastamp.step": {"fastamp._ops", "fastamp.step.report"},
    "fastamp.step.report": {"fastamp._ops", "fastamp._ops.sharded"},
    "fastamp._ops.sharded": {"fastamp._ops", "fastamp._ops.fallback"},
    "fastamp.step.clip": {"fastamp._ops"},
    "fastamp.data": {"fastamp._ops"},
    "fastamp.step.precision": set(),
    "fastamp.timer": {"fastamp._ops", "fastamp.timer.events"},
    **{name: {*PUBLIC, *ABOVE} for name in ABOVE},
}


def refused_includes(folder: str, text: str) -> list[str]:
    """Name the includes that a file in csrc/<folder> must not have."""
    included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)
    allowed = [re.compile(pattern) for pattern in INCLUDES[folder]]
    return [name for name in included if not any(p.fullmatch(name) for p in allowed)]


def imported(text: str) -> set[str]:
    """Name every fastamp module that a Python file imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "fastamp":
            found |= {f"fastamp.{a.name}" if is_module(a.name) else "fastamp" for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            found.add(node.module or "")
    return {name for name in found if name.split(".")[0] == "fastamp"}


def is_module(name: str) -> bool:
    return name == "_native" or any(
        (ROOT / "fastamp" / path).exists() for path in (f"{name}.py", f"{name}/__init__.py")
    )


def refused_imports(module: str, text: str) -> list[str]:
    """Name the imports that a module of fastamp must not have."""
    rule = max((r for r in IMPORTS if module == r or module.startswith(r + ".")), key=len)
    allowed = IMPORTS[rule] | ({rule} if rule != "fastamp" else set())
    return sorted(
        name
        for name in imported(text)
        if not any(name == a or (a != "fastamp" and name.startswith(a + ".")) for a in allowed)
    )


def sources(folder: str, *patterns: str) -> list[Path]:
    return sorted(p for pattern in patterns for p in (ROOT / folder).rglob(pattern))


CXX = sources("csrc", "*.h", "*.cuh", "*.cpp", "*.cu")
PYTHON = sources("fastamp", "*.py")


@pytest.mark.parametrize("path", CXX, ids=lambda p: str(p.relative_to(ROOT)))
def test_includes_stay_in_their_layer(path):
    assert refused_includes(path.parent.name, path.read_text()) == []


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_stay_in_their_layer(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    assert refused_imports(module, path.read_text()) == []


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("core", "#include <cuda_runtime.h>"),
        ("core", '#include "cpu/convert.h"'),
        ("cpu", "#include <pybind11/pybind11.h>"),
        ("cpu", "#include <torch/extension.h>"),
        ("cpu", '  #  include "cuda/runtime.h"'),
        ("cuda", '#include "cpu/convert.h"'),
        ("bindings", '#include "cpu/threads.h"'),
        ("bindings", "#include <ATen/ATen.h>"),
    ],
)
def test_a_forbidden_include_is_caught(folder, line):
    assert len(refused_includes(folder, f"#pragma once\n{line}\n#include <vector>\n")) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("fastamp.step", "from fastamp import _native"),
        ("fastamp.step", "import fastamp._ops.compiled"),
        ("fastamp.step", "from fastamp.data import loader"),
        ("fastamp._ops.fallback", "from fastamp.step import clip_grad_norm_"),
        ("fastamp._ops.fallback", "from fastamp._native import pack"),
        ("fastamp._ops.compiled_cuda", "from fastamp._ops import compiled"),
        ("fastamp.bench.race", "from fastamp import _ops"),
        ("fastamp.metrics.watch", "from fastamp import _ops"),
        ("fastamp.step.precision", "from fastamp.step import GradScaler"),
        ("fastamp.bench", "def f():\n    import fastamp._native"),
    ],
)
def test_a_forbidden_import_is_caught(module, line):
    assert len(refused_imports(module, f"import torch\n{line}\n")) == 1


def test_the_oracle_stands_alone():
    text = (ROOT / "tests/support/reference.py").read_text()
    assert imported(text) == set()
    modules = re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE)
    assert set(modules) <= {"__future__", "math", "typing", "collections", "numpy"}


@pytest.mark.parametrize("path", CXX, ids=lambda p: str(p.relative_to(ROOT)))
def test_preprocessor_conditionals_live_in_one_file(path):
    if path.name != "macros.h":
        assert not re.search(r"^\s*#\s*(if|ifdef|ifndef|elif)\b", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", [*CXX, ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"], ids=str)
def test_nothing_is_built_with_fast_math(path):
    text = path.read_text()
    assert "use_fast_math" not in text
    assert "ffast-math" not in text.replace("must not be built with -ffast-math", "")
