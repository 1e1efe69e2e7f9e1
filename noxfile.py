"""The developer's commands: `nox -s NAME`, in the environment that is active; `nox -l` lists them.

CI runs the same sessions (.ci/run). To build, they need scikit-build-core, pybind11, cmake, ninja.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "tests"]

CXX = [p for root in ("csrc", "tests/emulate") for p in Path(root).rglob("*")]
CXX = sorted(str(path) for path in CXX if path.is_file())


def install(session: nox.Session, folder: str, build_type: str = "Release", **defines: str) -> str:
    """Install fastamp into a folder of its own and return that folder's path."""
    target = Path("build", folder).absolute()
    options = [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]
    session.run("rm", "-rf", str(target), external=True)
    pip = ("python", "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation")
    session.run(
        *pip,
        f"--target={target}",
        f"--config-settings=cmake.build-type={build_type}",
        *options,
        ".",
    )
    return str(target)


@nox.session
def lint(session: nox.Session) -> None:
    """Check the style of Python and C++; `nox -s format` fixes what a tool can fix."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("clang-format", "--dry-run", "-Werror", *CXX)


@nox.session(name="format")
def format_(session: nox.Session) -> None:
    """Format Python and C++ in place."""
    session.run("ruff", "check", "--fix", ".")
    session.run("ruff", "format", ".")
    session.run("clang-format", "-i", *CXX)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types."""
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Test the installed package, not the folder; options go to pytest."""
    session.run("python", "-I", "-m", "pytest", *session.posargs)


def list_floors(project: dict[str, Any]) -> list[str]:
    """Return pins of the oldest torch and frameworks that a project's table allows."""
    extras = project["optional-dependencies"]
    inside = re.search(r"\[(.+)\]", extras["frameworks"][0])[1].split(",")  # fastamp[these]
    ranges = [*extras["frameworks"][1:], *(each for name in inside for each in extras[name])]
    ranges += [each for each in project["dependencies"] if each.startswith("torch>")]
    return [each.replace(">=", "==") for each in ranges]


def test_with(session: nox.Session, versions: list[str]) -> None:
    """Run the suite, or the tests in the options, with other versions than the pinned ones.

    torch brings several gigabytes of CUDA libraries along, so CI does not run these sessions.
    """
    names = [version.partition("==")[0] for version in versions]
    pins = Path("constraints.txt").read_text().splitlines()
    pins = [pin for pin in pins if pin.partition("==")[0] not in names]
    constraints = Path(session.create_tmp(), "constraints.txt")
    constraints.write_text("\n".join(pins))
    package, env = ".[test,frameworks]", {"FASTAMP_CUDA": "OFF"}
    session.install("-c", str(constraints), *versions, package, env=env)
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    session.run("python", "-I", "-m", "pytest", *session.posargs)


@nox.session(venv_backend="venv")
def oldest(session: nox.Session) -> None:
    """Run the suite with the oldest torch, on the fallback, and the oldest frameworks."""
    floors = list_floors(nox.project.load_toml("pyproject.toml")["project"])
    test_with(session, [*floors, "numpy==2.2.6"])  # torch 2.8 takes no numpy.bool of a later one


@nox.session(venv_backend="venv")
def newest(session: nox.Session) -> None:
    """Run the suite with the newest torch."""
    test_with(session, ["torch"])


@nox.session
def cuda(session: nox.Session) -> None:
    """Compile the CUDA code for every architecture and import the result, GPU or not."""
    folder = install(session, "cuda", FASTAMP_CUDA="ON")
    check = "from fastamp import _native; assert _native.built_with_cuda, _native.__file__"
    session.run("python", "-c", check, env={"PYTHONPATH": folder, "PYTHONSAFEPATH": "1"})


@nox.session(venv_backend="venv")
def sass(session: nox.Session) -> None:
    """Read compiled kernels: none spills, loads of the norm go out together. It needs nvcc.

    Options go to benchmarks/sass.py: `-- --csrc FOLDER` reads another checkout's.
    """
    session.install("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
    session.run("python", "benchmarks/sass.py", *session.posargs)


@nox.session
def pure(session: nox.Session) -> None:
    """Install without a C++ compiler, see what `doctor` says of it, and test the fallback."""
    session.env.update(CXX="false", CC="false")
    env = {"PYTHONPATH": install(session, "pure"), "PYTHONSAFEPATH": "1"}
    del session.env["CXX"], session.env["CC"]
    check = "import fastamp; assert fastamp.backends() == ['fallback']"
    session.run("python", "-c", check, env=env)
    session.run("python", "-m", "fastamp.bench", "doctor", env=env)
    step = ["clip_and_norm", "backends"]
    data = ["collate", "padding", "loader", "datasets", "passes", "resume"]
    tests = [f"tests/step/test_{name}.py" for name in step]
    tests += [f"tests/data/test_{name}.py" for name in data]
    session.run("python", "-m", "pytest", "-q", *(session.posargs or tests), env=env)


@nox.session
def package(session: nox.Session) -> None:
    """Build the source distribution, and from it, outside of the repository, the wheel; check both.

    FASTAMP_CUDA decides whether the wheel holds CUDA code.
    """
    folder = Path("build", "package")
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "build", f"--outdir={folder}", silent=True)
    sdist, wheel = sorted(folder.iterdir(), key=lambda path: path.suffix)
    session.run("twine", "check", "--strict", str(sdist), str(wheel))
    session.run("check-wheel-contents", str(wheel))
    sizes = [path.stat().st_size for path in (sdist, wheel)]
    session.log("%s: %d bytes; %s: %d bytes", sdist.name, sizes[0], wheel.name, sizes[1])
    if max(sizes) >= 3_000_000:
        session.error("a package has to be smaller than 3 MB")


def sanitizer_env(session: nox.Session, kind: str) -> dict[str, str]:
    """Return the environment variables for Python to run code that is built with a sanitizer."""
    names = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}[kind]
    libraries = [
        str(session.run("g++", f"-print-file-name={name}", external=True, silent=True)).strip()
        for name in names
    ]
    return {
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself keeps memory until the end
        "TSAN_OPTIONS": "halt_on_error=1",
    }


def emulate(session: nox.Session, sanitizer: str = "OFF", source: str = ".") -> dict[str, str]:
    """Compile the CUDA kernels as C++ for the CPU; return environment variables for the tests."""
    command = ("python", "tests/support/emulated_build.py", source, sanitizer)
    built = str(session.run(*command, silent=True)).strip().splitlines()[-1]
    env = {} if sanitizer == "OFF" else sanitizer_env(session, sanitizer)
    return env | {"FASTAMP_EMULATED": built}


@nox.session
def emulated(session: nox.Session) -> None:
    """Run the CUDA kernels on the CPU: all tests of the step, at large; then under sanitizers.

    For the thread sanitizer a block has real threads; it has to find every barrier that is removed.
    Options go to pytest; with any, the sanitizers do not run.
    """
    pytest = ("python", "-I", "-m", "pytest", "-p", "no:cacheprovider", "-q", "-k", "emulated")
    env = emulate(session) | {"FASTAMP_AT_LARGE": "1", "FASTAMP_EXAMPLES": "300"}
    session.run(*pytest, *(session.posargs or ["tests/step"]), env=env)
    if session.posargs:
        return
    played = (*pytest[:-2], "-m", "cuda")  # the tests for a GPU
    session.run(*played, env=emulate(session) | {"FASTAMP_GPU": "emulated"})
    chosen = ("-n", "0", "--capture=sys", "tests/step/test_emulated.py", "-k", "kernels_give")
    for sanitizer in ("address", "thread"):
        session.run(*pytest, *chosen, env=emulate(session, sanitizer))
    barrier = "__syncthreads();"
    for path in sorted(Path("csrc/step").glob("*.cu")):
        parts = path.read_text().split(barrier)
        for i in range(1, len(parts)):
            session.log(f"without barrier {i} of {path}: the thread sanitizer has to report it")
            copy = Path(session.create_tmp(), "without_a_barrier")
            shutil.rmtree(copy, ignore_errors=True)
            for folder in ("csrc", "tests/emulate"):
                shutil.copytree(folder, copy / folder)
            (copy / path).write_text(barrier.join(parts[:i]) + barrier.join(parts[i:]))
            env = emulate(session, "thread", str(copy))
            session.run(*pytest, *chosen, env=env, success_codes=[66], silent=True)


@nox.session
def sanitize(session: nox.Session) -> None:
    """Run the compiled CPU core's tests under the address and undefined-behaviour sanitizers."""
    # The build type keeps the symbols that a report needs.
    options = {"FASTAMP_CUDA": "OFF", "FASTAMP_SANITIZE": "address"}
    folder = install(session, "sanitize-address", "RelWithDebInfo", **options)
    env = sanitizer_env(session, "address")
    env |= {"PYTHONPATH": folder, "PYTHONSAFEPATH": "1", "FASTAMP_BACKEND": "cpu"}
    step = ("clip_and_norm", "equivalence", "lean", "noticed", "skips", "ways")
    chosen = [f"tests/step/test_{name}.py" for name in step]
    chosen += [f"tests/data/test_{name}.py" for name in ("collate", "padding", "gather")]
    chosen += ["tests/timer", "-k"]
    chosen += ["cpu and not worker and not threads and not no_memory and not ranks"]
    # A report ends the process, and with it pytest: file descriptors must not be captured.
    pytest = ("python", "-m", "pytest", "-p", "no:cacheprovider", "--capture=sys", "-q")
    session.run(*pytest, *(session.posargs or chosen), env=env)


@nox.session
def faults(session: nox.Session) -> None:
    """Kill runs and loops, send signals, refuse writes: nothing saved is lost; `-- --help`."""
    script = "tests/support/fault_trials.py"  # its folder is what Python adds to the path
    session.run("python", script, *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html; a warning fails. Options go to Sphinx."""
    built = Path("docs/_build/html")
    shutil.rmtree(built.parent, ignore_errors=True)
    sphinx = ("python", "-I", "-m", "sphinx", "-q", "--fail-on-warning", "--keep-going")
    session.run(
        *sphinx, "-d", str(built.with_name("doctrees")), *session.posargs, "docs", str(built)
    )
    element = r"<(?:script|link|img|iframe)\b[^>]*?\s(?:src|href)=[\"']?"
    asks = re.compile(rf"(?:{element}|@import\s+[\"']?|url\([\"']?)(?:https?:)?//[^\s\"']*")
    for path in (each for each in built.rglob("*") if each.suffix in {".html", ".css", ".js"}):
        if found := asks.search(path.read_text(encoding="utf-8")):
            session.error(f"{path} would ask another host: {found[0]}")
