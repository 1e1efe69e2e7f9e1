"""Processes of their own, for what one process can show only once.

They fork from a server that has imported torch and the modules that torch imports at the first
optimizer, which together take 3 seconds; fastamp is not imported there.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo"])
LIMIT_S = 240  # after which a process that hangs is killed


def _run(code: str, cwd: Path, env: dict[str, str], folder: str) -> None:
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        with Path(folder, name).open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(cwd)
    os.environ.update(env)
    # multiprocessing leaves out what an interpreter calls at its end.
    atexit._clear()
    try:
        exec(code, {"__name__": "__main__"})  # noqa: S102
    finally:
        atexit._run_exitfuncs()


def run_python(code: str, *, cwd: Path = TESTS, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own; the folder holds no fastamp."""
    with tempfile.TemporaryDirectory() as folder:
        process = CONTEXT.Process(target=_run, args=(code, cwd, env, folder))
        process.start()
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(code, process.exitcode, out, err)
