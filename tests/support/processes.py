"""Fresh interpreters, for what one process can show only once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, in a folder that holds no fastamp."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=TESTS,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
