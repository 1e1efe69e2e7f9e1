"""What is packed and installed: the files, the version, the extension's stub, links and imports."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support.processes import run_python

import fastamp
from fastamp._build import NO_CUDA

ROOT = Path(__file__).parents[2]
native = pytest.importorskip("fastamp._native") if "cpu" in fastamp.backends() else None
needs_native = pytest.mark.skipif(native is None, reason="needs the compiled core")


def test_the_version_is_stated_once():
    assert importlib.metadata.version("fastamp") == fastamp.__version__
    assert "version =" not in (ROOT / "pyproject.toml").read_text().split("[tool")[0]


def test_a_folder_of_tests_is_called_as_the_folder_that_it_tests():
    rooms = {path.name for path in (ROOT / "fastamp").iterdir() if path.is_dir()}
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("*.py"))}
    assert folders - rooms == {"support", "house"}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository")
def test_the_source_distribution_holds_what_the_repository_holds(tmp_path):
    pytest.importorskip("scikit_build_core")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    built = run_python(code, str(tmp_path), cwd=ROOT)
    assert built.returncode == 0, built.stderr
    with tarfile.open(next(tmp_path.iterdir())) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    held = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert packed == {name for name in held.splitlines() if name[0] != "."} | {"PKG-INFO"}


def test_what_is_installed_holds_no_sources_of_the_extension():
    files = [path for path in Path(fastamp.__file__).parent.rglob("*") if path.is_file()]
    kinds = {path.suffix for path in files if "__pycache__" not in path.parts}
    assert kinds - {".so", ".dylib", ".pyd"} == {".py", ".pyi", ".typed"}


def test_the_package_says_why_it_holds_no_cuda_code():
    assert (NO_CUDA == "") == (native is not None and native.built_with_cuda)


@needs_native
def test_the_stub_names_what_the_extension_has_with_its_arguments():
    tree = ast.parse((Path(fastamp.__file__).parent / "_native.pyi").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AnnAssign)
    stated = [node for node in tree.body if isinstance(node, kinds)]
    names = {getattr(node, "name", "") or node.target.id for node in stated}
    assert names == {name for name in dir(native) if not name.startswith("_")}
    functions = [(native, node) for node in tree.body if isinstance(node, ast.FunctionDef)]
    for cls in classes:
        owner, body = getattr(native, cls.name), [n for n in cls.body if isinstance(n, kinds)]
        members = {getattr(node, "name", "") or node.target.id for node in body}
        ours = {n for n in vars(owner) if not n.startswith("_")}
        ours -= {"name", "value"}  # which every pybind11 enum has
        assert ours == members - {"__init__", "__enter__", "__exit__"}, cls.name
        functions += [
            (owner, n) for n in body if isinstance(n, ast.FunctionDef) and not n.decorator_list
        ]
    for owner, node in functions:
        described = inspect.getdoc(getattr(owner, node.name)).splitlines()[0]
        expected = re.findall(r"(\w+):", described[described.index("(") :])
        assert [a.arg for a in node.args.args] == expected, node.name


@needs_native
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_the_extension_links_no_torch_and_no_cuda():
    dynamic = subprocess.run(
        ["readelf", "-d", native.__file__], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"NEEDED.*\[(.+?)\]", dynamic)
    assert needed
    assert not [name for name in needed if re.search("torch|c10|cuda", name)]


def test_importing_is_silent_and_imports_no_bench_no_extra_and_no_slow_part_of_torch(tmp_path):
    code = "import warnings; warnings.simplefilter('error')\n"
    code += "import sys, torch, numpy; before = {*sys.modules}; import fastamp\n"
    code += "assert all(hasattr(fastamp, name) for name in fastamp.__all__)\n"
    code += "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)\n"
    code += "fastamp.clip_grad_norm_(p, 1.0)\n"
    code += "print(*{*sys.modules} - before)\n"
    code += "import fastamp.integrations.accelerate, fastamp.integrations.wandb\n"
    code += "import fastamp.bench.__main__\n"
    code += "print(*{*sys.modules} - before)"
    words = [sys.executable, "-c", code]  # not in the folder of the sources, which warn
    done = subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True)
    first, then = (line.split() for line in done.stdout.splitlines())
    slow = ("fastamp.bench", "tqdm", "pynvml", "sklearn", "torch._dynamo")
    slow += ("torch.distributed.tensor", "torch.distributed.checkpoint")
    extras = ("lightning", "pytorch_lightning", "accelerate", "transformers", "wandb")
    extras += ("matplotlib", "tensorboard", "PIL", "simplejpeg")
    assert "fastamp.train" in first
    assert not [name for name in first if name.startswith(slow)]
    assert not [name for name in then if name.startswith(extras)]
    assert done.stderr == ""
