"""Which backend serves what, and that all of them offer the same ops."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from support.processes import run_python

import fastamp
from fastamp import _ops
from fastamp._ops import choose, fallback, rules
from fastamp._ops.types import COMPILED_NORMS

ROOT = Path(__file__).parents[2]


def test_backends_are_listed_best_first():
    order = [name for name in ("cuda", "cpu", "fallback") if name in fastamp.backends()]
    assert fastamp.backends() == order
    assert order[-1] == "fallback"


def test_the_choice_follows_the_device():
    best = "cpu" if "cpu" in fastamp.backends() else "fallback"
    assert _ops.ops_for(torch.device("cpu")).name == best
    assert _ops.ops_for(torch.device("meta")).name == "fallback"
    assert _ops.ops_for(torch.device("mps")).name == "fallback"


@pytest.mark.cuda
def test_cuda_tensors_go_to_the_cuda_backend():
    assert fastamp.backends()[0] == "cuda"
    assert _ops.ops_for(torch.device("cuda", 0)).name == "cuda"


@pytest.mark.parametrize("name", fastamp.backends())
def test_the_environment_variable_narrows_the_choice(name):
    result = run_python("import fastamp; print(fastamp.backends())", FASTAMP_BACKEND=name)
    expected = [name] if name == "fallback" else [name, "fallback"]
    assert result.stdout.strip() == str(expected), result.stderr


@pytest.mark.parametrize("name", ["cuda", "cpu", "cdua"])
def test_a_backend_that_is_not_there_is_refused_with_the_list(name):
    if name in fastamp.backends():
        pytest.skip(f"{name} is there")
    result = run_python("import fastamp", FASTAMP_BACKEND=name)
    assert result.returncode != 0
    why = "is not a backend" if name == "cdua" else "is not available here"
    listed = ", ".join(fastamp.backends())
    assert f"RuntimeError: FASTAMP_BACKEND='{name}' {why}; available: {listed}" in result.stderr


def test_use_only_restores_the_choice():
    before = fastamp.backends()
    with _ops.use_only("fallback"):
        assert fastamp.backends() == ["fallback"]
    with (
        pytest.raises(RuntimeError, match="backend='none' is not a backend"),
        _ops.use_only("none"),
    ):
        pass
    assert fastamp.backends() == before


def ops_of(protocol: type) -> dict[str, inspect.Signature]:
    functions = {k: v for k, v in vars(protocol).items() if inspect.isfunction(v)}
    return {k: inspect.signature(v) for k, v in functions.items() if not k.startswith("_")}


def missing_ops(cls: type, protocol: type) -> list[str]:
    """Name the ops of the table that a backend lacks or takes with other arguments."""
    return [
        name
        for name, signature in ops_of(protocol).items()
        if not hasattr(cls, name)
        or list(inspect.signature(getattr(cls, name)).parameters) != list(signature.parameters)
    ]


def test_every_backend_has_every_op():
    assert set(ops_of(_ops.Ops)) == {"pack", "region_maker", "update"}
    assert set(ops_of(_ops.Packed)) == {"grad_stats", "reduce", "rescale_"}
    assert set(ops_of(_ops.Update)) == {"read", "settle"}
    classes = [(fallback.FallbackOps, fallback.TensorPack, rules.TorchUpdate)]
    if "cpu" in fastamp.backends():
        from fastamp._ops import compiled

        classes.append((compiled.CompiledOps, compiled.CompiledPack, compiled.CompiledUpdate))
        assert tuple(compiled._NORM_TYPES) == COMPILED_NORMS
    for ops, packed, update in classes:
        assert missing_ops(ops, _ops.Ops) == missing_ops(packed, _ops.Packed) == []
        assert missing_ops(update, _ops.Update) == []


def test_every_row_of_the_compiled_op_table_is_bound():
    table = (ROOT / "csrc/step/ops.h").read_text()
    rows = re.findall(r"void \(\*(\w+)\)\(", table)
    assert rows == ["grad_stats", "rescale", "update"]
    files = ROOT.glob("csrc/step/bind*.cpp")
    bindings = "".join(path.read_text() for path in files)
    for row in rows:
        assert f"ops.{row}(" in bindings
    # A row that a backend leaves out does not compile: missing-field-initializers is an error.
    assert "-Werror=missing-field-initializers" in (ROOT / "CMakeLists.txt").read_text()


def test_a_torch_without_the_exchange_table_gets_the_fallback_and_is_told_once(monkeypatch):
    native = pytest.importorskip("fastamp._native")
    monkeypatch.setattr(native, "has_exchange_table", False)
    monkeypatch.setattr(choose, "_only", None)
    choose._backends.cache_clear()
    try:
        monkeypatch.setenv("FASTAMP_BACKEND", "fallback")  # who asks for it need not be told
        assert fastamp.backends() == ["fallback"]
        choose._backends.cache_clear()
        monkeypatch.delenv("FASTAMP_BACKEND")
        with pytest.warns(UserWarning, match="needs torch 2.10 or later"):
            assert fastamp.backends() == ["fallback"]
        assert _ops.ops_for(torch.device("cpu")).name == "fallback"  # and no second warning
    finally:
        choose._backends.cache_clear()


@pytest.fixture
def probed_anew():
    """Forget which CUDA devices the kernels can run on, before and after."""
    choose._cuda_ops.cache_clear()
    yield torch.device("cuda", 0)
    choose._cuda_ops.cache_clear()


def ops_with_warnings(device):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        served = {_ops.ops_for(device).name for _ in range(3)}
    return served, [str(warning.message) for warning in caught]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="needs the compiled core")
def test_a_cuda_device_that_the_kernels_cannot_run_on_is_named_once(probed_anew):
    from fastamp import _native

    served, (said,) = ops_with_warnings(probed_anew)
    assert served == {"fallback"}
    assert "gradients on cuda:0 get the slower pure-Python fallback: " in said
    remedy = "update the" if _native.built_with_cuda else "rebuild it with nvcc on the PATH"
    assert remedy in said
    with _ops.use_only("fallback"):  # who asks for it need not be told
        assert ops_with_warnings(probed_anew) == ({"fallback"}, [])


@pytest.mark.parametrize(
    ("error", "served"),
    [
        (None, "cuda"),
        ("the NVIDIA driver is for CUDA 11.8; update the driver", "fallback"),
        ("CUDA error in reduce_kernel: cudaErrorNoKernelImageForDevice", "fallback"),
    ],
)
def test_a_cuda_device_is_probed_before_the_first_launch(probed_anew, monkeypatch, error, served):
    native = pytest.importorskip("fastamp._native")
    from fastamp._ops import compiled

    probed = []

    def check_device(index):
        probed.append(index)
        if error is not None:
            raise RuntimeError(error)

    monkeypatch.setattr(native, "check_device", check_device)
    found = {"cuda": compiled.CompiledOps("cuda", native.cuda_ops), "cpu": None}
    monkeypatch.setattr(choose, "_backends", lambda: found)
    monkeypatch.setattr(choose, "_only", None)
    names, said = ops_with_warnings(probed_anew)
    assert (names, probed) == ({served}, [0])
    assert [error in message for message in said] == ([] if error is None else [True])
    assert ops_with_warnings(torch.device("cuda", 1))[0] == {served}
    assert probed == [0, 1]


def test_a_pure_python_install_says_what_cuda_tensors_need(probed_anew, monkeypatch):
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(choose, "_backends", lambda: {"fallback": choose.FALLBACK})
    monkeypatch.setattr(choose, "_only", None)
    served, (said,) = ops_with_warnings(probed_anew)
    assert served == {"fallback"}
    assert "install it again with a C++ compiler and nvcc on the PATH" in said


@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="needs the compiled core")
def test_cuda_ops_without_cuda_code_say_so():
    from fastamp import _native

    if _native.built_with_cuda:
        pytest.skip("built with CUDA")
    packed = _native.pack([], None)
    with pytest.raises(RuntimeError, match="built without CUDA"):
        _native.cuda_ops.rescale(packed, torch.tensor(1.0), 1)


@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="needs the compiled core")
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("scale", torch.tensor(1.0, dtype=torch.float64)),
        ("work", torch.empty(1, dtype=torch.float64)),
        ("stats", torch.empty(4)),
        ("stats", "x"),
    ],
)
def test_the_core_refuses_a_wrong_buffer_by_name(argument, value):
    from fastamp import _native

    packed = _native.pack([torch.ones(10)], None)
    arguments = {
        "scale": None,
        "max_norm": None,
        "only_finite": False,
        "skipped": None,
        "work": torch.empty(2, dtype=torch.float64),
        "stats": torch.empty(_native.NUM_STATS),
        argument: value,
    }
    with pytest.raises(TypeError, match=f"^{argument}: expected a dense float"):
        _native.cpu_ops.grad_stats(packed, _native.NormType.L2, **arguments, num_threads=1)


def test_tensors_of_two_devices_are_packed_apart():
    with _ops.use_only("fallback"):
        mixed = _ops.Tensors([torch.ones(2), torch.ones(3, device="meta")]).pack()
        assert len(mixed._packs) == 2


@pytest.mark.cuda
def test_gradients_on_the_cpu_and_the_gpu_share_one_norm():
    made = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    made[1] = torch.nn.Parameter(torch.zeros(1, device="cuda"))
    for parameter, value in zip(made, (3.0, 4.0), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    norm = fastamp.clip_grad_norm_(made, 1.0)
    assert norm.item() == 5.0
    assert norm.device.type == "cpu"
    assert made[1].grad.item() == pytest.approx(0.8)


# torch's own threads do not survive a fork: everything of torch's that starts them comes before.
FORK = """
import os, sys, torch, fastamp
torch.set_num_threads(2)
def parameter():
    p = torch.nn.Parameter(torch.zeros(1 << 20)); p.grad = torch.ones(1 << 20); return p
first, second = parameter(), parameter()
assert fastamp.clip_grad_norm_(first, 1.0).item() == 1024.0
pid = os.fork()
if pid == 0:
    os._exit(0 if fastamp.clip_grad_norm_(second, 1.0).item() == 1024.0 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="needs the compiled core")
def test_a_forked_child_gets_threads_of_its_own():
    result = run_python(FORK)
    assert result.returncode == 0, result.stderr
