"""Steps of lean optimizers: exact weights in 16 + 16 bits, 8-bit states, equal bits everywhere."""

import contextlib
import math
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from support import lean, ranks
from support.drawn import EXAMPLES, hypothesis
from support.lean import FAMILY, OPTIONS, copies_of, everything, give, make, same_bits, train

import fastamp
from fastamp import _ops
from fastamp._ops import choose, formats

st = hypothesis.strategies
BOTH = pytest.mark.parametrize("exact", [True, False])
needs_ranks = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="no torch.distributed"
)


@pytest.mark.parametrize("case", FAMILY, ids=str)
@hypothesis.settings(EXAMPLES, max_examples=8)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 700)), min_size=1, max_size=4),
    st.lists(st.integers(0, 30_000), max_size=2),
    st.sets(st.integers(0, 3)),
)
@hypothesis.example([(70, 5), (7, 300), (2, 70_000)], [3, 0, 1025], {2})
def test_all_backends_get_the_same_bits(case, compiled, device, matrices, vectors, bad):
    sizes = [*matrices, *((size,) for size in vectors), (3, 64), (4, 3, 5, 7)]
    name, *formats_of = case
    found = []
    for backend, way in ((None, "native"), ("fallback", "fallback")):
        with contextlib.nullcontext() if backend is None else _ops.use_only(backend):
            parameters, optimizer = make(*formats_of, sizes, name)
            said = train(parameters, optimizer, 4, bad=bad)
        assert said == [(way, step in bad) for step in range(4)]
        found.append(everything(parameters, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["SGD", "Lion"])
def test_float32_steps_as_in_float64(name, backend, device):
    parameters, optimizer = make(torch.float32, "float32", True, [(4, 100), (9,)], name)
    group, expected = optimizer.param_groups[0], [p.detach().cpu().double() for p in parameters]
    states = [torch.zeros_like(each) for each in expected]
    rate, decay = group["lr"], group["weight_decay"]
    for step in range(6):
        give(parameters, step)
        optimizer.step()
        for place, parameter in enumerate(parameters):
            grad, weight, state = parameter.grad.cpu().double(), expected[place], states[place]
            if name == "SGD":
                state.mul_(group["momentum"]).add_(grad + decay * weight)
                weight -= rate * state
            else:
                beta1, beta2 = group["betas"]
                change = torch.sign(beta1 * state + (1 - beta1) * grad)
                state.mul_(beta2).add_((1 - beta2) * grad)
                weight -= rate * (change + decay * weight)
    for parameter, weight in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().cpu().double(), weight, rtol=1e-5, atol=1e-6)


def test_float32_is_bit_identical_to_torchs_adamw_in_fastamps_step(compiled, device):
    ours, optimizer = make(torch.float32, "float32", True)
    theirs = copies_of(ours)
    own, of_second = OPTIONS["AdamW"]
    groups = [{"params": theirs[:4]}, {"params": theirs[4:], **of_second}]
    torchs = torch.optim.AdamW(groups, **own, fused=True)
    assert train(ours, optimizer, 5) == train(theirs, torchs, 5)
    assert everything(ours, optimizer) == everything(theirs, torchs)


@pytest.mark.parametrize("name", OPTIONS)
def test_exact_weights_are_those_of_float32_over_a_thousand_steps(name, backend, device):
    sizes, steps = [(3, 100), (50,)], 1000 if backend != "fallback" else 100
    short, exact = make(torch.bfloat16, "8bit", True, sizes, name)
    wide, master = make(torch.float32, "8bit", True, sizes, name)
    bad = {0, 1, 7, 50}
    train(short, exact, steps, bad=bad)
    train(wide, master, steps, bad=bad)
    for ours, theirs in zip(exact.master_weights(), wide, strict=True):
        assert same_bits(ours, theirs)
    for ours, theirs in zip(short, wide, strict=True):
        assert (ours.float() - theirs).abs().max() <= theirs.abs().max() * 2**-8


def test_weights_that_get_no_gradient_decay_by_random_bits_of_their_own(backend, device):
    """Rows of an embedding without tokens: their first moments are all zero."""
    parameter = torch.nn.Parameter(torch.ones(2, 4096, dtype=torch.bfloat16, device=device))
    optimizer = fastamp.AdamW([parameter], lr=1e-3, weight_decay=1.0, exact=False)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert (parameter < 1).float().mean().item() == pytest.approx(0.001 / 2**-8, abs=0.05)


def test_weights_in_halves_give_back_every_float32(backend, device):
    ends = [0.0, -0.0, math.inf, -math.inf, 3.4e38, 1e-45, -1e-45, 65504.5]
    values = torch.randint(-(2**31), 2**31, (100_000,)).to(torch.int32).view(torch.float32)
    values = torch.cat([values[~values.isnan()], torch.tensor(ends)]).to(device)
    optimizer = fastamp.AdamW([torch.zeros_like(values, dtype=torch.bfloat16)])
    optimizer.load_master_weights([values])
    assert same_bits(optimizer.master_weights()[0], values)


@pytest.mark.parametrize(("signed", "top"), [(True, 247), (False, 63487 + 1 / 32)])
def test_a_decoded_code_is_encoded_as_itself_with_any_scale(signed, top):
    # A row is a block of all codes; its largest one gives the scale that it was decoded with.
    # Scales are any float32 and the ends of the range; noise is the least and the most.
    ends = torch.tensor([2**-100 / top, torch.finfo(torch.float32).max / top]).view(torch.int32)
    drawn = torch.randint(1, 0x7F800000, (100_000,), generator=torch.Generator().manual_seed(0))
    drawn[:20] = (ends[:, None] + torch.arange(-5, 5)).flatten()
    codes = torch.arange(256).to(torch.uint8).expand(250, 256)
    noises = [None] * signed
    noises += [torch.full_like(codes, n, dtype=torch.int32) for n in (0, -1)]
    for scales in drawn.to(torch.int32).view(torch.float32).split(250):
        values = formats.decode(codes, scales[:, None], signed=signed)
        is_small, is_large = scales * top < 2**-100, (scales * top).isinf()
        is_kept = ~is_small & ~is_large
        for noise in noises:
            again, found = formats.encode(values, signed=signed, noise=noise)
            assert torch.equal(again[is_kept], codes[is_kept])
            assert ((found[:, 0] - scales).abs() <= scales * 2e-7)[is_kept].all()
            assert not found[is_small].any()
            assert found[is_large].isinf().all()


def test_codes_are_within_a_thirty_second_part():
    values = torch.exp2(-16 * torch.rand(100, 256, generator=torch.Generator().manual_seed(0)))
    for signed in (True, False):
        codes, scales = formats.encode(values, signed=signed)
        error = (formats.decode(codes, scales, signed=signed) - values).abs()
        smallest = values.amax(dim=1, keepdim=True) / (247 if signed else 63487)
        assert (error <= values / 32 + smallest / 16).all()


@pytest.mark.parametrize("moments", ["bfloat16", "8bit"])
@pytest.mark.parametrize(
    ("name", "state", "factor", "options"),
    [
        ("AdamW", "exp_avg_sq", 0.999, {}),
        ("SGD", "momentum_buffer", 0.999, {"momentum": 0.999}),
        ("Lion", "exp_avg", 0.99, {"betas": (0.9, 0.99)}),
    ],
)
def test_a_moment_that_decays_slowly_is_not_stuck(
    name, state, factor, options, moments, backend, device
):
    """Codes are 3 to 6 % apart: one element of a block keeps the block's scale."""
    parameter = torch.nn.Parameter(torch.zeros(2, 4096, device=device))
    optimizer = getattr(fastamp, name)([parameter], lr=0.0, moments=moments, **options)

    def read():
        wide = getattr(fastamp, name)([parameter], **options)
        wide.load_state_dict(optimizer.state_dict())
        return wide.state[parameter][state]

    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    first = read()
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(100):
        largest = (1 - factor) * first[0, 0] * (100 if name == "Lion" else 1)
        parameter.grad[:, ::256] = 1.0 if name == "AdamW" else largest
        optimizer.step()
    decayed = (read() / first)[:, 1:256].mean().item()
    assert decayed == pytest.approx(factor**100, rel=0.05)


def test_all_ways_to_step_have_the_same_bits(backend, device):
    found = []
    ways = ["zero_grad", "scaler", "hooked", "bare", "overridden", "torch's scaler"]
    for how in ways[: 5 if device == "cuda" else 6]:  # torch's has no bfloat16 on a GPU
        parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100), (9,)])
        if how == "overridden":
            own = {"step": lambda self, *_: fastamp.AdamW.step(self)}
            optimizer.__class__ = type("Own", (fastamp.AdamW,), own)
        cls = torch.amp.GradScaler if how == "torch's scaler" else fastamp.GradScaler
        scaler = cls(device, init_scale=4.0)
        called = []
        if how == "hooked":
            optimizer.register_step_post_hook(lambda *_, called=called: called.append(1))
        for step in range(3):
            give(parameters, step)
            if "scaler" in how:
                scaler.scale(torch.ones((), device=device))
                for parameter in parameters:
                    parameter.grad *= 4
                scaler.step(optimizer)
                scaler.update()
            elif how == "bare":
                assert optimizer.step(lambda: 1.5) == 1.5
            else:
                fastamp.optimizer_step(optimizer, zero_grad=how == "zero_grad")
        assert len(called) == 3 * (how == "hooked")
        found.append(everything(parameters, optimizer)[:2])
    assert found == [found[0]] * len(found)


def test_weights_that_were_set_to_zero_stay_numbers(backend, device):
    parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100)])
    train(parameters, optimizer, 2, bad=())
    with torch.no_grad():
        parameters[0].fill_(-0.0)  # a pruned weight: its lower half belongs to another one
    assert (optimizer.master_weights()[0].abs() < 2**-126).all()
    train(parameters, optimizer, 1, first=2, bad=())
    assert parameters[0].isfinite().all()


@pytest.mark.parametrize("number", [np.float32, np.float64, torch.tensor], ids="fdt")
def test_numbers_of_numpy_and_tensors_are_floats_to_it(number, compiled, device):
    """The core reads floats: these led into Python, 80 times as slow."""
    results = []
    for as_number in (number, float):
        parameter = torch.nn.Parameter(torch.ones(4, 100, device=device))
        options = {name: as_number(0.25) for name in ("weight_decay", "eps", "lr")}
        optimizer = fastamp.AdamW([parameter], betas=(as_number(0.5), as_number(0.75)), **options)
        parameter.grad = torch.ones_like(parameter)
        assert fastamp.optimizer_step(optimizer).way == "native"
        assert type(optimizer.param_groups[0]["eps"]) is float
        results.append(parameter.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("name", "nbytes"), [("AdamW", (8, 6 + 4, 4 + 12)), ("SGD", (7, 8, 12)), ("Lion", (7, 8, 12))]
)
def test_bytes_of_gpt_2s_layers_are_half(name, nbytes):
    shapes = [(1024, 768), (768,), (2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,)]
    for moments, expected in zip(("8bit", "bfloat16", "float32"), nbytes, strict=True):
        dtype = torch.float32 if moments == "float32" else torch.bfloat16
        parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        options = OPTIONS[name][0]
        optimizer = getattr(fastamp, name)(parameters, **options, moments=moments)
        optimizer.step()
        held = [t for p in parameters for t in (p, p.grad, *optimizer.state[p].values())]
        elements = sum(p.numel() for p in parameters)
        found = sum(t.untyped_storage().nbytes() for t in held) / elements
        assert expected - 0.01 <= found <= expected + 0.1


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("AdamW", {"moments": "4bit"}, r"moments: expected one of \('float32', .* got '4bit'"),
        ("AdamW", {"moments": "8bit", "eps": 0.0}, "eps: expected at least 1e-12 with moments='8"),
        ("AdamW", {"amsgrad": True}, "amsgrad=True: fastamp.AdamW does not .* torch.optim.AdamW"),
        ("AdamW", {"differentiable": True}, "differentiable=True"),
        ("AdamW", {"lr": -1.0}, "lr: expected a number of at least 0, got -1.0"),
        ("AdamW", {"lr": torch.ones(2)}, "lr: expected a number, got tensor"),
        ("AdamW", {"betas": (0.9, 1.0)}, "betas: expected two numbers"),
        ("AdamW", {"eps": "x"}, "eps: expected a number, got 'x'"),
        ("AdamW", {"seed": -1}, "seed: expected an integer"),
        ("SGD", {"dampening": 0.5}, "dampening=0.5: fastamp.SGD does not support .* torch.optim"),
        ("SGD", {"momentum": -1}, "momentum: expected a number of at least 0, got -1"),
    ],
)
def test_a_wrong_argument_is_named(name, options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        getattr(fastamp, name)([torch.nn.Parameter(torch.zeros(4, 64))], **options)


def test_parameters_and_gradients_of_other_kinds_are_refused_by_name():
    weight = torch.nn.Parameter(torch.zeros(4, 64))
    with pytest.raises(TypeError, match=r"param_groups\[0\]\['params'\]\[1\] is torch.float16"):
        fastamp.AdamW([weight, torch.nn.Parameter(torch.zeros(3).half())])
    optimizer = fastamp.AdamW([weight], fused=False, foreach=True, capturable=True)  # no effect
    weight.grad = torch.zeros(4, 64).to_sparse()
    with pytest.raises(RuntimeError, match=r"cannot make this step: .*a gradient's dtype, layout"):
        optimizer.step()
    flat = torch.nn.Parameter(torch.zeros(100_000))
    with pytest.warns(UserWarning, match=r"saves nothing for most of param_groups\[0\]"):
        fastamp.SGD([weight, flat], momentum=0.9, moments="8bit")


def test_frozen_parameters_may_have_any_dtype(backend):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64).half().requires_grad_(False))
    model.append(torch.nn.Linear(64, 4))
    optimizer = fastamp.AdamW(model.parameters(), moments="8bit")
    give([*model[1].parameters()], 0)
    fastamp.optimizer_step(optimizer, max_norm=1.0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(optimizer.state) == 2
    model.requires_grad_(True)
    give([*model.parameters()], 1)
    with pytest.raises(RuntimeError, match=r"a parameter"):
        optimizer.step()


@BOTH
def test_master_weights_can_be_loaded(exact, backend, device):
    parameters, optimizer = make(torch.bfloat16, "8bit", exact, [(4, 100), (9,)])
    weights = [torch.randn(p.shape) for p in parameters]
    optimizer.load_master_weights(weights)
    for got, new, p in zip(optimizer.master_weights(), weights, parameters, strict=True):
        assert torch.equal(got.cpu(), new if exact else new.bfloat16().float())
        assert (p.cpu().float() - new).abs().max() <= new.abs().max() * 2**-8
    said = r"weights: expected tensors of the shapes .* got \[\(9,\)\]"
    with pytest.raises(ValueError, match=said):
        optimizer.load_master_weights(weights[1:])


def test_without_compiled_code_the_way_is_fallback_and_there_is_one_warning():
    reason = "nothing was built"
    choose._warn_of.cache_clear()
    with (
        mock.patch.object(choose, "_only", None),
        mock.patch.object(choose, "_core", return_value=reason),
        mock.patch.object(choose, "_tables", return_value={}),
        mock.patch.object(choose, "_handles", choose._Handles()) as handles,
        mock.patch.object(_ops, "backend_for", handles.__getitem__),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100)])
        assert train(parameters, optimizer, 2, bad=()) == [("fallback", False)] * 2
        optimizer.step()
    (warning,) = seen
    assert "fallback is used" in str(warning.message)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_changes_no_bit(default, backend, device):
    found, before = [], torch.get_default_dtype()
    for dtype in (torch.float32, default):
        theirs, torchs = make(torch.float32, "float32", True, [(4, 100)])
        train(theirs, torchs, 1)
        parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100)])
        give(parameters, 0)
        torch.set_default_dtype(dtype)
        try:
            optimizer.load_state_dict(fastamp.to_torch(torchs.state_dict()))
            for _ in range(2):
                fastamp.optimizer_step(optimizer, max_norm=1.0)
        finally:
            torch.set_default_dtype(before)
        found.append(everything(parameters, optimizer))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def three():
    with ranks.start(3) as started:
        yield started


@needs_ranks
def test_shards_step_as_the_whole_and_move_to_other_numbers_of_ranks(three):
    for case in (("AdamW", True), ("SGD", False), ("Lion", True)):
        (alone,) = three.run(1, lean.sharded_run, 1, None, 4, 0, *case)
        state, first = None, 0
        for count in (2, 3):
            found = three.run(count, lean.sharded_run, count, state, 2, first, *case)
            state, first = found[0], first + 2
        lean.assert_same(state, alone)


@needs_ranks
def test_shards_step_in_torchs_operators(three):
    (alone,) = three.run(1, lean.sharded_run, 1, None, 2, 0)
    found = three.run(2, lean.sharded_run_of_fallback, 2)
    lean.assert_same(found[0], alone)


@needs_ranks
def test_8_bits_refuse_tensor_parallel_shards_when_they_are_made(three):
    for said in three.run(2, lean.tensor_parallel_refusal):
        assert "['params'][0] is a DTensor that is not sharded by its first dimension" in said
