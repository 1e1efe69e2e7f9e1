"""Run the tests that need a GPU: a process for each file, four at a time, each under a limit.

    python benchmarks/gpu_tests.py                 # every file with such tests; --limit S in all
    python benchmarks/gpu_tests.py tests/step/test_captures.py

On stdout is a line of JSON for each test as soon as it has run, and one for each file; what pytest
prints goes to stderr. A file that takes too long gets Ctrl-C, and is killed if that does not help.
Hypothesis draws the same examples each time and does not shrink them, and a warning is an error
only in fastamp's own modules.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
OPTIONS = ["-c", str(ROOT / "pyproject.toml"), "-q", "-m", "cuda", "-p", "no:cacheprovider"]
# Those of pyproject.toml, but not those of pytest-xdist, which need not be installed.
OPTIONS += ["-o", "addopts=-rfE --strict-markers --strict-config --import-mode=importlib"]
OPTIONS += ["--continue-on-collection-errors"]
ENDS = {0: "passed", 1: "failed", 5: "no tests"}  # by pytest's exit status
FIRST = ["step", "timer", "data", "train"]  # folders, in the order of what they tell


class Lines:
    """A plugin of pytest that prints a line for each test, and sets what the options cannot."""

    def __init__(self, out: Any, file: str = "") -> None:
        self.out, self.file = out, file

    def pytest_configure(self, config: pytest.Config) -> None:
        """Set warnings and hypothesis, if it is installed, before a test is imported."""
        for line in ("default", "error::Warning:fastamp"):
            config.addinivalue_line("filterwarnings", line)
        with contextlib.suppress(ImportError):
            from hypothesis import Phase, settings  # noqa: PLC0415 - it may be missing

            phases = [Phase.explicit, Phase.generate]
            settings.register_profile("gpu", phases=phases, derandomize=True, database=None)
            settings.load_profile("gpu")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a test's outcome."""
        if report.when == "call" or not report.passed:
            self.say(report, report.nodeid.partition("::")[2])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Print a file that cannot be imported, or that a missing package skips."""
        if not report.passed:
            self.say(report, "the whole file")

    def say(self, report: Any, test: str) -> None:
        """Print a line."""
        file = self.file or report.nodeid.partition("::")[0]
        line = {"file": file, "test": test, "outcome": report.outcome}
        if isinstance(report.longrepr, tuple):
            line["why"] = str(report.longrepr[2])[:200]
        elif report.longrepr is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            line["why"] = str(getattr(crash, "message", report.longrepr))[:500]
        print(json.dumps(line), file=self.out, flush=True)


def run_one(file: str) -> int:
    """Run the tests of a file in this process."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        return int(pytest.main([*OPTIONS, file], plugins=[Lines(out, file)]))


def collect() -> list[str]:
    """Return the files with tests that need a GPU, those of the step first."""
    found = io.StringIO()
    with contextlib.redirect_stdout(found):
        pytest.main([*OPTIONS, "--collect-only", "-qq"], plugins=[Lines(sys.stderr)])
    files = [line.rpartition(":")[0] for line in found.getvalue().splitlines() if "::" not in line]
    files = [file for file in files if file.endswith(".py")]
    order = {name: place for place, name in enumerate(FIRST)}
    return sorted(files, key=lambda file: (order.get(Path(file).parent.name, len(order)), file))


class Runner:
    """Runs files in processes of their own until its time is up."""

    def __init__(self, limit_s: float, each_s: float, patience_s: float) -> None:
        self.end_s, self.each_s = time.monotonic() + limit_s, each_s
        self.patience_s = patience_s

    def stop(self, *_: object) -> None:
        """Let what runs end now; a handler of signals."""
        self.end_s = 0.0

    def run(self, file: str) -> bool:
        """Run a file and print its line; say whether its tests passed."""
        begin_s = time.monotonic()
        if begin_s + 1 > self.end_s:
            print(json.dumps({"file": file, "end": "left out: no time"}), flush=True)
            return False
        command = [sys.executable, __file__, "--one", file]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        while process.poll() is None and time.monotonic() < min(begin_s + self.each_s, self.end_s):
            time.sleep(0.05)
        is_cut = process.poll() is None
        if is_cut:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.patience_s)
        with contextlib.suppress(ProcessLookupError):  # and what its tests have started
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        end = "cut short" if is_cut else ENDS.get(status, f"ended with {status}")
        line = {"file": file, "end": end, "s": round(time.monotonic() - begin_s, 1)}
        print(json.dumps(line), flush=True)
        return end in {"passed", "no tests"}


def main(words: Sequence[str] | None = None) -> int:
    """Run the files; return 1 if one of them failed, or did not run to its end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="S", help="of all files")
    parser.add_argument("--each", type=float, default=90.0, metavar="S", help="of a file")
    parser.add_argument("--patience", type=float, default=8.0, metavar="S", help="after Ctrl-C")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="processes")
    parser.add_argument("--one", metavar="FILE", help="run a file in this process")
    args = parser.parse_args(words)
    os.chdir(ROOT)
    if args.one:
        return run_one(args.one)
    # A shell's background job ignores Ctrl-C, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runner = Runner(args.limit, args.each, args.patience)
    signal.signal(signal.SIGTERM, runner.stop)
    with ThreadPoolExecutor(args.at_once) as pool:
        passed = [*pool.map(runner.run, args.files or collect())]
    return int(not passed or not all(passed))


if __name__ == "__main__":
    sys.exit(main())
