"""Every example runs as its docstring says, and learns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.processes import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "nanogpt": "torch",
    "image_classifier": "sklearn",
    "fine_tune": "torch",
    "lightning_gpt": "lightning",
    "accelerate_gpt": "accelerate",
}
SCRIPT = """
import runpy, warnings
warnings.simplefilter("error")
# Lightning 2.6 asks torch 2.13's pytree in the way of torch 2.6, and wants workers on many cores
warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.`", FutureWarning)
warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_learns(name, tmp_path):
    pytest.importorskip(NEEDS[name])
    result = run_python(SCRIPT.format(path=str(EXAMPLES / f"{name}.py")), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", result.stdout)]
    assert len(losses) >= 5
    # nanogpt.py trains twice
    runs = [losses[:6], losses[6:]] if name == "nanogpt" else [losses]
    assert all(run[-1] < 0.7 * run[0] for run in runs), result.stdout
    assert list(tmp_path.iterdir()) == []
