"""Every example runs as its docstring says, and learns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.processes import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"nanogpt": "torch", "image_classifier": "sklearn", "train_gpt": "torch"}
NEEDS |= {"lightning_gpt": "lightning", "accelerate_gpt": "accelerate"}
SMALL = ["--layers", "1", "--heads", "2", "--width", "32", "--block-size", "32", "--lr", "0.01"]
SMALL += ["--steps", "80", "--checkpoint-every", "30"]
ARGUMENTS = {"train_gpt": SMALL}
SCRIPT = """
import runpy, warnings
warnings.simplefilter("error")
# Lightning 2.6 asks torch 2.13's pytree in the way of torch 2.6, and wants workers on many cores
warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.`", FutureWarning)
warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")
runpy.run_path({path!r}, run_name="__main__")
"""


def run(name, *arguments, **options):
    result = run_python(SCRIPT.format(path=str(EXAMPLES / f"{name}.py")), *arguments, **options)
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_learns(name, tmp_path):
    pytest.importorskip(NEEDS[name])
    result = run(name, *ARGUMENTS.get(name, ()), cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", result.stdout)]
    assert len(losses) >= 5
    # nanogpt.py trains twice
    runs = [losses[:6], losses[6:]] if name == "nanogpt" else [losses]
    assert all(run[-1] < 0.7 * run[0] for run in runs), result.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_gpt_resumes_and_can_be_trained_longer(tmp_path):
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 300)
    arguments = ["--data", str(text), *SMALL, "--checkpoint-dir", str(tmp_path / "run")]
    first = run("train_gpt", *arguments).stdout
    assert "80 steps in 32-true, 0 skipped\ntrain_loss: 5." in first
    assert float(re.search("val_loss: .* to ([0-9.]+)", first)[1]) < 3
    longer = run("train_gpt", *arguments, "--steps", "90")
    assert "90 steps in 32-true" in longer.stdout
    assert "resumed at step 80 of 90" in longer.stderr
