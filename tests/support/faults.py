"""Programs that are struck by faults: killed, interrupted, or refused by the disk, at a given call.

`Server` forks them from a process that has imported torch and fastamp, with the shim of
`fault_shim.cpp` between them and the C library.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from support import power_loss

TESTS = Path(__file__).parents[1]
SOURCE = Path(__file__).with_name("fault_shim.cpp")
KINDS = {"none": 0, "kill": 1, "power": 1, "fail": 2, "full": 3, "signal": 4, "delay": 0}
LIMIT_S = 120.0  # for one program
GRACE_S = 20.0  # for the other ranks of one that has been killed


@dataclass(frozen=True)
class Fault:
    """What happens to a program at its `at`-th call that changes its folder.

    "kill" ends the process, "power" all ranks, and what was not synced is lost; "fail" lets
    `length` calls from this one on fail with the error `number`, "full" those of them that need
    space; "signal" sends `number` at this call, "delay" after `delay_s` seconds. With `cut` a write
    that is struck first has written some of its bytes; after "power" all names are there, and of
    the files only what was synced.
    """

    kind: str = "none"
    at: int = 0
    number: int = 0
    length: int = 1
    cut: bool = False
    delay_s: float = 0.0
    rank: int = 0


@dataclass(frozen=True)
class Ran:
    """The outcome of a program."""

    codes: list[int]
    """Of each rank: the exit status, negative for a signal."""
    reports: list[list[Any]]
    """What the program has reported, of all ranks, in order."""
    struck: str
    """The call that was struck, or ""."""
    err: str
    elapsed_s: float

    def said(self, word: str) -> list[Any]:
        """Return what was reported under a word."""
        return [what[1] for what in self.reports if what[0] == word]

    def calls_of(self, rank: int) -> int:
        """Return how many calls of a rank that ended well have changed the folder."""
        return dict(self.said("calls"))[rank]


def build_shim(folder: Path) -> Path:
    """Compile the shim; raise FileNotFoundError where there is no compiler."""
    library = folder / "fault_shim.so"
    compiler = [os.environ.get("CXX") or "g++", "-std=c++17", "-O1", "-fPIC", "-shared"]
    subprocess.run([*compiler, "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


class Server:
    """A process that has everything imported, and forks programs; a context manager."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules

    def __enter__(self):
        temporary = Path(tempfile.gettempdir()).resolve()
        if any(sign in str(temporary) for sign in " :"):  # which separate names in LD_PRELOAD
            temporary = Path("/tmp")  # noqa: S108
        self._folder = Path(tempfile.mkdtemp(prefix="faults", dir=temporary))
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        env["LD_PRELOAD"] = str(build_shim(self._folder))
        ours, theirs = Pipe()
        code = "import sys; from support.faults import serve; serve(int(sys.argv[1]), sys.argv[2:])"
        args = [sys.executable, "-c", code, str(theirs.fileno()), *self._modules]
        fds = (theirs.fileno(),)
        self._process = subprocess.Popen(args, env=env, cwd=TESTS, pass_fds=fds)
        theirs.close()
        self._connection = ours
        return self

    def __exit__(self, *_):
        self._connection.close()
        self._process.wait(LIMIT_S)
        shutil.rmtree(self._folder)

    def run(
        self, program: str, folder: Path, *args: Any, fault: Fault = Fault(), ranks: int = 0
    ) -> Ran:
        """Run `program`, "module:function", as `function(folder, *args)`.

        With `ranks` it runs that often, in one process group of torch.distributed.
        """
        folder = folder.resolve()
        before = power_loss.read(folder) if fault.kind == "power" else None
        with tempfile.TemporaryDirectory(dir=self._folder) as room:
            self._connection.send((program, folder, args, fault, ranks, room))
            codes, elapsed_s = self._connection.recv()
            journal = Path(room, "journal")
            lines = journal.read_text().splitlines() if journal.exists() else []
            struck = next((line.split("\t")[1] for line in lines if line.startswith("struck")), "")
            if before is not None and struck:
                seed = f"{fault}{len(lines)}"
                rng = random.Random(seed)
                power_loss.lose(folder, before, journal, rng, contents=fault.cut)
            reports = _read_reports(Path(room, "reports"))
            err = "\n".join(path.read_text() for path in sorted(Path(room).glob("err*")))
            return Ran(codes, reports, struck, err, elapsed_s)


def _read_reports(path: Path) -> list[list[Any]]:
    reports = []
    with path.open("rb") as file, suppress(EOFError):
        while True:
            reports.append(pickle.load(file))
    return reports


_reports = -1


def report(*what: Any) -> None:
    """Report something to the harness, which gets it whatever happens to this program."""
    os.write(_reports, pickle.dumps(list(what)))


def serve(descriptor: int, modules: list[str]) -> None:
    """Fork programs until the connection is closed."""
    os.environ.pop("LD_PRELOAD")
    for name in modules:
        importlib.import_module(name)
    connection = Connection(descriptor)
    while True:
        try:
            program, folder, args, fault, ranks, room = connection.recv()
        except EOFError:
            return
        Path(room, "reports").touch()
        start_s = time.monotonic()
        pids: list[int] = []
        for rank in range(ranks or 1):
            pid = os.fork()
            os.setpgid(pid, pids[0] if pids else pid)  # in parent and child: either may be first
            if pid == 0:
                connection.close()
                _run_program(program, folder, args, fault, rank, ranks, Path(room))
            pids.append(pid)
        codes = _wait(pids, fault, start_s)
        connection.send((codes, time.monotonic() - start_s))


def _wait(pids: list[int], fault: Fault, start_s: float) -> list[int]:
    """Wait for the ranks, send a delayed signal, and end the others soon after a kill."""
    codes: dict[int, int] = {}
    end_s, is_due = start_s + LIMIT_S, fault.kind == "delay"
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] == -signal.SIGKILL:
                    end_s = min(end_s, time.monotonic() + GRACE_S)
        now_s = time.monotonic()
        if is_due and now_s >= start_s + fault.delay_s:
            is_due = False
            if pids[fault.rank] not in codes:
                os.kill(pids[fault.rank], fault.number)
        if now_s > end_s:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGABRT)
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def _run_program(
    program: str, folder: Path, args: tuple, fault: Fault, rank: int, ranks: int, room: Path
) -> None:
    """Run a program in this process, and exit as Python does."""
    global _reports  # noqa: PLW0603 - of this process
    code = 1
    try:
        err = os.open(room / f"err{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(err, 1)
        os.dup2(err, 2)
        _reports = os.open(room / "reports", os.O_WRONLY | os.O_APPEND)
        module, _, name = program.partition(":")
        function = getattr(importlib.import_module(module), name)
        shim = ctypes.CDLL(None)
        kind = KINDS[fault.kind] if rank == fault.rank else 0
        journal, number = os.fsencode(room / "journal"), fault.number
        if fault.kind == "power":
            number = 1  # all
        at, length = ctypes.c_long(fault.at), ctypes.c_long(fault.length)
        shim.faults_arm(os.fsencode(folder), journal, kind, at, length, number, fault.cut)
        if ranks:
            from support.ranks import joined

            with joined(rank, ranks, str(room / "store")):
                function(folder, *args)
        else:
            function(folder, *args)
        report("calls", (rank, shim.faults_calls()))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 - its text is what is wanted
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
