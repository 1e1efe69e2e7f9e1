"""Which backend serves which device, and what the core refuses."""

import warnings

import pytest
import torch
from support.devices import HAS_CORE, needs_core
from support.gradients import parameters_with
from support.processes import run_python

import fastamp
from fastamp import _ops
from fastamp._ops import choose
from fastamp._ops.choose import install_again

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_the_choice_follows_the_device():
    for other in ("meta", "mps"):
        assert _ops.backend_for(torch.device(other)) is _ops.core_for(torch.device(other)) is None
    backend = _ops.backend_for(CPU)
    assert (backend is not None) == (_ops.core_for(CPU) is not None) == HAS_CORE
    if HAS_CORE:
        assert (backend.device, backend.is_apart) == (CPU, False)
        assert _ops.core_for(CPU) is _ops.core()
    with _ops.use_only("fallback"):
        assert _ops.backend_for(CPU) is _ops.core_for(CPU) is None
    assert (_ops.backend_for(CPU) is not None) == HAS_CORE


@pytest.mark.cuda
def test_cuda_tensors_go_to_the_cuda_backend(device):
    assert fastamp.backends()[0] == "cuda"
    there = torch.ones(3, device=device).device
    backend = _ops.backend_for(there)
    assert (backend.device, backend.is_apart) == (there, True)
    with _ops.use_only("cpu"):
        assert _ops.backend_for(there) is None


@pytest.mark.parametrize("name", fastamp.backends())
def test_the_environment_variable_narrows_the_choice(name):
    result = run_python("import fastamp; print(fastamp.backends())", FASTAMP_BACKEND=name)
    expected = [name] if name == "fallback" else [name, "fallback"]
    assert result.stdout.strip() == str(expected), result.stderr


@pytest.fixture(scope="module")
def listed():
    """Return what another process finds, whatever tests have done to this one."""
    code = "import fastamp; print(*fastamp.backends(), sep=', ')"
    return run_python(code, FASTAMP_BACKEND="").stdout.strip()


@pytest.mark.parametrize("name", ["cuda", "cpu", "cdua"])
def test_a_backend_that_is_not_there_is_refused_with_the_list(name, listed):
    if name in listed:
        pytest.skip(f"{name} is there")
    result = run_python("import fastamp", FASTAMP_BACKEND=name)
    assert result.returncode != 0
    said = f"RuntimeError: FASTAMP_BACKEND='{name}' is not available here; available: {listed}"
    assert said in result.stderr


@needs_core
def test_an_older_torch_refuses_a_compiled_backend_with_the_list():
    code = "import torch; del torch.Tensor.__dlpack_c_exchange_api__; import fastamp"
    said = run_python(code, FASTAMP_BACKEND="cpu").stderr
    assert "RuntimeError: FASTAMP_BACKEND='cpu' is not available here; available: fallback" in said
    assert "needs torch 2.10 or later" in said


@pytest.fixture
def chosen_anew(monkeypatch):
    """Forget the choice, before and after."""
    caches = choose._core, choose._tables, choose._warn_of

    def forget():
        choose._handles.clear()
        for cached in caches:
            cached.cache_clear()

    monkeypatch.setattr(choose, "_only", None)
    monkeypatch.delenv("FASTAMP_BACKEND", raising=False)
    forget()
    yield
    forget()


def served_with_warnings(device):
    """Return whether the core serves a device each time that it is asked, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (is_served,) = {_ops.backend_for(device) is not None for _ in range(3)}
    return is_served, [str(warning.message) for warning in caught]


def test_a_torch_without_the_exchange_table_gets_the_fallback_and_is_told_once(
    chosen_anew, monkeypatch
):
    native = pytest.importorskip("fastamp._native")
    monkeypatch.setattr(native, "has_exchange_table", False)
    is_served, (said,) = served_with_warnings(CPU)
    assert not is_served
    assert "needs torch 2.10 or later" in said
    assert "--upgrade 'torch>=2.10'" in said
    assert "needs torch 2.10 or later" in choose.why_fallback(GPU)
    assert served_with_warnings(GPU) == (False, [])
    assert (fastamp.backends(), _ops.core()) == (["fallback"], None)


def test_who_asks_for_the_fallback_is_not_told(chosen_anew, monkeypatch):
    native = pytest.importorskip("fastamp._native")
    monkeypatch.setattr(native, "has_exchange_table", False)
    monkeypatch.setattr(choose, "_only", "fallback")
    monkeypatch.setenv("FASTAMP_BACKEND", "fallback")
    for device in (CPU, GPU):
        assert served_with_warnings(device) == (False, [])
        assert choose.why_fallback(device).split(".")[0] == "FASTAMP_BACKEND=fallback is set"


@needs_core
@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
def test_a_cuda_device_that_the_kernels_cannot_run_on_is_named_once(chosen_anew):
    is_served, (said,) = served_with_warnings(GPU)
    assert not is_served
    is_built = _ops.core().built_with_cuda
    why = "update the" if is_built else f"fastamp was built without CUDA code: {choose.NO_CUDA}"
    assert said.startswith("the slower pure-Python fallback is used (FASTAMP_BACKEND=fallback ")
    assert why in said
    assert said.endswith(install_again())
    with _ops.use_only("fallback"):  # who asks for it need not be told
        assert served_with_warnings(GPU) == (False, [])


@needs_core
@pytest.mark.parametrize(
    "error",
    [
        None,
        "the NVIDIA driver is for CUDA 11.8; update the driver",
        "CUDA error in reduce_kernel: cudaErrorNoKernelImageForDevice",
    ],
)
def test_a_cuda_device_is_probed_before_the_first_launch(chosen_anew, monkeypatch, error):
    core, probed = _ops.core(), []

    def check_device(index):
        probed.append(index)
        if error is not None:
            raise RuntimeError(error)

    monkeypatch.setattr(core, "check_device", check_device)
    monkeypatch.setattr(core, "built_with_cuda", True)
    monkeypatch.setattr(choose, "_tables", lambda: {"cuda": (core.cpu_ops, True)})
    for index in range(2):
        is_served, said = served_with_warnings(torch.device("cuda", index))
        assert is_served == (error is None)
        assert [error in message for message in said] == ([] if error is None else [True])
    assert probed == [0, 1]


@needs_core
def test_the_first_use_of_a_gpu_in_a_capture_is_refused_and_forgotten(chosen_anew, monkeypatch):
    core, probed = _ops.core(), []
    monkeypatch.setattr(core, "check_device", probed.append)
    monkeypatch.setattr(core, "built_with_cuda", True)
    monkeypatch.setattr(choose, "_tables", lambda: {"cuda": (core.cpu_ops, True)})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"first use .* on cuda:0 .*: make one step before"):
        _ops.backend_for(GPU)
    assert probed == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    backend = _ops.backend_for(GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _ops.backend_for(GPU) is backend is not None
    assert probed == [0]


def test_the_folder_of_the_sources_is_named_where_it_is_imported(chosen_anew, monkeypatch):
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda _: None)
    said = "this folder has fastamp's sources. Fix it: run Python"
    with pytest.warns(UserWarning, match=f"slower pure-Python fallback .*: {said}"):
        assert (fastamp.backends(), _ops.core()) == (["fallback"], None)
    assert choose.why_fallback(CPU).startswith(said)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_pure_python_install_says_what_was_missing(chosen_anew, monkeypatch, device):
    find = choose.importlib.util.find_spec
    monkeypatch.setattr(
        choose.importlib.util, "find_spec", lambda n: None if n.endswith("_native") else find(n)
    )
    monkeypatch.setattr(choose, "NO_CUDA", "no C++ compiler was found")
    assert (fastamp.backends(), _ops.core()) == (["fallback"], None)
    is_served, said = served_with_warnings(device)
    why = "installed without its compiled code: no C++ compiler was found"
    assert choose.why_fallback(device).startswith(f"fastamp was {why}")
    assert not is_served
    assert [f"{why}. Fix it: " in message for message in said] == [True] * (device == GPU)


@needs_core
def test_beside_a_gpu_a_build_without_cuda_code_says_so_once(chosen_anew, monkeypatch):
    monkeypatch.setattr(_ops.core(), "built_with_cuda", False)
    monkeypatch.setattr(choose, "NO_CUDA", "no nvcc that works was found; there was no driver")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastamp.backends()  # no GPU
    choose._core.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.warns(UserWarning, match="pure-Python fallback") as caught:
        assert fastamp.backends() == fastamp.backends()
    (said,) = (str(warning.message) for warning in caught)
    assert "no nvcc that works was found; there was no driver. Fix it: FASTAMP_CUDA=ON " in said
    for index in range(2):  # said already
        assert served_with_warnings(torch.device("cuda", index)) == (False, [])


@needs_core
@pytest.mark.parametrize("argument", ["scale", "before", "skipped"])
@pytest.mark.parametrize(
    "value", [torch.ones((), dtype=torch.float64), torch.ones(0), torch.ones(4)[::2], "x"]
)
def test_the_core_refuses_a_wrong_buffer_by_name(argument, value):
    backend = _ops.backend_for(CPU)
    given = {"max_norm": 1.0, "only_finite": False, "scale": None, "before": None, "skipped": None}
    packed = backend.pack([torch.ones(10)])
    with pytest.raises(TypeError, match=f"^{argument}: expected a dense float32"):
        backend.grad_stats(packed, **given | {argument: value})


def test_tensors_of_two_devices_are_read_apart():
    with _ops.use_only("fallback"):
        grads = _ops.hold([torch.ones(2), torch.ones(3, device="meta"), torch.ones(1)])
        assert [len(part.tensors) for part in grads._parts] == [2, 1]


@pytest.mark.cuda
def test_gradients_on_the_cpu_and_the_gpu_share_one_norm(device):
    made = parameters_with(torch.full((1,), 3.0), torch.full((1,), 4.0, device=device))
    norm = fastamp.clip_grad_norm_(made, 1.0)
    assert norm.item() == 5.0
    assert norm.device.type == "cpu"
    assert made[1].grad.item() == pytest.approx(0.8)
