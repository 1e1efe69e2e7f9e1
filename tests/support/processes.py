"""Fresh processes, for what can be tested only once in a process.

They fork from a server that has imported torch and the modules that torch imports at the first
optimizer, which together take 3 seconds; fastamp is not imported there.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo"])
LIMIT_S = 240.0  # after which a process that hangs is killed
PATIENCE_S = 5.0  # for processes that are about to end


class Finished(NamedTuple):
    """A process that ended, and the names of its processes that were still alive."""

    returncode: int
    stdout: str
    stderr: str
    survivors: list[str]


def _run(
    code: str, arguments: tuple[str, ...], cwd: Path, env: dict[str, str], folder: Path
) -> None:
    os.setsid()
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        with (folder / name).open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    faulthandler.enable()  # for what hangs
    multiprocessing.set_start_method(None, force=True)  # Python's own, not how this one started
    os.chdir(cwd)
    os.environ.update(env)
    sys.argv[1:] = arguments
    # multiprocessing leaves out what an interpreter calls at its end.
    atexit._clear()
    try:
        exec(code, {"__name__": "__main__"})  # noqa: S102
    finally:
        atexit._run_exitfuncs()


def run_python(code: str, *arguments: str, cwd: Path = TESTS, **env: str) -> Finished:
    """Run code in a process and a session of its own; the folder holds no fastamp.

    Processes of it that survive are killed.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        process = CONTEXT.Process(target=_run, args=(code, arguments, cwd, env, folder))
        process.start()
        process.join(LIMIT_S)
        if process.is_alive():
            os.kill(process.pid, signal.SIGABRT)  # faulthandler then prints where it hangs
            process.join()
        end_s = time.monotonic() + PATIENCE_S
        while (survivors := _session(process.pid)) and time.monotonic() < end_s:
            time.sleep(0.05)
        for pid in survivors:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        out, err = ((folder / name).read_text() for name in ("out", "err"))
        return Finished(process.exitcode, out, err, [*survivors.values()])


def _session(leader: int) -> dict[int, str]:
    """Return the living processes of a session."""
    names = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().rpartition(")")
        except OSError:  # it has just ended
            continue
        state, _, _, session = rest.split()[:4]
        if int(session) == leader and state != "Z":
            names[int(folder.name)] = name
    return names
