"""Every example runs as its docstring says, and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "nanogpt": "torch",
    "image_classifier": "sklearn",
    "fine_tune": "torch",
    "lightning_gpt": "lightning",
    "accelerate_gpt": "accelerate",
}
# Lightning 2.6 asks torch 2.13's pytree in the way of torch 2.6
ALLOWED = "ignore:`isinstance(treespec, LeafSpec)`:FutureWarning"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_learns(name, tmp_path):
    pytest.importorskip(NEEDS[name])
    script = EXAMPLES / f"{name}.py"
    command = [sys.executable, "-I", "-W", "error", "-W", ALLOWED, script]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", result.stdout)]
    assert len(losses) >= 5
    # nanogpt.py trains twice
    runs = [losses[:6], losses[6:]] if name == "nanogpt" else [losses]
    assert all(run[-1] < 0.7 * run[0] for run in runs), result.stdout
    assert list(tmp_path.iterdir()) == []
