"""What the doctor says of a task's model: its Linears, and the graph of torch.compile."""

from __future__ import annotations

import inspect
import json
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from fastamp.bench import model_facts
from fastamp.bench.__main__ import main
from fastamp.bench.model_facts import RULES, examine_model, find_graph_breaks

FP8, TENSORWISE, ROWWISE, MXFP8 = range(4)  # rows of the table


class Net(nn.Module):
    """A function of some Linears."""

    def __init__(self, forward, *sizes):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(*each) for each in sizes)
        self.function = forward

    def forward(self, x):
        return self.function(x, *self.linears)


def examine(model, shape, batch_size=32):
    data = torch.utils.data.TensorDataset(torch.randn(batch_size, *shape))
    found = examine_model(
        lambda *_: (model, data, lambda out, _: out.sum(), {"batch_size": batch_size}), "cpu", 0
    )
    return found, [(row["Linears"], row["of the arithmetic"]) for row in found.table]


def test_linears_are_counted_by_each_rule_with_their_share_of_the_arithmetic():
    sizes = [(64, 64), (64, 65), (65, 32), (32, 48)]
    model = nn.Sequential(*(nn.Linear(*each) for each in sizes))
    report, rows = examine(model, (64,))
    products = [inputs * outputs for inputs, outputs in sizes]
    assert rows[FP8] == ("2 of 4", f"{(products[0] + products[3]) / sum(products):.0%}")
    assert rows[MXFP8] == ("1 of 4", f"{products[0] / sum(products):.0%}")
    assert rows[TENSORWISE] == rows[ROWWISE] == ("0 of 4", "0%")
    assert report.notes[1:3] == [
        "1 x Linear(64, 65) on 32 rows, 35%: none of these",
        "1 x Linear(64, 64) on 32 rows, 35%: fp8, MXFP8",
    ]
    assert report.details["linears"]["3"] == [(32, 48, 32)]
    assert {row["units here"] for row in report.table} == {"n/a: a CPU"}


def test_the_rows_of_a_batch_count():
    for batch_size, shape, passed in ((24, (64,), 0), (16, (64,), 1), (3, (16, 64), 1)):
        _, rows = examine(nn.Linear(64, 64), shape, batch_size)
        assert rows[FP8][0] == f"{passed} of 1"


def test_a_linear_passes_if_all_of_its_calls_do():
    twice = Net(lambda x, a, b, _: torch.cat([a(x), a(b(x)[:8])]), *[(64, 64)] * 3)
    report, rows = examine(twice, (64,))
    assert rows[FP8] == ("1 of 3", "44%")  # 32 rows of 72
    assert report.notes[-2] == "not called: linears.2"


def test_a_model_without_a_linear_has_a_table():
    report, rows = examine(nn.Conv1d(3, 4, 3), (3, 16))
    assert rows == [("0 of 0", "0%")] * 4
    assert report.notes[1:] == ["torch.compile: no graph break in a forward pass"]
    assert examine(nn.BatchNorm1d(3), (3,))[1] == [("0 of 0", "0%")] * 4  # no product at all


def test_attention_is_part_of_the_arithmetic_on_a_cpu_too():
    def attend(x, linear):
        y = linear(x).unsqueeze(1)
        return functional.scaled_dot_product_attention(y, y, y)

    # 2 * 16 * 16 for each of 16 rows, 4 * 16 for each of 8 x 8 pairs, twice
    assert examine(Net(attend, (16, 16)), (8, 16), 2)[1][FP8] == ("1 of 1", "50%")


@pytest.mark.parametrize(
    ("rule", "large", "small"),
    [
        ("fp8 tensorwise", [(1040, 16), (16, 4112)], [(1024, 4096), (1041, 16)]),
        ("fp8 rowwise", [(2064, 2064), (4112, 1040)], [(2048, 8192), (4112, 1024), (4096, 2048)]),
    ],
)
def test_torchaos_filter_says_which_linears_are_large_enough(rule, large, small):
    assert [RULES[rule].allows((*each, 16)) for each in large + small] == [True] * len(large) + [
        False
    ] * len(small)


def test_the_units_are_those_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    for found, said in {
        (8, 6): "no no",
        (8, 9): "yes no",
        (9, 0): "yes no",
        (10, 0): "yes yes",
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=found: found)
        units = [model_facts._find_units("cuda", RULES[n].capability) for n in ("fp8", "MXFP8")]
        fp8, mxfp8 = said.split()
        here = f"compute capability {found[0]}.{found[1]}"
        assert units == [f"{fp8}: {here}", f"{mxfp8}: {here}"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert model_facts._find_units("cuda", (8, 9)) == "n/a: a GPU that is not NVIDIA's"


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(n for n, line in enumerate(lines) if text in line)}"


def test_a_forward_pass_of_one_graph_has_no_break():
    for model in (Net(lambda x, a: a(x), (4, 4)), torch.compile(nn.Linear(4, 4), backend="eager")):
        report, _ = examine(model, (4,))
        assert report.notes[-1] == "torch.compile: no graph break in a forward pass"


def test_parts_that_are_compiled_are_looked_through_and_nothing_is_left_compiled():
    def compile_it(*_):
        msg = "compiled"
        raise AssertionError(msg)

    part = torch.compile(nn.Linear(64, 64), backend=compile_it)
    double = torch.compile(lambda x: x * 2, backend=compile_it)
    model = Net(lambda x, a, b: b(double(a(x))), (64, 64), (64, 64))
    model.linears[1] = part
    report, rows = examine(model, (64,))
    assert rows[FP8] == ("2 of 2", "100%")
    assert report.notes[-1] == "torch.compile: no graph break in a forward pass"
    assert torch._C._dynamo.eval_frame._debug_get_cache_entry_list(Net.forward.__code__) == []


def in_the_middle(x, a, b):
    x = a(x)
    print("x")  # noqa: T201
    return b(x)


def in_a_loop(x, a, b):
    for each in (a, b):
        x = each(x)
        print("x")  # noqa: T201
    return x


def in_a_generator(x, a, b):
    def walk():
        yield a
        print("x")  # noqa: T201
        yield b

    for each in walk():
        x = each(x)
    return x


@torch.compiler.disable
def scale(x):
    return x * 2


def in_a_function_that_is_not_compiled(x, a, b):
    return b(scale(a(x)))


BREAKS = {
    in_the_middle: "print(",
    in_a_loop: "print(",
    in_a_generator: "print(",
    in_a_function_that_is_not_compiled: "scale(",
}


@pytest.mark.parametrize("forward", BREAKS)
def test_a_graph_break_is_named_with_its_line(forward):
    first, *breaks = find_graph_breaks(Net(forward, (4, 4), (4, 4)), torch.randn(2, 4))
    assert first == "torch.compile: the graph breaks at 1 place(s) at least in a forward pass"
    assert breaks[0].startswith(f"graph break at {line_of(forward, BREAKS[forward])}: ")
    assert len(breaks) == 1


def test_the_same_place_is_named_once_and_others_too():
    def several(x, a):
        x = in_the_middle(in_the_middle(x, a, a), a, a)
        if x.sum().item() > 0:
            x = x * 2
        return a(x)

    first, *breaks = find_graph_breaks(Net(several, (4, 4)), torch.randn(2, 4))
    assert first == "torch.compile: the graph breaks at 2 place(s) at least in a forward pass"
    places = [line_of(in_the_middle, "print("), line_of(several, ".item()")]
    assert [each.partition(": ")[0] for each in breaks] == [f"graph break at {p}" for p in places]


def test_what_torch_compile_cannot_do_is_one_line(monkeypatch):
    def fail(*_, **__):
        msg = "no compiler\nand more"
        raise OSError(msg)

    monkeypatch.setattr(torch, "compile", fail)
    found = find_graph_breaks(nn.Linear(1, 1), torch.randn(1, 1))
    assert found == ["torch.compile: OSError: no compiler"]


TASK = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 48)

    def forward(self, x, scale):
        x = self.a(x)
        print("forward")
        return (self.b(x) * scale).sum()

def make(device, seed):
    data = [{"x": torch.randn(64), "scale": torch.ones(1)} for _ in range(32)]
    return Model(), data, None

def broken(device, seed):
    return Model(), [{"x": torch.randn(65), "scale": torch.ones(1)}], None
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "examined_task", raising=False)
    path = tmp_path / "examined_task.py"
    path.write_text(TASK)
    return path


def test_the_doctor_examines_a_task(task, tmp_path, capsys):
    words = ["--json", str(tmp_path / "found.json"), "--report", str(tmp_path / "page.html")]
    assert main(["doctor", "--device", "cpu", "--task", f"{task}:make", *words]) == 0
    said = capsys.readouterr().out
    assert f"graph break at {task}:12: " in said
    assert "1 x Linear(64, 48) on 32 rows, 43%: fp8\n" in said
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["job"] == {"task": f"{task}:make"}
    assert found["details"]["linears"] == {"a": [[64, 64, 32]], "b": [[64, 48, 32]]}
    assert "Linear(64, 48)" in (tmp_path / "page.html").read_text()


def test_a_task_that_breaks_its_contract_is_refused_as_in_the_main_job(task, capsys):
    assert main(["doctor", "--device", "cpu", "--task", f"{task}:broken"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"argument task: '{task}:broken' breaks its contract: model: its call on" in error
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--device", "cpu", "--task", "gtp"])
    assert "argument task: 'gtp' is none of gpt, mlp" in capsys.readouterr().err


def test_a_task_and_a_timers_file_are_not_looked_at_together(tmp_path, capsys):
    region = {"count": 1, "total": 1.0, "mean": 1.0, "min": 1.0, "max": 1.0, "p50": 1.0}
    region |= {"p90": 1.0, "p99": 1.0, "host": 1.0, "histogram": [[5, 1]]}
    content = {"schema": 1, "unit": "s", "device": "cpu", "regions": {"forward": region}}
    path = tmp_path / "timer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--device", "cpu", "--task", "mlp", "--timer", str(path)])
    assert "argument --task: 'mlp' cannot be combined with --timer" in capsys.readouterr().err
