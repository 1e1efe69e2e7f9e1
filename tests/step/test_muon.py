"""torch's Muon, stepped by fastamp: alone, in groups, and beside AdamW."""

import copy
import math
import re
import warnings

import pytest
import torch
from support import muon_ranks, ranks
from support.bits import bits
from support.gradients import random
from support.training import make_scaler

import fastamp
from fastamp import _ops
from fastamp.step import muon
from fastamp.step.optimizer_step import optimizer_step

if "cpu" not in fastamp.backends():
    pytest.skip("needs the compiled core", allow_module_level=True)
if not hasattr(torch.optim, "Muon"):
    pytest.skip("this torch has no Muon", allow_module_level=True)

SHAPES = [(48, 32), (32, 48), (1, 40), (32, 32), (48, 32), (40, 1), (128, 64), (32, 48), (1, 1)]
OPTIONS = {
    "default": {},
    "no nesterov": {"nesterov": False},
    "near end": {"momentum": 0.3, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.5},
    "cubic": {"ns_coefficients": (1.5, -0.5, 0.0)},
    "other products": {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
}
NOT_PACKED = "a matrix's dtype, layout or device, or tensors share their memory"
NEAR = {"cpu": 1e-4, "cuda": 1e-3}
"""How far a few steps are from torch's: cuBLAS may add the products of a stack in another order."""


def make(device="cpu", dtype=torch.float32, shapes=SHAPES, **options):
    """Return matrices, the same each time, and torch's Muon with two groups that differ."""
    made = [
        torch.nn.Parameter(random(shape, dtype, device, seed=i)) for i, shape in enumerate(shapes)
    ]
    groups = [{"params": made[:3]}, {"params": made[3:], "lr": 0.05, "momentum": 0.8}]
    return made, torch.optim.Muon(
        [group for group in groups if group["params"]], **{"lr": 0.02, **options}
    )


def give(parameters, step, scale=1.0):
    for i, p in enumerate(parameters):
        p.grad = (random(p.shape, torch.float32, "cpu", seed=1000 * step + i) * scale).to(p)


def own_step(optimizer, **given):
    report = optimizer_step(optimizer, **given)
    assert report.way == "native"
    return report


def torchs_step(optimizer):
    optimizer.step()


def everything(parameters, optimizer):
    """Return copies of all weights and states."""
    states = [optimizer.state[p]["momentum_buffer"] for p in parameters]
    return [t.detach().clone() for t in [*parameters, *states]]


def train(step, steps, device="cpu", **options):
    parameters, optimizer = make(device, **options)
    for i in steps:
        give(parameters, i)
        step(optimizer)
    return everything(parameters, optimizer)


def error(ours, theirs):
    """Return the largest error of a matrix, as a part of its norm."""
    return max(
        ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()
        for a, b in zip(ours, theirs, strict=True)
    )


def same_bits(ours, theirs):
    return all((bits(a) == bits(b)).all() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("options", OPTIONS)
def test_steps_are_torchs_but_for_roundings(options, steps, compiled, device):
    """The products are torch's operations, on the CPU with the same bits; its lerp_ has an FMA.

    So the momentum differs in its last bit, and now and then a direction in the last of bfloat16's
    8 bits. Measured: of a matrix's norm at most 1e-5 after 1 step, and 3.4e-4 after 50.
    """
    count = 2 if (steps, compiled) == (20, "emulated") else steps
    ours, theirs = (
        train(step, range(count), device, **OPTIONS[options]) for step in (own_step, torchs_step)
    )
    assert error(ours, theirs) < NEAR[device] * (10 if steps == 20 else 1)
    buffers = len(SHAPES)
    assert error(ours[buffers:], theirs[buffers:]) < 1e-6


def test_bfloat16_is_float32_rounded_once(compiled, device):
    made, optimizer = make(device, torch.bfloat16)
    wide, reference = make(device, torch.bfloat16)
    for p in wide:
        p.data = p.data.float()
    for parameters, each in ((made, optimizer), (wide, reference)):
        for i, p in enumerate(parameters):
            p.grad = random(p.shape, torch.bfloat16, device, seed=i).to(p.dtype)
        own_step(each)
    expected = [tensor.bfloat16() for tensor in everything(wide, reference)]
    assert same_bits(everything(made, optimizer), expected)


@pytest.mark.parametrize("zero_grad", [False, True])
def test_overflows_leave_no_trace(zero_grad, compiled, device):
    overflows, last = {1, 2, 20}, 4 if compiled == "emulated" else 22
    parameters, optimizer = make(device)
    scaler = make_scaler(fastamp.GradScaler, device)
    for step in range(1, last + 1):
        scaler.scale(torch.ones((), device=device))
        give(parameters, step, scaler.get_scale())
        before = [p.detach().clone() for p in parameters]
        if step in overflows:
            parameters[step % len(parameters)].grad[0, 0] = math.inf
        grads = [p.grad for p in parameters]
        values = [grad.clone() for grad in grads]
        scaler.step(optimizer, zero_grad=zero_grad)
        assert scaler.last_step.way == "native"
        assert scaler.last_step.skipped == (step in overflows)
        if step in overflows:
            assert same_bits(parameters, before)
            assert same_bits(grads, values)
        assert all((p.grad is None) == zero_grad for p in parameters)
        scaler.update()
    taken = [step for step in range(1, last + 1) if step not in overflows]
    assert scaler.skipped_steps == last - len(taken)
    ours = everything(parameters, optimizer)
    assert same_bits(ours, train(own_step, taken, device))
    assert error(ours, train(torchs_step, taken, device)) < 10 * NEAR[device]


@pytest.mark.parametrize("value", [1.0, math.inf])
def test_nothing_waits_for_a_device(value, apart, device, monkeypatch):
    parameters, optimizer = make(device)
    adamw = torch.optim.AdamW(parameters[-1:])
    optimizer.param_groups[1]["params"].pop()
    scaler = make_scaler(fastamp.GradScaler, device)
    scaler.scale(torch.ones((), device=device))
    give(parameters, 0, value)
    before = [p.detach().clone() for p in parameters]
    for name in ("item", "__bool__", "__float__", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("it waits"))
    scaler.step([optimizer, adamw], max_norm=1.0, zero_grad=True)
    monkeypatch.undo()
    assert scaler.last_step.way == "native"
    assert scaler.last_step.skipped == math.isinf(value) == same_bits(parameters, before)


def test_a_skipped_step_on_the_cpu_multiplies_nothing(monkeypatch):
    parameters, optimizer = make()
    give(parameters, 0, math.inf)
    monkeypatch.setattr(muon, "orthogonalize_", lambda *_: pytest.fail("it multiplies"))
    with _ops.use_only("cpu"):
        assert own_step(optimizer, max_norm=1.0).skipped


@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_a_gradient_of_zeros_or_nan_is_its_own_matrixs(bad, compiled, device):
    """Without a scaler and a bound nothing is checked, as in torch."""
    found = {}
    for step in (own_step, torchs_step):
        parameters, optimizer = make(device)
        give(parameters, 0)
        parameters[1].grad.fill_(bad)
        step(optimizer)
        found[step] = everything(parameters, optimizer)
    for ours, theirs in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert found[own_step][1].isnan().all() == math.isnan(bad)
    assert not any(p.isnan().any() for i, p in enumerate(found[own_step]) if i % len(SHAPES) != 1)


def both(parameters):
    """Return a Muon of all parameters but the last two, and an AdamW of these."""
    return [
        torch.optim.Muon(parameters[:-2], lr=0.02),
        torch.optim.AdamW(parameters[-2:], lr=1e-2),
    ]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_muon_and_adamw_are_one_step(max_norm, zero_grad, scaled, compiled, device):
    ours, _ = make(device)
    theirs, _ = make(device)
    own, stock = both(ours), both(theirs)
    scaler = fastamp.GradScaler(device, init_scale=2.0**16, enabled=scaled)
    for step in range(3):
        scaler.scale(torch.ones((), device=device))
        for parameters in (ours, theirs):
            give(parameters, step, 2.0**16 if scaled and parameters is ours else 1.0)
        scaler.step(own, max_norm=max_norm, zero_grad=zero_grad)
        scaler.update()
        assert scaler.last_step.way == "native"
        norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        for optimizer in stock:
            optimizer.step()
        torch.testing.assert_close(scaler.last_step.norm, norm, rtol=1e-6, atol=0)
        if zero_grad:
            assert all(p.grad is None for p in ours)
        else:
            grads = [[p.grad for p in parameters] for parameters in (ours, theirs)]
            torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)
    assert error(ours, theirs) < NEAR[device]


@pytest.mark.parametrize(
    "without", [slice(1, 2), slice(-2), slice(-2, None)], ids=["a matrix", "muon", "adamw"]
)
def test_what_has_no_gradient_is_left_alone(without, compiled, device):
    parameters, _ = make(device)
    optimizers = both(parameters)
    give(parameters, 0)
    for p in parameters[without]:
        p.grad = None
    before = [p.detach().clone() for p in parameters]
    schedules = [torch.optim.lr_scheduler.ConstantLR(each) for each in optimizers]
    assert fastamp.optimizer_step(optimizers, 1.0).way == "native"
    for p, old in zip(parameters, before, strict=True):
        assert same_bits([p], [old]) == (p.grad is None)
    assert not any(p in each.state for p in parameters[without] for each in optimizers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a schedule that steps before its optimizer
        for schedule in schedules:
            schedule.step()


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("by_state", [True, False])
def test_torchs_own_step_and_schedulers_may_come_between(by_state, as_tensor, compiled, device):
    """The state is torch's: `optimizer.step()` goes on with it, and so does another optimizer."""
    found = []
    for steps in ((own_step, torchs_step), (torchs_step, torchs_step)):
        parameters, optimizer = make(device)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"]) if as_tensor else group["lr"]
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for i in range(6):
            give(parameters, i)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of a schedule that steps before its optimizer
                steps[i % 2](optimizer)
                schedule.step()
            if by_state:
                state = copy.deepcopy(optimizer.state_dict())
                groups = [{"params": group["params"]} for group in optimizer.param_groups]
                optimizer = torch.optim.Muon(groups)
                optimizer.load_state_dict(state)
                last_epoch = schedule.last_epoch
                schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9, last_epoch)
        found.append(everything(parameters, optimizer))
    assert error(*found) < NEAR[device]


def test_bits_do_not_depend_on_the_size_of_a_stack(compiled, monkeypatch):
    whole = train(own_step, range(2), "cpu")
    sizes, orthogonalize = [], muon.orthogonalize_
    monkeypatch.setattr(muon, "CPU_STACK", 1)
    monkeypatch.setattr(
        muon, "orthogonalize_", lambda *given: sizes.append(len(given[0])) or orthogonalize(*given)
    )
    assert same_bits(train(own_step, range(2), "cpu"), whole)
    assert sizes == [1] * 2 * len(SHAPES)


def with_option(name, value):
    def change(_, optimizer):
        optimizer.param_groups[1][name] = value

    return change


def with_hook(_, optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)


def with_newer_option(_, optimizer):
    optimizer.defaults["maximize"] = False


def with_float64(parameters, _):
    grad, parameters[0].grad = parameters[0].grad.double(), None
    parameters[0].data = parameters[0].data.double()
    parameters[0].grad = grad


def with_another_order(parameters, _):
    parameters[1].data = parameters[1].data.t().contiguous().t()


def with_another_order_of_a_gradient(parameters, _):
    parameters[1].grad = parameters[1].grad.t().contiguous().t()


def with_an_empty_one(parameters, optimizer):
    parameters[0].grad = None
    parameters[0].data = torch.zeros(0, 4)
    parameters[0].grad = torch.zeros(0, 4)


def with_memory_that_overlaps(parameters, _):
    values = torch.cat([parameters[6].data.view(-1), torch.zeros(512)])
    parameters[6].data = values[:8192].view(128, 64)
    parameters[3].data = values[-1024:].view(32, 32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_hook, ""),
        (with_newer_option, "fastamp does not know Muon's maximize"),
        (with_another_order, "is not contiguous"),
        (with_another_order_of_a_gradient, "is not contiguous"),
        (with_an_empty_one, "a matrix is empty"),
        (with_float64, NOT_PACKED),
        (with_memory_that_overlaps, NOT_PACKED),
        (with_option("adjust_lr_fn", "none of these"), "adjust_lr_fn"),
    ],
)
def test_what_fastamp_does_not_know_is_torchs(change, reason, compiled):
    found = []
    for is_ours in (True, False):
        parameters, optimizer = make("cpu")
        for step in range(2):  # the second one finds the states that torch has made
            give(parameters, step)
            if step == 0 or change is with_another_order_of_a_gradient:
                change(parameters, optimizer)
            if is_ours:
                way = fastamp.optimizer_step(optimizer, 1.0).way
                assert re.match(f"torch's: .*{reason}", way)
            else:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
        found.append(everything(parameters, optimizer))
    assert error(*found) < 1e-4


def sparse(parameters, _):
    parameters[0].grad = parameters[0].grad.to_sparse()


def with_momentum(change):
    def changed(parameters, optimizer):
        state = optimizer.state[parameters[0]]
        state["momentum_buffer"] = change(state["momentum_buffer"])

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_option("ns_steps", 100), "steps must be less"),
        (with_option("ns_coefficients", (1.0, 2.0)), "exactly 3"),
        (sparse, "Muon does not support sparse gradients"),
        (with_momentum(torch.Tensor.double), None),
        (with_momentum(lambda buffer: buffer[:1]), None),
    ],
)
def test_torch_raises_its_own_errors(change, message, compiled):
    parameters, optimizer = make("cpu")
    give(parameters, 0)
    own_step(optimizer)
    give(parameters, 1)
    change(parameters, optimizer)
    before = [parameter.detach().clone() for parameter in parameters]
    with pytest.raises((ValueError, RuntimeError), match=message):
        fastamp.optimizer_step(optimizer)
    assert message or same_bits(parameters, before)


@pytest.fixture(scope="module")
def four():
    if not torch.distributed.is_available():
        pytest.skip("no torch.distributed")
    with ranks.start(4) as started:
        yield started


@pytest.mark.parametrize(
    ("count", "layout", "options", "room"),
    [
        (2, "rows", {}, 1 << 20),
        (4, "rows", {}, 1 << 20),
        (4, "hsdp", {}, 1 << 20),
        (4, "rows", {"shapes": [(48, 32)]}, 1 << 20),  # three ranks multiply nothing
        (4, "rows", {"shapes": [(1, 5), (2, 3)]}, 1 << 20),  # ranks without rows
        (4, "rows", {"plain": (1, 3)}, 1 << 20),
        (4, "rows", {"enabled": False}, 1 << 20),
        (2, "rows", {}, 2048),
    ],
    ids=str,
)
def test_sharded_matrices_get_the_bits_of_whole_ones(count, layout, options, room, four):
    given = ("cpu", layout, options, room)
    for (ways, ours), (_, alone) in four.run(count, muon_ranks.in_backend, *given):
        assert ways == {"native"}
        assert ours == alone


@pytest.mark.parametrize(("count", "shares"), [(8, [2, 2, 2, 2]), (3, [1, 1, 1, 0])])
def test_ranks_share_the_products_and_compare_their_first_step_alone(count, shares, four):
    found = four.run(4, muon_ranks.counted, count)
    assert found == [([1] * 3 * share, 1) for share in shares]


def test_matrices_sharded_by_columns_are_torchs(four):
    reason = "torch's: a matrix is sharded by more than its rows"
    for ways, _ in four.run(2, muon_ranks.steps, "columns", [(32, 48)]):
        assert ways == {reason}


@pytest.mark.parametrize("unlike", ["muon", "gradient"])
@pytest.mark.parametrize(("layout", "ranks"), [("rows", [3]), ("hsdp", [0, 1])])
def test_ranks_whose_first_step_is_unlike_the_others_are_an_error_on_all(
    layout, ranks, unlike, four
):
    """They would wait for them, in a collective that these do not make."""
    expected = "Muon's sharded matrices need the same step hooks, and gradients of the same "
    expected += "matrices, on all ranks"
    found = four.run(4, muon_ranks.unlike, layout, unlike, ranks)
    for rank, (said, is_unchanged) in enumerate(found):
        assert said.startswith(expected)
        assert ("; here torch steps: " in said) == (unlike == "muon" and rank in ranks)
        assert is_unchanged


def test_what_some_ranks_lack_together_does_not_disturb_the_others(four):
    """As an expert's matrix on the ranks of the other experts."""
    everyone = four.run(4, muon_ranks.with_experts, [])
    assert four.run(4, muon_ranks.with_experts, [2, 3]) == everyone
    assert len({str(one) for one in everyone}) == 1


def test_fsdp2_trains_as_one_process(four):
    for (way, ours), (_, alone) in four.run(4, muon_ranks.trained_by_both):
        assert way == "native" or "cpu" not in fastamp.backends()
        torch.testing.assert_close(ours, alone, rtol=0, atol=1e-3)
