"""Which optimizers fastamp steps itself, who learns of it, and who gets torch's own step."""

import math
from unittest import mock

import pytest
import torch
from support.gradients import parameters_with
from support.training import SignMomentum
from support.updates import SIZES, everything, give, make

import fastamp


def given(name, sizes=SIZES[:2]):
    """Return parameters that have gradients, and their optimizer."""
    parameters, optimizer = make(name, sizes=sizes)
    give(parameters)
    return parameters, optimizer


def by_both(train, way):
    """Train with steps by fastamp, which go this way, and with torch's; return what both leave."""

    def our_step(optimizer, max_norm=1e9):
        assert fastamp.optimizer_step(optimizer, max_norm).way == way

    def torchs_step(optimizer, max_norm=None):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=False)
        optimizer.step()

    return train(our_step), train(torchs_step)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("adamw", {"foreach": True}, "foreach=True"),
        ("adamw", {"foreach": False}, "foreach=False"),
        ("sgd", {"fused": False}, "fused=False"),
        ("adamw", {"betas": (torch.tensor(0.9), torch.tensor(0.99))}, "betas is not a number"),
        ("adamw", {"amsgrad": True}, "amsgrad is not 0"),
        ("sgd, nesterov", {"nesterov": False, "dampening": 0.5}, "dampening is not 0"),
    ],
)
def test_what_was_asked_for_is_torchs(name, options, reason, compiled, device):
    if device == "cuda" and "betas" in options:
        pytest.skip("torch takes no tensors there: its loop is foreach")

    def train(step):
        parameters, optimizer = make(name, sizes=SIZES[:2], **options)
        give(parameters)
        step(optimizer)
        return everything(parameters, optimizer)

    ours, theirs = by_both(train, f"torch's: {reason}")
    assert ours == theirs


AdamW = torch.optim.AdamW
OVERRIDES = "torch's: fastamp has no update for Own"


def calling(function):
    def own(*args):
        return function(*args)

    return own


def subclass(**own):
    return type("Own", (AdamW,), own)


@pytest.mark.parametrize(
    ("cls", "way"),
    [
        (subclass(more=lambda self: self.state), "native"),
        (subclass(step=calling(AdamW.step)), OVERRIDES),
        (subclass(_init_group=calling(AdamW._init_group)), OVERRIDES),
        (subclass(__getattribute__=calling(object.__getattribute__)), OVERRIDES),
        (subclass(state=property(lambda o: o.own, lambda o, s: setattr(o, "own", s))), OVERRIDES),
        (lambda ps: SignMomentum(ps, 0.5), "torch's: fastamp has no update for SignMomentum"),
        (torch.optim.Adagrad, "torch's: fastamp has no update for Adagrad"),
    ],
)
def test_a_subclass_that_overrides_what_a_step_calls_steps_itself(cls, way, compiled):
    def train(step):
        parameters, _ = make("adamw", sizes=SIZES[:2])
        optimizer = cls(parameters)
        for seed in range(2):
            give(parameters, seed=seed)
            step(optimizer)
        return parameters

    torch.testing.assert_close(*by_both(train, way))


@pytest.mark.parametrize("autospec", [None, True])
@pytest.mark.parametrize("on_class", [True, False])
def test_a_mock_in_place_of_step_sees_one_call_and_nothing_else(on_class, autospec, backend):
    _, optimizer = given("sgd")
    target = torch.optim.SGD if on_class else optimizer
    with mock.patch.object(target, "step", autospec=autospec) as step:
        report = fastamp.optimizer_step(optimizer, max_norm=1.0)
    patched = (
        "fastamp has no update for SGD" if on_class else "hooks, patches or modes around the step"
    )
    assert report.way == f"torch's: {patched}"
    assert step.call_count == 1


def test_dense_layouts_are_updated_as_they_lie(compiled, device):
    def train(step):
        torch.manual_seed(0)
        data = torch.randn(2, 3, 4, 4, device=device).to(memory_format=torch.channels_last)
        parameter = torch.nn.Parameter(data)
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        for _ in range(2):
            parameter.grad = torch.randn_like(data)  # in its order of memory
            step(optimizer)
        return parameter.detach()

    torch.testing.assert_close(*by_both(train, "native"))


@pytest.mark.parametrize("begin", [0, 1, 5, 6])
@pytest.mark.parametrize("shared", ["parameter", "grad", "exp_avg"])
def test_tensors_that_share_memory_are_torchs_and_neighbours_are_not(
    shared, begin, compiled, device
):
    memory = torch.zeros(12, device=device)
    parameters = [torch.nn.Parameter(torch.ones(6, device=device)) for _ in range(2)]
    parameters.append(torch.nn.Parameter(memory[3:3]))
    optimizer = torch.optim.Adam(parameters)
    give(parameters)
    assert fastamp.optimizer_step(optimizer, max_norm=1e9).way == "native"
    for at, parameter in zip((begin, 0), parameters, strict=False):
        if shared == "parameter":
            parameter.data = memory[at : at + 6]
        elif shared == "grad":
            parameter.grad = memory[at : at + 6]
        else:
            optimizer.state[parameter][shared] = memory[at : at + 6]
    way = fastamp.optimizer_step(optimizer, max_norm=1e9).way
    assert way == ("native" if begin == 6 else "torch's: tensors share their memory")


def test_gradients_that_overlap_are_multiplied_once_each(compiled, device):
    memory = torch.ones(3000, device=device)
    parameters = [torch.nn.Parameter(torch.zeros(2000, device=device)) for _ in range(2)]
    for at, parameter in zip((1000, 0), parameters, strict=True):
        parameter.grad = memory[at : at + 2000]
    norm = fastamp.clip_grad_norm_(parameters, 1.0)
    expected = torch.full((3000,), 1 / norm.item(), device=device)
    expected[1000:2000] *= 1 / norm.item()
    torch.testing.assert_close(memory, expected)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_gradients_that_are_negated_views_are_torchs(cls, max_norm, compiled, device):
    """Autograd makes them where a part of a complex number is one parameter."""

    def train(step):
        parts = [torch.nn.Parameter(torch.tensor(value, device=device)) for value in (0.5, -2.0)]
        optimizer = cls(parts, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            ((torch.complex(*parts).conj() * (1 + 2j) - (3 - 1j)).abs() ** 2).backward()
            assert parts[1].grad.is_neg()
            step(optimizer, max_norm)
        return [part.item() for part in parts]

    ours, theirs = by_both(train, "torch's: a negated view")
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(
    ("max_norm", "value", "written"),
    [
        (1.0, 1.0, [True, True]),
        (1e9, 1.0, [True, False]),  # not clipped
        (None, 1.0, [True, False]),
        (1.0, math.inf, [False, False]),
    ],
)
def test_versions_count_what_is_written(max_norm, value, written, backend, device):
    """A graph that is kept may be gone through again where nothing of it is."""
    parameters, optimizer = given("adamw", SIZES[:1])
    parameters[0].grad[0] = value
    tensors = parameters[0], parameters[0].grad
    before = [tensor._version for tensor in tensors]
    fastamp.optimizer_step(optimizer, max_norm=max_norm)
    if backend in ("cuda", "emulated") and max_norm is not None:  # it does not tell the host
        written = [True, True]
    assert [t._version > b for t, b in zip(tensors, before, strict=True)] == written


def test_a_graph_whose_saved_tensors_are_cloned_is_gone_through_again(backend):
    def gradients(step):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            loss = parameter.square().sum()
            loss.backward(retain_graph=True)
            step(optimizer)
            optimizer.zero_grad()
            loss.backward()
        return parameter.grad.tolist()

    assert gradients(fastamp.optimizer_step) == gradients(torch.optim.SGD.step) == [2.0, 2.0]
    if torch.__version__ >= (2, 10):  # before, torch's own clipping fails there
        clip = gradients(lambda o: fastamp.clip_grad_norm_(o.param_groups[0]["params"], 0.1))
        assert clip == [2.0, 2.0]


def test_one_optimizer_or_several_may_have_no_gradients(backend):
    optimizers = [make("sgd", sizes=SIZES[:1])[1] for _ in range(2)]
    for each in (optimizers[0], optimizers):
        report = fastamp.optimizer_step(each, max_norm=1.0)
        assert (report.norm, report.clip_coef, report.skipped) == (0.0, 1.0, False)
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizers)


def test_who_replaces_the_unscaling_is_asked(backend):
    """As scripts do that train in float16, where torch refuses it."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    unscale = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda *args: unscale(*args[:-1], True)
    scaler.step(torch.optim.SGD([parameter], lr=0.5))
    assert parameter.tolist() == [0.75] * 3


def test_a_bare_step_makes_no_tensor_until_its_report_is_read(compiled):
    _, optimizer = given("adamw")
    fastamp.optimizer_step(optimizer)  # makes the state
    with torch.autograd.profiler.profile() as profile:
        report = fastamp.optimizer_step(optimizer)
    assert report.way == "native"
    assert [event.key for event in profile.key_averages()] == []
    assert (report.norm.isnan(), report.clip_coef, report.found_inf, report.scale) == (1, 1, 0, 1)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_an_option_that_fastamp_does_not_know_is_torchs(cls, compiled):
    """As of a newer torch."""
    optimizer = cls(parameters_with(torch.ones(3)), lr=1.0)
    optimizer.defaults["cautious"] = True
    report = fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert report.way == f"torch's: fastamp does not know {cls.__name__}'s cautious"
    known = cls(parameters_with(torch.ones(3)), lr=1.0)
    assert fastamp.optimizer_step(known, max_norm=1.0).way == "native"
