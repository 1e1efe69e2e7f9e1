"""Write into docs/start/worth-it.md what the bench prints of the programs beside this file.

`python tests/support/strangers/show.py`, five minutes: on a quiet machine, or no verdict is shown.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "start" / "worth-it.md"
NAMES = ("graph", "segmentation", "transformer")
BEGIN = "```text\n$ python -m fastamp.bench graph.py\n"


def main():
    shown = []
    for name in NAMES:
        words = [sys.executable, "-m", "fastamp.bench", f"{name}.py", "--device", "cpu"]
        env = {**os.environ, "PYTHONSAFEPATH": "1"}  # the installed package
        done = subprocess.run(words, cwd=HERE, env=env, capture_output=True, text=True, check=True)
        shown.append(f"$ python -m fastamp.bench {name}.py\n{done.stdout}")
    write("\n".join(shown))


def write(text):
    before, _, rest = PAGE.read_text().partition(BEGIN)
    assert rest, f"{PAGE} has no such block"
    PAGE.write_text(f"{before}```text\n{text}```{rest.partition('```')[2]}")


if __name__ == "__main__":
    main()
