"""The rows of the step's table: what each is made of, and its oracle."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from contextlib import nullcontext

import pytest
import torch

import fastamp
from fastamp.bench import latency, loader, step
from fastamp.bench.__main__ import main
from fastamp.bench.race import Plan
from fastamp.bench.rows import NAMED, ROWS, WORK, parse_shapes

LEAN = {"adamw-bf16": "bfloat16", "adamw-8bit": "8bit"}
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="no Muon in this torch")
WITHOUT_MUON = [name for name in WORK if not name.startswith("muon")]
EACH = [*WITHOUT_MUON, *(pytest.param(n, marks=needs_muon) for n in WORK if n.startswith("muon"))]
COLUMNS = ["race", "arm", "builds", "median ms", "GB/s", "speed-up [95 %]", "of plain [95 %]"]
COLUMNS += ["verdict"]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return what races briefly, and gives the rows."""
    monkeypatch.setattr(step, "PLAN", Plan(rounds=8, warmup=2, builds=(3,)))
    monkeypatch.setattr(step, "CALLS", 2)

    def run(*words):
        path = tmp_path / "found.json"
        assert main(["step", "--device", "cpu", "--json", str(path), *words]) == 0
        return json.loads(path.read_text())

    return run


def make_side(work, **options):
    """Return a side, and the norm of its gradients."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(25, 40, generator=generator) for _ in range(3)]
    return step.Side(work, grads, **options), torch.cat(grads).double().norm().item()


def test_the_rows_that_the_readme_shows_are_raced_unless_others_are_asked_for():
    args = argparse.Namespace(shapes=None, work=None, seed=0)
    job, _ = step.prepare(args)
    for shape, with_what in (
        ("gpt2", ("", "-zero-grad")),
        *((shape, ("",)) for shape in ("192x130208", "465gx60000", "2000x1000", "465gx1000")),
        ("192x130208-bf16", ("",)),
        ("network", ("-no-scaler",)),
        ("lora", ("-no-scaler",)),
    ):
        names = [f"{shape}/{kind}{end}" for end in with_what for kind in ("adamw", "adamw-open")]
        found = {race for race in job["races"] if race.startswith(f"{shape}/adamw")}
        lean = {f"{shape}/{work}" for work in LEAN}
        assert found == {*names, *(lean if shape == "gpt2" else ())}
    muon = {f"{shape}/muon" for shape in ("gpt2", "width128", "width384", "vit-tiny")}
    muon = muon | {"width128/muon-open"} if hasattr(torch.optim, "Muon") else set()
    assert {race for race in job["races"] if "/muon" in race} == muon
    lean = {f"2000x64x64/{work}" for work in LEAN}
    assert set(job["races"]) > {"gpt2/norm", "gpt2/clip", "2000x1000/norm", *lean}


@pytest.mark.parametrize(
    ("name", "count", "numel", "text"),
    [
        ("gpt2", 148, 124_439_808, "GPT-2, 124 M in 148 tensors"),
        ("192x130208", 192, 24_999_936, "192 tensors of 130,208"),
        ("192x130208-bf16", 192, 24_999_936, "192 tensors of 130,208, bfloat16"),
        ("465gx60000", 465, 27_900_000, "465 groups of 60,000"),
        ("2000x1000", 2000, 2_000_000, "2,000 tensors of 1,000"),
        ("2000x64x64", 2000, 8_192_000, "2,000 tensors of 64 x 64"),
        ("465gx1000", 465, 465_000, "465 groups of 1,000"),
        ("width128", 172, 2_428_672, "12 layers of width 128 with 72 matrices"),
        ("width384", 172, 21_441_792, "12 layers of width 384 with 72 matrices"),
        ("vit-tiny", 152, 5_717_416, "ViT-tiny, 5.7 M with 48 matrices"),
        ("network", 6, 4610, "6 tensors, a 4-64-64-2 network"),
        ("lora", 32, 10_000, "32 LoRA matrices, 10,000 in all"),
    ],
)
def test_a_shape_is_what_its_text_says(name, count, numel, text):
    assert {*NAMED, "465gx1000"} < set(ROWS)
    shape = parse_shapes(name)[name]
    assert (len(shape.sizes), sum(map(math.prod, shape.sizes)), shape.text) == (count, numel, text)
    assert shape.grouped == ("group" in text)
    assert shape.dtype == (torch.bfloat16 if "bfloat16" in text else torch.float32)


def test_what_is_named_twice_is_raced_once():
    args = argparse.Namespace(
        shapes=parse_shapes("1x1,1x1"), work=["norm", "norm"], seed=0, precision="bf16"
    )
    assert step.prepare(args)[0]["races"] == ["1x1/norm"]
    args.data, args.batch_sizes, args.device = ["slow", "slow"], [1, 2, 1], "cpu"
    assert loader.prepare(args)[0]["data"] == ["slow"]
    latency_job, _ = latency.prepare(args)
    assert latency_job["batch_sizes"] == ["1", "2"]


@pytest.mark.parametrize("shape", ["1x9999999999999", "9999999999999gx1", "1x" + "9" * 30])
def test_more_elements_than_a_machine_holds_are_a_bad_argument(shape, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["step", "--shapes", shape])
    assert exit_.value.code == 2
    assert f"argument --shapes: '{shape}' has more than" in capsys.readouterr().err


def test_groups_have_one_parameter_each():
    grouped = make_side(WORK["adamw"], grouped=True)[0].optimizer.param_groups
    assert [len(group["params"]) for group in grouped] == [1, 1, 1]
    assert len(make_side(WORK["adamw"])[0].optimizer.param_groups) == 1


@pytest.mark.parametrize("name", EACH)
def test_a_name_says_which_optimizer_steps_with_what(name):
    work, parameter = WORK[name], torch.nn.Parameter(torch.ones(2))
    defaults = work.optimizer([{"params": [parameter]}], lr=1e-4).defaults
    ends = name in LEAN or name.startswith("muon")  # in zero_grad, and without a scaler
    assert defaults["fused"] is (True if "fused" in work.text else None)
    assert defaults["foreach"] is None
    assert ("fused" in work.text) == (name.startswith(("adamw", "muon")) and "open" not in name)
    assert work.zero_grad == ("zero_grad" in work.text) == (name.endswith("zero-grad") or ends)
    assert work.scaler != ("no scaler" in work.text)
    assert work.scaler != (name.endswith("no-scaler") or ends)
    kind = "Muon" if name.startswith("muon") else "SGD" if defaults.get("momentum") else "AdamW"
    assert [type(each).__name__ for each in make_side(work)[0].optimizers] == [kind]


@pytest.mark.parametrize("name", WITHOUT_MUON)
def test_the_plain_pass_moves_what_the_work_has_to_move(name):
    least = {"norm": 4, "clip": 12, "sgd": 28, "adamw-bf16": 20, "adamw-8bit": 16}
    least = least.get(name, 32 if name.endswith("zero-grad") else 36)
    side, _ = make_side(WORK[name])
    if name in LEAN:
        side = step.Side(WORK[name], [grad.bfloat16() for grad in side.drawn])
    assert step._make_plain(side)[2] == least * 3000


# The oracle


@pytest.mark.parametrize("work", EACH)
@pytest.mark.parametrize("side", ["torch", "fastamp"])
def test_work_that_is_not_done_is_not_timed(work, side, monkeypatch):
    monkeypatch.setattr(step.Side, side, lambda _self: torch.zeros(()))
    with pytest.raises(AssertionError, match=r"not close|no state"):
        main(["step", "--shapes", "3x25x40", "--device", "cpu", "--work", work])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("work", EACH)
def test_both_sides_of_a_step_agree_with_plain_arithmetic_and_not_with_another_norm(work, grouped):
    for way, factor in itertools.product(("torch", "fastamp"), (1.0, 1.01)):
        side, norm = make_side(WORK[work], grouped=grouped)
        with pytest.raises(AssertionError) if factor > 1 else nullcontext():
            side.check(getattr(side, way), norm * factor, rtol=1e-4)


@pytest.mark.parametrize("work", WITHOUT_MUON)
def test_gradients_of_one_small_element_are_clipped_too(work, monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.tensor([-0.1]))
    args = argparse.Namespace(shapes=parse_shapes("1x1"), device="cpu", seed=0)
    assert step._make_case(args, f"1x1/{work}").arms


def test_tensors_of_16_bits_are_held_to_what_they_can_say(run):
    notes = run("--shapes", "3x1000-bf16", "--work", "adamw")["notes"]
    assert notes[0] == "3x1000-bf16/adamw: 3 tensors of 1,000, bfloat16; whole step, fused AdamW"
    side, norm = make_side(WORK["adamw"])
    side = step.Side(WORK["adamw"], [grad.bfloat16() for grad in side.drawn])
    side.check(side.fastamp, norm, rtol=1e-4)
    assert {p.dtype for p in side.parameters} == {torch.bfloat16}
    with pytest.raises(AssertionError, match="not close"):
        side.check(side.fastamp, norm * 1.1, rtol=1e-4)


@pytest.mark.parametrize("name", LEAN)
def test_fastamps_adamw_is_checked_in_full_precision(name):
    work, torchs = WORK[name], make_side(WORK[name])[0].optimizer
    assert (type(torchs), torchs.defaults["fused"]) == (torch.optim.AdamW, True)
    grads, norm = step.draw_grads([(3, 300), (7,)], "cpu", 0, torch.bfloat16)
    side = step.Side(work._replace(optimizer=work.lean), grads)
    side.check(side.fastamp, norm, rtol=1e-5)
    assert {parameter.dtype for parameter in side.parameters} == {torch.bfloat16}
    kept, dtype = {
        "bfloat16": ("exp_avg", torch.bfloat16),
        "8bit": ("exp_avg_codes", torch.uint8),
    }[LEAN[name]]
    assert side.optimizer.state[side.parameters[0]][kept].dtype == dtype
    wrong = step.Side(work._replace(optimizer=work.lean), grads)
    with pytest.raises(AssertionError, match="not close"):
        wrong.check(wrong.fastamp, norm * 1.1, rtol=1e-5)
    wrong.optimizer.param_groups[0]["exact"] = False  # its weights are rounded to bfloat16
    for state in wrong.optimizer.state.values():
        state.clear()
    with pytest.raises(AssertionError, match="not close"):
        wrong.check(wrong.fastamp, norm, rtol=1e-5)


def test_gradients_that_are_left_where_they_should_be_consumed_are_an_error(monkeypatch):
    side, norm = make_side(WORK["adamw-zero-grad"])
    monkeypatch.setattr(side.optimizer, "zero_grad", lambda: None)
    with pytest.raises(AssertionError, match="a gradient is left"):
        side.check(side.torch, norm, rtol=1e-3)


def test_every_call_has_gradients_to_clip():
    side, norm = make_side(WORK["adamw-open-zero-grad"])
    for _ in range(3):
        side.restore()
        grads = [parameter.grad for parameter in side.parameters]
        assert torch.cat(grads).double().norm().item() == pytest.approx(norm)
        side.fastamp()
        assert all(parameter.grad is None for parameter in side.parameters)


def test_without_a_scaler_fastamps_optimizer_step_is_timed_against_torchs(monkeypatch):
    called = []
    monkeypatch.setattr(fastamp, "optimizer_step", lambda *args: called.append(args))
    side, _ = make_side(WORK["adamw-no-scaler"])
    monkeypatch.setattr(side, "torch_scaler", None)
    monkeypatch.setattr(side, "scaler", None)
    side.restore()
    side.torch()
    side.fastamp()
    assert called == [(side.optimizer, step.MAX_NORM, False)]


# The table


def test_every_arm_has_its_time_and_its_ratio_to_torch_and_the_plain_pass(run):
    found = run("--shapes", "3gx10", "--work", "adamw", "adamw-open")
    assert [list(row) for row in found["table"]] == [COLUMNS] * 6
    assert found["notes"][1] == "3gx10/adamw-open: 3 groups of 10; whole step, default AdamW"
    raced = {name: list(race["arms"]) for name, race in found["races"].items()}
    assert raced["3gx10/adamw"] == ["torch", "plain", "fastamp"]
    assert raced["3gx10/adamw-open"] == ["torch", "plain", "fastamp"]
    metrics = {
        f"{kind}/3gx10/{w}" for kind in ("speedup", "of_plain") for w in ("adamw", "adamw-open")
    }
    assert metrics <= {each["name"] for each in found["measurements"]}


# Muon


@needs_muon
@pytest.mark.parametrize(
    ("name", "tables", "matrices"),
    [
        ("gpt2", [50257, 1024], 48),
        ("width128", [256, 128], 72),
        ("width384", [256, 128], 72),
        ("vit-tiny", [768, 197, 1000], 48),
    ],
)
def test_hidden_matrices_are_muons_and_all_else_is_adamws(name, tables, matrices):
    shape = NAMED[name]
    grads = [torch.ones([min(length, 2) for length in size]) for size in shape.sizes]
    muon, adamw = step.Side(WORK["muon"], grads, tables=shape.tables).optimizers
    held = [[p.dim() for p in each.param_groups[0]["params"]] for each in (muon, adamw)]
    assert held[0] == [2] * matrices
    assert held[1].count(2) == len(tables)
    assert [size[0] for size in shape.sizes[: shape.tables]] == tables


@needs_muon
@pytest.mark.parametrize("way", ["torch", "fastamp"])
def test_muons_step_is_held_to_products_in_full_precision(way, monkeypatch):
    grads, norm = step.draw_grads([(16, 8), (16, 8), (8, 24), (8,)], "cpu", 0)
    side = step.Side(WORK["muon"], grads, tables=1)
    side.check(getattr(side, way), norm, rtol=1e-3)
    monkeypatch.setattr(step, "PRODUCTS_RTOL", 1e-4)
    side = step.Side(WORK["muon"], grads, tables=1)
    with pytest.raises(AssertionError, match="products are not close"):
        side.check(getattr(side, way), norm, rtol=1e-3)


@needs_muon
@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="needs the compiled core")
def test_muons_rows_say_what_the_products_take_and_how_many_calls_there_are(run):
    first, plain, last = run("--shapes", "8x16x8", "--work", "muon")["table"]
    assert [row["arm"] for row in (first, plain, last)] == ["torch", "plain", "fastamp"]
    assert int(last["calls"]) < int(first["calls"]) / 4
    assert last["of plain [95 %]"].endswith("]")
    side = step.Side(WORK["muon"], step.draw_grads([(16, 8)] * 3 + [(8, 24)], "cpu", 0)[0])
    with torch.autograd.profiler.profile(use_kineto=False) as found:
        step.make_products(side)()
    assert [e.name for e in found.function_events].count("aten::bmm") == 2 * 15


def test_muon_needs_matrices_and_a_torch_that_has_it(monkeypatch, capsys):
    def said(shapes):
        with pytest.raises(SystemExit) as ended:
            main(["step", "--device", "cpu", "--shapes", shapes, "--work", "muon"])
        assert ended.value.code == 2
        return capsys.readouterr().err

    monkeypatch.setattr(torch.optim, "Muon", object, raising=False)
    assert "argument --work: '3x10/muon' needs matrices, as in 2000x64x64" in said("3x10")
    args = argparse.Namespace(shapes=parse_shapes("3x10,3x4x4"), work=None, seed=0)
    races = step.prepare(args)[0]["races"]
    assert [race for race in races if "muon" in race] == ["3x4x4/muon", "3x4x4/muon-open"]
    monkeypatch.delattr(torch.optim, "Muon")
    assert "argument --work: '3x4x4/muon' needs torch 2.9" in said("3x4x4")
    args = argparse.Namespace(shapes=None, work=None, seed=0)
    assert not any("muon" in race for race in step.prepare(args)[0]["races"])
    with pytest.raises(SystemExit):
        main(["step", "--device", "cpu", "--shapes", "width128"])
    assert "argument --work: 'width128/muon' needs torch 2.9" in capsys.readouterr().err


def test_a_step_in_a_loop_follows_a_pass_of_torch_on_the_next_rows():
    shape = NAMED["in-a-loop"]
    grads, _ = step.draw_grads(shape.sizes, "cpu", 0)
    side = step.Side(WORK["adamw-no-scaler"], grads)
    loop = step.Loop(side)
    assert side.parameters[0].abs().max() <= 64**-0.5  # of a model that trains
    seen = []
    for _ in range(2):
        before = [p.detach().clone() for p in side.parameters]
        loop.pass_back()
        seen.append([p.grad.clone() for p in side.parameters])
        side.fastamp()
        assert not any(map(torch.equal, before, side.parameters))
    assert not torch.equal(seen[0][0], seen[1][0])
    args = argparse.Namespace(shapes={"in-a-loop": shape}, device="cpu", seed=0)
    case = step._make_case(args, "in-a-loop/adamw-no-scaler")
    for arm, call in case.arms.items():
        case.before(arm)
        call()


def test_the_steps_rows_in_a_loop_are_among_the_default_ones():
    assert ROWS["in-a-loop"].split() == ["adamw-no-scaler", "adamw-open-no-scaler"]
