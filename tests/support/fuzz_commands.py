"""Fuzzed: the bench's baselines, and the options of the commands."""

from __future__ import annotations

import io
import json
import random
import re
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.fuzz import Target
from support.fuzz_values import PLAIN, damage, mutate

from fastamp.bench import __main__ as bench
from fastamp.bench import latency
from fastamp.bench import step as bench_step
from fastamp.bench.race import Interval
from fastamp.bench.record import Measurement, Report, make_record


class Baseline(Target):
    """A changed baseline is compared, or refused in one line with status 2 or 3."""

    errors = (SystemExit,)
    words = ("speedup/a", "step_time", "memory")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        figure = Interval(value=2.0, low=1.8, high=2.2)
        figures = [Measurement(name=name, interval=figure) for name in self.words]
        report = Report(table=[{"arm": "x", "ms": "1"}], measurements=figures)
        environment = bench.describe("cpu")
        job = {"sizes": [1, 2], "name": "x", "shape": {"layers": 1}}
        self.stack = ExitStack()
        patch = self.stack.enter_context
        patch(mock.patch.object(bench, "describe", return_value=environment))
        # A parser of one command is made in a sixth of the time.
        patch(mock.patch.dict(bench.COMMANDS, {"step": bench_step}, clear=True))
        made = (job, lambda: report)
        patch(mock.patch.object(bench_step, "prepare", return_value=made))
        run = {"command": "step", "environment": environment, "job": job}
        self.valid = json.loads(json.dumps(make_record(report, run)))

    def make(self, rng: random.Random) -> Any:
        how = rng.random()
        value = mutate(self.valid, rng, PLAIN) if how < 0.8 else self.valid
        data = json.dumps(value, default=str, skipkeys=True).encode()
        data = damage(data, rng) if how > 0.7 else data
        bounds = [f"{name}:{rng.choice('+-')}5%" for name in self.words if rng.random() < 0.7]
        return data, [word for bound in bounds for word in ("--fail-on", bound)]

    def load(self, subject: None, given: Any) -> Any:
        path = self.folder / "baseline.json"
        path.write_bytes(given[0])
        self.said = io.StringIO()
        with redirect_stderr(self.said), redirect_stdout(io.StringIO()):
            return bench.main(["step", "--baseline", str(path), *given[1]])

    def use(self, subject: None, given: Any, loaded: Any) -> None:
        said = self.said.getvalue()
        assert loaded in {0, 1, 3} or ": error: argument --fail-on" in said, loaded
        assert loaded != 3 or "no verdict" in said or given[1]

    def is_clear(self, error: BaseException) -> bool:
        last = self.said.getvalue().rstrip("\n").rpartition("\n")[2]
        return getattr(error, "code", None) == 2 and ": error: argument --" in last

    def close(self) -> None:
        self.stack.close()


PLAIN_WORDS = """0 1 2 4 5 -1 16 64 0.5 1e-3 nan inf -inf 1e400 x x,y 1,2 , 1_0 5% 0x10 cpu cuda mps
meta cuda:99 / /dev/null /nonexistent/file . - -- = x:-5% speedup/a:-5% fp16 bf16 32-true 16-mixed
ddp fsdp sys:exit os.py:make nothing:make"""
WORDS = [*PLAIN_WORDS.split(), "", "9" * 400, "x" * 10_000, "\ud800", "\0", "\u0663", "1 2"]


class BenchOptions(Target):
    """The bench's command line is parsed, or refused in one line that names the option."""

    errors = (SystemExit,)
    commands = (*bench.COMMANDS,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stack = ExitStack()
        self.patch()
        self.options = {name: self.find_options([name, "--help"]) for name in self.commands}

    def patch(self) -> None:
        self.stack.enter_context(
            mock.patch.object(latency, "GPT", return_value=torch.nn.Linear(1, 1))
        )

    def find_options(self, words: list[str]) -> list[str]:
        said = io.StringIO()
        with redirect_stdout(said):
            try:
                self.call(words)
            except SystemExit:
                return sorted({*re.findall(r"--[a-z][a-z-]+", said.getvalue())} - {"--help"})
        raise AssertionError(words)

    def make(self, rng: random.Random) -> list[str]:
        name = rng.choice(self.commands)
        words = [name] if name in self.commands and rng.random() < 0.95 else []
        for _ in range(rng.randrange(6)):
            option = rng.choice(self.options[name])
            value = rng.choice(WORDS)
            joined = (
                f"{option}={value.removeprefix('--')}"  # argparse drops "--" before Python 3.13
            )
            words += rng.choice(([option, value], [option, value], [joined], [option]))
        if rng.random() < 0.1:
            words.insert(rng.randrange(len(words) + 1), rng.choice(WORDS))
        return words

    def call(self, words: list[str]) -> Any:
        named = [name for name in self.commands if name in words[:1]] or self.commands
        chosen = {name: bench.COMMANDS[name] for name in named}
        with mock.patch.dict(bench.COMMANDS, chosen, clear=True):
            return bench._parse(words)

    def load(self, subject: None, given: list[str]) -> Any:
        self.said = io.StringIO()
        with redirect_stderr(self.said), redirect_stdout(io.StringIO()):
            return self.call(list(given))

    def use(self, subject: None, given: Any, loaded: Any) -> None:
        job, measure = loaded[1]
        json.dumps(job)
        assert callable(measure)

    def is_clear(self, error: BaseException) -> bool:
        last = self.said.getvalue().rstrip("\n").rpartition("\n")[2]
        code = getattr(error, "code", None)
        return code == 0 or (code == 2 and ": error: " in last and len(last) > 30)

    def close(self) -> None:
        self.stack.close()


TARGETS = {
    "baseline": Baseline,
    "bench_options": BenchOptions,
}
