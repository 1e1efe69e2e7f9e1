"""What the doctor says of an installation, and of a loop by the file of its timer."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fastamp
from fastamp._ops import choose, reinstall
from fastamp.bench import doctor, environment, installation
from fastamp.bench import facts as facts_of
from fastamp.bench.__main__ import main
from fastamp.bench.race import Build, Race, Visit

LOOK = ["doctor", "--device", "cpu"]
PYTHON = shlex.quote(sys.executable)


@pytest.fixture
def look(capsys, monkeypatch):
    """Return what the doctor says of the installation, from the end of the table on."""
    monkeypatch.setattr(choose, "_only", None)
    monkeypatch.setattr(reinstall, "_source", lambda: ["/src/fast amp"])

    def run():
        assert main(LOOK) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def with_units(monkeypatch):
    monkeypatch.setattr(environment, "cpu_features", lambda: {"amx_bf16"})


def test_a_pure_python_install_is_named_with_its_remedy(look, monkeypatch):
    monkeypatch.setattr(choose, "_is_installed", lambda: False)
    monkeypatch.setattr(choose, "_core", choose._core.__wrapped__)
    monkeypatch.setattr(choose, "_tables", dict)
    monkeypatch.setattr(choose, "NO_CUDA", "no C++ compiler was found")
    command = f"{PYTHON} -m pip install --force-reinstall --no-deps --no-cache-dir"
    command += " '/src/fast amp'"
    said = look()
    assert "cpu     pure Python" in said
    assert "fastamp was installed without its compiled code: no C++ compiler was found. " in said
    assert f"Fix it: {command}" in said


def test_compiled_code_that_cannot_be_loaded_is_served_by_python_and_named(look, monkeypatch):
    monkeypatch.setattr(choose, "_is_installed", lambda: True)
    monkeypatch.setattr(choose, "_only", None)
    monkeypatch.delenv("FASTAMP_BACKEND", raising=False)
    monkeypatch.setitem(sys.modules, "fastamp._native", None)
    monkeypatch.delattr("fastamp._native", raising=False)
    for cached in (choose._core, choose._tables):
        cached.cache_clear()
    choose._handles.clear()
    try:
        with pytest.warns(UserWarning, match="the slower pure-Python .* cannot be loaded "):
            assert fastamp.backends() == ["fallback"]
        said = look()
        assert "cpu     pure Python" in said
        assert "fastamp's compiled code cannot be loaded (import of fastamp._native" in said
        assert "Fix it:" in said
    finally:
        for cached in (choose._core, choose._tables):
            cached.cache_clear()
        choose._handles.clear()


@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="needs the compiled core")
def test_a_build_without_cuda_code_is_named_with_its_remedy_beside_a_gpu(look, monkeypatch):
    from fastamp import _native

    monkeypatch.setattr(_native, "built_with_cuda", False)
    monkeypatch.setattr(choose, "NO_CUDA", "no nvcc that works was found; there was no driver")
    monkeypatch.setattr(choose, "_warn_of", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    said = look()
    assert "cpu     compiled code" in said
    assert said.count("pure Python, which is slower: fastamp was built without CUDA") == 2
    assert f"there was no driver. Fix it: FASTAMP_CUDA=ON {PYTHON} -m pip install" in said
    assert "bf16 on cuda: this GPU has no bf16 units. Fix it: train in FP32" in said


def test_a_cpu_without_bf16_units_is_named_with_its_remedy(look, monkeypatch, with_units):
    assert "bf16 on cpu" not in look()
    monkeypatch.setattr(environment, "cpu_features", set)
    mend = "Fix it: train in FP32 there, without torch.autocast('cpu')"
    assert f"has no speed-up to expect. {mend}" in look()


def test_what_else_is_in_the_way_is_named(look, monkeypatch, tmp_path, with_units):
    monkeypatch.setattr(choose, "_only", "fallback")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    monkeypatch.setattr(installation, "EXTRAS", ("json", "fastamp_no_such_module"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(installation, "DRIVER", tmp_path)
    said = look()
    for each in (
        "FASTAMP_BACKEND=fallback is set. Fix it: unset FASTAMP_BACKEND",
        "cores may be used. Fix it: export OMP_NUM_THREADS=",
        "not installed: fastamp_no_such_module, if you need it. Fix it: ",
        "pip install fastamp_no_such_module",
        "has an NVIDIA driver, and torch finds no GPU: torch",
        "is built without CUDA. Fix it: install torch as",
    ):
        assert each in said
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' is set. Fix it: unset CUDA_VISIBLE_DEVICES" in look()


def test_what_was_built_here_comes_again_from_where_it_came(monkeypatch):
    saved = {}

    class Distribution:
        def read_text(self, name):
            assert name == "direct_url.json"
            return saved["text"]

    monkeypatch.setattr(reinstall.importlib.metadata, "distribution", lambda _: Distribution())
    for url, source in (
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, ["-e", "/a b"]),
        ({"url": "file:///a.tar.gz", "archive_info": {}}, ["/a.tar.gz"]),
        ({"url": "file:///a.whl", "archive_info": {}}, []),
        ({"url": "https://h/r.git", "vcs_info": {"vcs": "git"}}, []),
        (None, []),
    ):
        saved["text"] = url and json.dumps(url)
        assert reinstall._source() == source
    assert reinstall.install_again().endswith("--no-cache-dir FOLDER_OF_ITS_SOURCES")


def fill(timer, **regions_ms):
    """Count visits of the given milliseconds, and a first one of a second."""
    for name, (time_ms, count) in regions_ms.items():
        for value_ms in [1000, *[time_ms] * (count - 1)]:
            timer(name).add(round(value_ms * 1e6))


@pytest.fixture
def judge(monkeypatch, tmp_path, capsys):
    """Return what the doctor says of a timer's file, where a race has known times."""
    times_s = {"torch": 0.006, "torch, fused": 0.003, "fastamp": 0.001}

    def race_once(make, plan, **_):
        case = make()
        for arm, step in case.arms.items():
            case.before(arm)
            step()
        build = Build(
            arms=[*case.arms], rounds=[{arm: Visit(times_s[arm]) for arm in case.arms}] * 2
        )
        return Race(arms=build.arms, builds=[build] * plan.builds[0])

    monkeypatch.setattr(doctor, "run_race", race_once)

    def run(timer, elapsed=0.0, **facts):  # not the time that the test takes
        path = tmp_path / "timer.json"
        facts_of.save(timer, path, **facts)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"elapsed": elapsed}))
        assert main([*LOOK, "--timer", str(tmp_path / "timer.json")]) == 0
        return capsys.readouterr().out

    return run


def test_an_optimizer_that_is_not_fused_is_named_with_its_remedy(judge, with_units):
    timer = fastamp.Timer("cpu")
    fill(timer, forward=(2.0, 100), backward=(2.0, 100), step=(6.0, 100))
    parameters = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(20)]
    said = judge(timer, optimizer=torch.optim.AdamW(parameters), dtype=torch.bfloat16)
    times = "torch 6.000 ms, torch, fused 3.000 ms, fastamp 1.000 ms"
    raced = "as fast; raced on parameters like the loop's"
    for each in (
        "100 steps on cpu",
        f"clip and step of such parameters, raced here: {times}",
        f"1. fastamp.optimizer_step(optimizer, max_norm=..., zero_grad=True): 2.00x {raced}",
        f"2. fused=True for AdamW: 1.43x {raced}",
    ):
        assert each in said
    assert "autocast" not in said

    said = judge(timer, optimizer=torch.optim.SGD(parameters, lr=0.1, fused=True))
    assert "raced here" in said
    assert "fused=True" not in said
    said = judge(timer)  # nobody knows the parameters
    assert "raced here" not in said
    assert "zero_grad=True), unless the loop has it: at most 2.50x as fast; clip and step" in said
    assert "fastamp.optimizer_step" not in judge(timer, scaler=fastamp.GradScaler("cpu"))


@pytest.mark.parametrize("how", ["native", "of several", "of a scaler"])
def test_a_loop_that_has_fastamps_step_is_not_told_to_use_it(judge, how, with_units):
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1) for _ in range(2)]
    for each in optimizers:
        each.param_groups[0]["params"][0].grad = torch.ones(3)
    stepped = optimizers if how == "of several" else optimizers[0]
    if how == "of a scaler":
        fastamp.GradScaler("cpu", enabled=False).step(stepped, max_norm=1.0)
    else:
        fastamp.optimizer_step(stepped, max_norm=1.0, zero_grad=True)
    timer = fastamp.Timer("cpu")
    fill(timer, forward=(2.0, 100), step=(8.0, 100))
    said = judge(timer, optimizer=stepped, dtype=torch.bfloat16)
    assert "fastamp makes the step already" in said
    assert "\n1. nothing: " in said
    if how != "of several":
        said = judge(timer, optimizer=optimizers, dtype=torch.bfloat16)
        assert "1. fastamp.optimizer_step(" in said  # is not in the step of the second one


def test_a_loop_whose_step_nobody_knows_is_told_so(judge, with_units):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.register_step_pre_hook(lambda *_: None)
    fastamp.optimizer_step(optimizer, max_norm=1.0)  # torch makes it, and leaves no trace
    timer = fastamp.Timer("cpu")
    fill(timer, forward=(2.0, 100), step=(8.0, 100))
    said = judge(timer, optimizer=optimizer, dtype=torch.bfloat16)
    assert "1. fastamp.optimizer_step(optimizer, max_norm=..., zero_grad=True), unless" in said


def test_a_step_that_is_faster_than_the_race_gains_no_more_than_it_takes(judge, with_units):
    timer = fastamp.Timer("cpu")
    fill(timer, forward=(2.0, 100), step=(4.0, 100))  # it may not clip, which the race does
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, 2))])
    said = judge(timer, optimizer=optimizer, dtype=torch.bfloat16)
    assert "zero_grad=True): 2.00x as fast; raced" in said
    assert "fused=True for AdamW: 1.20x as fast; raced" in said


def test_a_race_of_another_work_than_the_loops_step_promises_nothing(judge, with_units):
    timer = fastamp.Timer("cpu")
    fill(timer, forward=(2.0, 100), step=(2.9, 100))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, 2))])
    said = judge(timer, optimizer=optimizer, dtype=torch.bfloat16)
    assert "the step: torch's takes 6.000 ms raced on parameters like the loop's, whose own" in said
    assert "takes 2.900 ms [2.897, 2.903]; that is another work, as with sparse" in said
    assert "\n1. nothing: " in said


def test_sparse_gradients_are_not_raced_and_promised_nothing(judge, with_units):
    tables = torch.nn.EmbeddingBag(1000, 8, sparse=True)
    tables(torch.tensor([[1, 2]])).sum().backward()
    timer = fastamp.Timer("cpu")
    fill(timer, forward=(2.0, 100), step=(8.0, 100))
    for make in (torch.optim.SGD, torch.optim.Adagrad):
        said = judge(timer, optimizer=make(tables.parameters(), lr=0.1), dtype=torch.bfloat16)
        assert "its gradients are sparse, so torch makes it, and nothing is promised" in said
        assert "\n1. nothing: " in said


def test_time_outside_of_regions_is_a_part_of_the_whole_step(judge, with_units):
    timer = fastamp.Timer("cpu")
    for name, time_ms in (("data", 2), ("forward", 2), ("eval", 50)):
        for _ in range(100):
            timer(name).add(time_ms * 1_000_000)
    with timer("eval"):
        timer("inner").add(10_000_000_000)  # in a region, whatever its own
    open_s = timer.summary()["eval"].total - 100 * 0.05  # of a machine that is busy, some ms
    said = judge(timer, elapsed=5.6 + open_s, dtype=torch.bfloat16)
    assert [line.split() for line in said.splitlines()[1:4]] == [
        ["data", "2.000", "[1.997,", "2.003]", "33%"],
        ["forward", "2.000", "[1.997,", "2.003]", "33%"],
        ["outside", "of", "regions", "2.000", "33%"],
    ]
    assert "at most 1.50x as fast; the loop waits for data in 33% of its time" in said
    assert "outside" not in judge(timer, elapsed=0.1)  # regions of several threads overlap


def test_a_step_of_one_parameter_is_raced_whatever_its_gradient(judge, monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.tensor([0.1]))
    timer = fastamp.Timer("cpu")
    fill(timer, forward=(2.0, 100), step=(4.0, 100))
    assert "raced here" in judge(
        timer, optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    )


def test_a_file_of_more_parameters_than_can_be_made_is_judged_without_a_race(
    judge, monkeypatch, tmp_path, capsys
):
    timer = fastamp.Timer("cpu")
    fill(timer, forward=(2.0, 100), step=(2.0, 100))
    judge(timer, optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    monkeypatch.setattr(doctor, "_make_sides", None)
    path = tmp_path / "timer.json"
    content = json.loads(path.read_text())
    content["facts"]["sizes"] = [[1, 1_000_000]]
    path.write_text(json.dumps(content))
    assert main([*LOOK, "--timer", str(path)]) == 0
    assert "raced here" not in capsys.readouterr().out


def test_a_loader_that_starves_is_named_with_its_remedy(judge, with_units):
    timer = fastamp.Timer("cpu")
    fill(timer, data=(30.0, 50), forward=(15.0, 50), backward=(14.0, 50), step=(1.0, 50))
    said = judge(timer, loader=DataLoader(TensorDataset(torch.ones(8, 2)), 4), dtype=torch.bfloat16)
    assert [line.split()[0] for line in said.splitlines()[1:5]] == [*doctor.PARTS][:4]
    remedy = "1. fastamp.DataLoader, which gathers the TensorDataset in compiled code: "
    assert f"{remedy}at most 2.00x as fast; the loop waits for data in 50% of its time" in said

    loader = DataLoader([torch.ones(2)] * 8, 4)
    said = judge(timer, loader=loader)
    assert "1. fastamp.DataLoader, with fastamp.in_memory(dataset) or another ArrayDataset" in said
    said = judge(timer, loader=fastamp.DataLoader([torch.ones(2)] * 8, 4))
    assert "1. fastamp.in_memory(dataset) or another" in said
    assert "batches are made item by item: the dataset is a list" in said


def test_a_loop_that_is_the_models_has_nothing_to_mend(judge, with_units):
    timer = fastamp.Timer("cpu")
    fill(timer, data=(0.1, 50), forward=(50.0, 50), backward=(50.0, 50), step=(0.1, 50))
    said = judge(timer, dtype=torch.bfloat16)
    assert said.endswith(
        "1. nothing: the model's own forward and backward pass take 100% of a step\n"
    )


def test_the_bound_of_a_precision_is_that_of_the_loop_itself(judge, with_units):
    timer = fastamp.Timer("cpu")
    fill(timer, data=(6.0, 50), forward=(2.0, 50), backward=(2.0, 50))
    said = judge(timer, dtype=torch.float32)
    assert "torch.autocast('cpu', dtype=torch.bfloat16): at most 1.67x as fast; " in said
    assert "`python -m fastamp.bench --task` measures your model" in said


def test_autocast_on_a_cpu_without_units_is_named_with_its_remedy(judge, monkeypatch):
    monkeypatch.setattr(environment, "cpu_features", set)
    timer = fastamp.Timer("cpu")
    fill(timer, forward=(50.0, 50), backward=(50.0, 50), step=(0.1, 50))
    assert "1. train in FP32 here: leave out torch.autocast: " in judge(timer, dtype=torch.bfloat16)


REGION = {"count": 1, "total": 1.0, "mean": 1.0, "min": 1.0, "max": 1.0}
REGION |= {"p50": 1.0, "p90": 1.0, "p99": 1.0, "host": 1.0, "histogram": [[5, 1]]}
UNSEEN = dict.fromkeys(REGION, 0) | {"captured": 20, "histogram": []}
CONTENT = {"schema": 1, "unit": "s", "device": "cpu", "regions": {"forward": REGION}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "Expecting value"),
        (b'"\xff', "decode"),
        (b"[" * 100_000, "recursion"),
        ([], "expected an object of schema 1 in seconds, got []"),
        ({}, "it has no 'schema'"),
        (CONTENT | {"schema": 2}, "expected an object of schema 1"),
        (CONTENT | {"regions": 3}, "its regions is 3, expected a dict"),
        (CONTENT | {"regions": {"data": 3}}, "its region 'data' is 3"),
        (CONTENT | {"regions": {}}, "no region is named after a part of a step: 'data', 'forward'"),
        (CONTENT | {"regions": {"mine": REGION}}, "no region is named after a part of a step"),
        (CONTENT | {"regions": {"data": REGION | {"total": -1}}}, "its region 'data' is"),
        (CONTENT | {"regions": {"data": REGION | {"total": float("nan")}}}, "its region 'data' is"),
        (CONTENT | {"regions": {"data": REGION | {"count": 0}}}, "its region 'data' is"),
        (CONTENT | {"regions": {"data": REGION | {"max": 2.0}}}, "its region 'data' is"),
        (CONTENT | {"regions": {"data": REGION | {"x": 0}}}, "unexpected keyword argument 'x'"),
        (
            CONTENT | {"regions": {"data": REGION | {"histogram": [[9999, 1]]}}},
            "its region 'data' is",
        ),
        (CONTENT | {"regions": {"data": REGION | {"histogram": [[5, -1]]}}}, "its count is -1"),
        (CONTENT | {"regions": {"data": UNSEEN}}, "expected some that took any time"),
        (CONTENT | {"elapsed": "1 s"}, "its elapsed is '1 s', expected seconds"),
        (CONTENT | {"device": "tpv"}, "its device is 'tpv', expected cpu or cuda"),
        (CONTENT | {"device": None}, "its device is None, expected a str"),
        (CONTENT | {"facts": {"fused": "yes"}}, "its fact 'fused' is 'yes', expected what"),
        (CONTENT | {"facts": {"sizes": [[1, "x"]]}}, "its count is 'x'"),
        (CONTENT | {"facts": {"unknown": None}}, "its fact 'unknown' is None, expected what"),
    ],
)
def test_what_is_no_file_of_a_timer_is_refused_with_status_2(content, said, tmp_path, capsys):
    path = tmp_path / "timer.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(SystemExit) as ended:
        main([*LOOK, "--timer", str(path)])
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"--timer: '{path}' is no file of Timer.to_json with the parts of a step: " in error
    assert said in error


@pytest.mark.parametrize("name", ["timer.json", "timer\udcff.json"])
def test_a_file_without_facts_is_read_and_the_json_has_the_advice(name, tmp_path):
    path, found = tmp_path / name, tmp_path / "found.json"
    path.write_text(json.dumps(CONTENT | {"regions": {"forward": REGION, "data": REGION}}))
    words = ["--timer", str(path), "--json", str(found), "--report", str(tmp_path / "page.html")]
    assert main([*LOOK, *words]) == 0
    advice = json.loads(found.read_text())["details"]["advice"]
    assert {"loader", "precision"} >= {each["part"] for each in advice} >= {"loader"}
    (data,) = [each["gain"] for each in advice if each["part"] == "loader"]
    assert (data["low"], data["high"]) == (1.0, 2.0)
