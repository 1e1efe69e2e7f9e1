"""The soak of `nox -s soak`, for some seconds."""

from __future__ import annotations

from pathlib import Path

from support.processes import run_python

SOAK = str(Path(__file__).parents[1] / "support" / "soak.py")
RUN = f"""
import runpy, sys
sys.argv[0] = {SOAK!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_some_seconds_of_the_soak_are_flat():
    options = {"minutes": "0.03", "samples": "8", "memory-mib": "20", "seed": "1"}
    done = run_python(
        RUN, *[word for name, value in options.items() for word in (f"--{name}", value)]
    )
    assert done.returncode == 0, done.stdout + done.stderr
