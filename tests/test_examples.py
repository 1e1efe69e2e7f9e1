"""Every example runs as its docstring says, and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {
    "accelerate_gpt": "accelerate",
    "image_classifier": "sklearn",
    "lightning_gpt": "lightning",
}
# Lightning 2.6 asks torch 2.13's pytree in the way of torch 2.6
ALLOWED = "ignore:`isinstance(treespec, LeafSpec)`:FutureWarning"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_learns(path, tmp_path):
    pytest.importorskip(NEEDS.get(path.stem, "fastamp"))
    command = [sys.executable, "-I", "-W", "error", "-W", ALLOWED, path]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", result.stdout)]
    assert len(losses) >= 5
    # nanogpt.py trains twice
    runs = [losses[:6], losses[6:]] if path.stem == "nanogpt" else [losses]
    assert all(run[-1] < 0.7 * run[0] for run in runs), result.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_examples_are_five():
    names = ["accelerate_gpt", "fine_tune", "image_classifier", "lightning_gpt", "nanogpt"]
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == names
