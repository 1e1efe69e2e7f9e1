"""What the build decides: nvcc from PyPI or not, for which cards, and the reason that it keeps."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def backend(monkeypatch):
    """Return the build backend, on a machine without nvcc and without a driver."""
    pytest.importorskip("scikit_build_core")
    spec = importlib.util.spec_from_file_location(
        "fastamp_build", ROOT / "build_backend/fastamp_build.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fastamp_build", module)
    spec.loader.exec_module(module)
    for name in ("FASTAMP_CUDA", "CUDACXX", "CUDAARCHS", "LIBRARY_PATH", "FASTAMP_NOTE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setattr(module.ctypes, "CDLL", mock.Mock(side_effect=OSError))
    absent = mock.Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(module, "distribution", absent)
    monkeypatch.setattr(module.build, "get_requires_for_build_wheel", lambda _: ["ninja"])
    return module


def fake_nvcc(folder, release, known="compute_75 compute_86"):
    """Write an nvcc that tells its release and what it knows."""
    folder.mkdir(parents=True)
    text = f'#!/bin/sh\ncase "$*" in *--version) echo release {release};; *) echo {known};; esac\n'
    (folder / "nvcc").write_text(text)
    (folder / "nvcc").chmod(0o755)
    return folder / "nvcc"


@pytest.mark.parametrize(
    ("setting", "driver", "nvcc", "archs", "gets_nvcc", "built_for", "note"),
    [
        # no nvcc
        ("AUTO", None, None, "", False, "", "there was no NVIDIA driver"),
        ("AUTO", ((13, 0), [(8, 6)]), None, "", True, "86-real", "could not install nvidia-cuda-n"),
        ("ON", ((13, 1), [(9, 0), (9, 0), (7, 5)]), None, "", True, "75-real;90-real", "could not"),
        ("AUTO", ((13, 0), [(8, 6)]), None, "80;90", True, "80;90", "could not install"),
        ("AUTO", ((13, 0), []), None, "", False, "", "the NVIDIA driver found no GPU"),
        ("AUTO", ((13, 0), [(7, 0)]), None, "", False, "", "is 7.0, and the kernels need 7.5"),
        ("AUTO", ((12, 9), [(8, 6)]), None, "", False, "86-real", "for CUDA 12.9, and .* for 13.0"),
        ("OFF", ((13, 0), [(8, 6)]), None, "", False, "", ""),
        # an nvcc, which may yet fail
        ("AUTO", ((12, 4), [(8, 6)]), (12, 8), "", False, "86-real", "nvcc failed"),
        ("AUTO", ((13, 0), [(8, 6), (10, 3)]), (12, 8), "", False, "", "nvcc failed"),
    ],
)
def test_the_decision(backend, setting, driver, nvcc, archs, gets_nvcc, built_for, note):
    driver = driver and backend.Driver(*driver)
    nvcc = nvcc and backend.Nvcc("nvcc", nvcc, ["75", "86", "100"])
    plan = backend.decide(setting, driver, nvcc, archs)
    assert plan.packages == backend.PACKAGES * gets_nvcc
    assert plan.archs == built_for
    assert re.search(note, plan.note)
    assert bool(note) == bool(plan.note)


def test_only_the_build_for_a_gpu_asks_for_nvcc(backend, monkeypatch):
    requires = backend.get_requires_for_build_wheel
    assert requires() == requires({}) == ["ninja"]
    monkeypatch.setattr(backend, "read_driver", lambda: backend.Driver((13, 0), [(8, 6)]))
    assert requires() == backend.get_requires_for_build_editable() == ["ninja", *backend.PACKAGES]
    assert requires({"cmake.define.FASTAMP_CUDA": "off"}) == ["ninja"]
    monkeypatch.setenv("FASTAMP_CUDA", "OFF")
    assert requires() == ["ninja"]
    assert requires({"cmake.define.FASTAMP_CUDA": "ON"}) == ["ninja", *backend.PACKAGES]


def test_cmake_reads_the_decision_in_the_environment(backend, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(backend.build, "build_wheel", lambda *given: seen.append(given) or "x.whl")
    hook = backend._with_nvcc(backend.build.build_wheel)
    monkeypatch.setattr(backend, "read_driver", lambda: backend.Driver((13, 0), [(8, 6)]))
    environ = backend.os.environ
    assert hook("out", {"a": "b"}) == "x.whl"
    assert seen == [("out", {"a": "b"}, None)]
    assert (environ["CUDAARCHS"], environ["CUDACXX"]) == ("86-real", "")
    assert environ["FASTAMP_NOTE"].startswith("the build could not install nvidia-cuda-nvcc==13")
    nvcc = str(fake_nvcc(tmp_path / "a folder/bin", "13.0"))
    monkeypatch.setattr(backend, "packaged_nvcc", lambda: nvcc)
    monkeypatch.setenv("LIBRARY_PATH", "/mine")
    hook("out")
    assert environ["CUDACXX"] == nvcc
    assert environ["LIBRARY_PATH"] == f"{tmp_path}/a folder/lib:/mine"


def test_the_first_nvcc_that_is_new_enough_is_used(backend, monkeypatch, tmp_path):
    assert backend.find_nvcc(has_driver=True) is None
    packaged = fake_nvcc(tmp_path / "packaged", "13.0", "compute_75 compute_120")
    monkeypatch.setattr(backend, "packaged_nvcc", lambda: str(packaged))
    usual = fake_nvcc(tmp_path / "cuda/bin", "12.8")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", str(fake_nvcc(tmp_path / "old", "12.6").parent))
    assert backend.find_nvcc(has_driver=True) == (str(usual), (12, 8), ["75", "86"])
    # Without a driver the folder off the PATH is left alone, as CMake does.
    assert backend.find_nvcc(has_driver=False) == (str(packaged), (13, 0), ["75", "120"])
    given = f"{fake_nvcc(tmp_path / 'given', '13.1')} -ccbin g++"
    monkeypatch.setenv("CUDACXX", given)
    assert backend.find_nvcc(has_driver=True) == (given, (13, 1), ["75", "86"])


def test_nvcc_of_pypi_is_used_when_all_of_its_packages_are_there(backend, monkeypatch, tmp_path):
    installed = type("Installed", (), {"locate_file": lambda _, name: tmp_path / name})
    monkeypatch.setattr(backend, "distribution", lambda _: installed())
    for part in backend.PARTS:
        assert backend.packaged_nvcc() is None
        file = tmp_path / "nvidia/cu13" / part
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert backend.packaged_nvcc() == f"{tmp_path}/nvidia/cu13/bin/nvcc"


@pytest.mark.parametrize(("status", "cards"), [(0, [(8, 6), (8, 9)]), (100, [])])
def test_the_driver_tells_its_version_and_its_cards(backend, monkeypatch, status, cards):
    answers = {
        "cuDriverGetVersion": lambda: 12060,
        "cuDeviceGetCount": lambda: 2,
        "cuDeviceGet": lambda index: index,
        "cuDeviceGetAttribute": lambda which, device: {75: 8, 76: 6 + 3 * device}[which],
    }

    def function(name):
        return lambda place, *arguments: setattr(place._obj, "value", answers[name](*arguments))

    library = SimpleNamespace(cuInit=lambda _: status, **{name: function(name) for name in answers})
    monkeypatch.setattr(backend.ctypes, "CDLL", lambda _: library)
    assert backend.read_driver() == backend.Driver((12, 6), cards)
