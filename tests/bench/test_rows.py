"""The rows of the step's table: what each is made of, and its oracle."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import fastamp
from fastamp.bench import loader, step
from fastamp.bench.__main__ import main
from fastamp.bench.race import Plan

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import step_rows

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="no Muon in this torch")
WORK = [pytest.param(n, marks=needs_muon) if "muon" in n else n for n in step_rows.WORK]
COLUMNS = ["race", "arm", "builds", "median ms", "p90 ms", "p99 ms", "GB/s"]
COLUMNS += ["speed-up [95 %]", "of plain [95 %]", "verdict"]
SIZES = [(25, 40), (25, 40), (40, 25), (10,)]


def make_side(work, sizes=SIZES, **options):
    """Return fastamp's side of a row, and the norm of its gradients."""
    row = replace(step_rows.WORK[work], sizes=sizes, **options)
    if row.moments:
        row = replace(row, optimizer=partial(fastamp.AdamW, moments=row.moments))
        grads, norm = step.draw_grads(sizes, "cpu", 0, torch.bfloat16)
        return step_rows.Lean(row, grads), norm
    grads, norm = step.draw_grads(sizes, "cpu", 0, row.dtype)
    return row.side(row, grads), norm


def test_the_rows_of_the_readme_are_raced_unless_some_are_asked_for(monkeypatch, tmp_path):
    assert [*step.ROWS] == [
        *("2000x1000/adamw", "2000x1000/adamw-open", "gpt2/adamw", "gpt2/adamw-open"),
        *("in-a-loop/adamw", "in-a-loop/adamw-open"),
    ]
    tiny = replace(step.ROWS["gpt2/adamw"], sizes=[(10,)] * 3)
    monkeypatch.setitem(step.ROWS, "gpt2/adamw", tiny)
    monkeypatch.setattr(step, "PLAN", Plan(rounds=8, warmup=2, builds=(3,)))
    monkeypatch.setattr(step, "CALLS", 2)
    path = tmp_path / "found.json"
    words = ["step", "--rows", "gpt2/adamw", "gpt2/adamw", "--device", "cpu"]
    assert main([*words, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [list(row) for row in found["table"]] == [COLUMNS] * 3
    assert found["job"]["races"] == ["gpt2/adamw"]
    assert found["notes"][0] == f"gpt2/adamw: {tiny.text}"
    assert list(found["races"]["gpt2/adamw"]["arms"]) == ["torch", "plain", "fastamp"]
    names = {each["name"] for each in found["measurements"]}
    assert {"speedup/gpt2/adamw", "of_plain/gpt2/adamw"} <= names


@pytest.mark.parametrize("name", [name for name in step_rows.WORK if "muon" not in name])
def test_the_plain_pass_moves_what_the_step_has_to_move(name):
    least = {"norm": 4, "clip": 12, "adamw-bf16": 20, "adamw-8bit": 16}
    expected = least.get(name, 32 if name.endswith("zero-grad") else 36) * 3010
    assert step.make_plain(make_side(name)[0])[2] == expected


# The oracle


@pytest.mark.parametrize("way", ["torch", "fastamp"])
@pytest.mark.parametrize("work", WORK)
def test_each_side_agrees_with_plain_arithmetic_not_with_another_norm_or_step(work, way):
    rtol = 1e-3 if way == "torch" else 1e-5
    if way == "torch" and step_rows.WORK[work].moments:
        pytest.skip("torch's side is its AdamW on float32")
    side, norm = make_side(work)
    side.check(getattr(side, way), norm, rtol)
    for factor in (1.1, 1.0):
        side, norm = make_side(work)
        call = getattr(side, way) if factor > 1 else lambda: torch.zeros(())  # takes no step
        with pytest.raises(AssertionError, match="not close"):
            side.check(call, norm * factor, rtol)


@pytest.mark.parametrize("work", ["adamw-bf16", "adamw-8bit"])
def test_fastamps_adamw_is_checked_in_full_precision(work):
    side, norm = make_side(work)
    side.optimizer.param_groups[0]["exact"] = False  # its weights are rounded to bfloat16
    with pytest.raises(AssertionError, match="not close"):
        side.check(side.fastamp, norm, 1e-5)


@needs_muon
def test_muons_step_is_held_to_products_in_full_precision(monkeypatch):
    monkeypatch.setattr(step_rows, "PRODUCTS_RTOL", 1e-4)
    side, norm = make_side("muon")
    with pytest.raises(AssertionError, match="products are not close"):
        side.check(side.fastamp, norm, 1e-5)


def test_gradients_that_are_left_where_they_should_be_consumed_are_an_error(monkeypatch):
    side, norm = make_side("adamw-zero-grad")
    monkeypatch.setattr(side.optimizer, "zero_grad", lambda: None)
    with pytest.raises(AssertionError, match="a gradient is left"):
        side.check(side.torch, norm, 1e-3)


def test_every_call_has_gradients_to_clip():
    side, norm = make_side("adamw-zero-grad")
    for _ in range(3):
        side.before()
        grads = [parameter.grad.flatten() for parameter in side.parameters]
        assert torch.cat(grads).double().norm().item() == pytest.approx(norm)
        side.fastamp()
        assert all(parameter.grad is None for parameter in side.parameters)


def test_a_step_in_a_loop_follows_a_pass_of_torch_on_the_next_rows():
    row = step.ROWS["in-a-loop/adamw"]
    side = step.Looped(row, step.draw_grads(row.sizes, "cpu", 0)[0])
    assert [p.shape for p in side.parameters] == [*map(torch.Size, row.sizes)]
    assert side.parameters[0].abs().max() <= 64**-0.5  # of a model that trains
    seen = []
    for _ in range(2):
        side.before()
        seen.append([p.grad.clone() for p in side.parameters])
        weights = [p.detach().clone() for p in side.parameters]
        side.fastamp()
        assert not any(map(torch.equal, weights, side.parameters))
    assert not torch.equal(seen[0][0], seen[1][0])
    case = row.make_case("cpu", 0)
    for arm, call in case.arms.items():
        case.before(arm)
        call()


# The loader's data


def test_the_batches_of_every_arm_are_those_of_default_collate():
    data = {name: (size, make()) for name, (_, size, make) in loader.DATA.items()}
    for size, dataset in data.values():
        for batches in loader.make_arms(dataset, size, "cpu", 0).values():
            assert loader.check(batches, dataset) > 0
    size, dataset = data["tensors"]
    batches = loader.make_arms(dataset, size, "cpu", 0)["plain"]
    rows = torch.cat([batch[1].clone() for batch in batches()])
    assert len({*rows.tolist()}) == len(rows) == len(dataset) // size * size
    with pytest.raises(AssertionError, match="not equal"):
        loader.check(lambda: ([x + 1, y] for x, y in batches()), dataset)


def test_a_loader_whose_batches_are_missing_or_come_twice_is_not_timed(monkeypatch):
    monkeypatch.setattr(loader, "with_fastamp", lambda *_: [])
    monkeypatch.setattr(loader, "DATA", {"dicts": loader.DATA["dicts"]})
    with pytest.raises(AssertionError, match="batches are missing"):
        main(["loader", "--device", "cpu"])
    _, size, make = loader.DATA["dicts"]
    first = next(loader.make_arms(dataset := make(), size, "cpu", 0)["torch"]())
    with pytest.raises(AssertionError, match="batches are missing"):
        loader.check(lambda: iter([first] * 3), dataset)
