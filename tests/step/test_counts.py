"""Counts of steps that lie on the host while a device updates and skips, and what else lies apart.

The emulated kernels play the device: the CPU's tensors are taken for tensors that the host does not
see. What is expected comes from the fallback.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from contextlib import nullcontext

import pytest
import torch
from support.bits import bits
from support.emulated import count_launches
from support.gradients import parameters_with
from support.waits import ReadsRefused, sync_refused

import fastamp
from fastamp import _ops
from fastamp.step import counts, native

SIZES = [(3,), (70, 5), (0,), (1025,)]
OVERFLOWS = {0, 1, 4}
ADAMW, ADAGRAD = torch.optim.AdamW, torch.optim.Adagrad


class Run:
    """A training of four parameters in two groups, with steps that overflow."""

    def __init__(self, device, cls=ADAMW, sizes=SIZES, **options):
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(size, generator=generator) for size in sizes]
        self.parameters = [torch.nn.Parameter(value.to(device)) for value in values]
        groups = [{"params": self.parameters[:2]}, {"params": self.parameters[2:], "lr": 3e-3}]
        self.optimizer = cls(groups, **{"lr": 1e-2, **options})
        self.scaler = fastamp.GradScaler(device, init_scale=1024.0)
        self.number = 0

    def steps(self, count, *, left_out=()):
        """Make steps, to which some parameters have no gradient; return how the last was made."""
        for _ in range(count):
            generator = torch.Generator().manual_seed(self.number)
            for i, p in enumerate(self.parameters):
                grad = torch.randn(p.shape, generator=generator).to(p.device)
                p.grad = None if i in left_out else grad * self.scaler.get_scale()
            if self.number in OVERFLOWS:
                self.parameters[1].grad[0] = math.inf
            self.scaler.scale(torch.ones((), device=self.parameters[0].device))
            self.scaler.step(self.optimizer, max_norm=0.5)
            self.scaler.update()
            self.number += 1
        return self.scaler.last_step.way

    def counts(self):
        """Return what the state holds at the moment."""
        return [self.optimizer.state[p]["step"].item() for p in self.parameters]

    def everything(self):
        """Return all bits, after asking for the state."""
        states = self.optimizer.state_dict()["state"].values()
        tensors = [*self.parameters, *(t for state in states for t in state.values())]
        return [bits(t.detach()).tobytes() for t in tensors]


def assert_as_the_fallback(script, device, **options):
    """Run a script with and without a device that is apart: all is the same to the last bit."""
    ours = Run(device, **options)
    script(ours)
    with _ops.use_only("fallback"):
        theirs = Run("cpu", **options)
        script(theirs)
    assert ours.everything() == theirs.everything()
    return ours


def stepped(optimizer):
    optimizer.step()


def copied(optimizer):
    return copy.deepcopy(optimizer)


def pickled(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("cls", [ADAMW, ADAGRAD])
def test_counts_on_the_host_leave_out_skipped_steps_for_who_asks(apart, device, cls):
    for asks in (torch.optim.Optimizer.state_dict, copied, pickled, saved, stepped):
        run = Run(device, cls)
        assert run.steps(6) == "native"
        assert run.counts() == [6.0] * 4  # nobody has asked
        for p in run.parameters:
            p.grad = None
        copy_of = asks(run.optimizer)
        assert run.counts() == [3.0] * 4
        if isinstance(copy_of, cls):
            states = copy_of.state.values()
            assert [state["step"].item() for state in states] == [3.0] * 4


def test_bias_corrections_count_the_steps_that_were_taken(apart, device):
    for cls in (ADAMW, torch.optim.Adam, ADAGRAD):
        assert_as_the_fallback(lambda run: run.steps(7), device, cls=cls)
    assert_as_the_fallback(lambda run: run.steps(7), device, amsgrad=True, weight_decay=0.1)


def test_parameters_may_take_part_in_some_steps_only(apart, device):
    def script(run):
        for left_out in ((), (2,), (0, 3), (), (0, 3), (3,)):
            run.steps(1, left_out=left_out)

    run = assert_as_the_fallback(script, device)
    assert run.counts() == [2.0, 3.0, 3.0, 1.0]


def replace(run):  # by what the host has counted for the others
    run.optimizer.state[run.parameters[0]]["step"] = torch.tensor(float(run.number))


def write(run):
    run.optimizer.state[run.parameters[0]]["step"].fill_(20.0)


def give_other_memory(run):
    run.optimizer.state[run.parameters[0]]["step"].data = torch.tensor(float(run.number))


def lose(run):
    del run.optimizer.state[run.parameters[0]]


def load(run):
    state = copy.deepcopy(run.optimizer.state_dict())
    state["state"][0]["step"].fill_(20.0)
    run.optimizer.load_state_dict(state)


def load_own(run):
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def step_as_torch(run):
    handle = run.optimizer.register_step_post_hook(lambda *_: None)
    assert "there is a step hook" in run.steps(1)
    handle.remove()


def step_on_the_fallback(run):
    with _ops.use_only("fallback"):
        run.steps(1)


def add_parameters(run):
    run.parameters += parameters_with(*torch.zeros(9, 5, device=run.parameters[0].device))
    run.optimizer.add_param_group({"params": run.parameters[4:]})


@pytest.mark.parametrize("pending", [3, 5])
def test_counts_that_somebody_else_sets_hold_from_then_on(apart, device, pending):
    changes = [replace, write, give_other_memory, lose, load, load_own, step_on_the_fallback]
    for change in [*changes, add_parameters]:

        def script(run, change=change):
            run.steps(pending)
            change(run)
            assert run.steps(3).startswith("native")

        assert_as_the_fallback(script, device)


def test_torchs_steps_in_between_find_the_counts(apart, device):
    # Up to torch's first own step all bits are the same; its loop rounds otherwise.
    found = []
    for where, backend in ((device, apart), ("cpu", "fallback")):
        with _ops.use_only(backend if backend != "emulated" else "cpu"):
            run = Run(where)
            run.steps(3)
            step_as_torch(run)
            assert run.counts() == [2.0] * 4
            run.steps(3)
            run.optimizer.state_dict()
            found.append([t.cpu() for t in [*run.parameters, torch.tensor(run.counts())]])
    torch.testing.assert_close(*found)


def test_a_hook_sees_the_counts_of_steps_that_were_taken(apart, device):
    run = Run(device)
    run.steps(3)
    seen = []
    run.optimizer.register_step_pre_hook(lambda *_: seen.append(run.counts()))
    run.steps(1)
    assert seen == [[1.0] * 4]


def test_fused_groups_keep_their_counts_on_the_device(apart, device):
    def script(run):
        run.optimizer.param_groups[0]["fused"] = True
        run.steps(7)

    run = assert_as_the_fallback(script, device)
    steps = [run.optimizer.state[p]["step"].device.type for p in run.parameters]
    assert steps == [device, device, "cpu", "cpu"]


@pytest.fixture
def lists_refused(monkeypatch):
    """Return what refuses to make lists of tensors, which `ReadsRefused` does not see."""

    def refuse(_):
        pytest.fail("a tensor is read")

    return lambda: monkeypatch.setattr(torch.Tensor, "tolist", refuse)


def test_a_step_of_an_optimizer_left_open_waits_for_nothing(apart, device, lists_refused):
    lists_refused()
    rate = torch.tensor(0.01, device=device)
    for cls in (ADAMW, ADAGRAD, torch.optim.SGD):
        run = Run(device, cls, lr=rate)
        run.steps(2)
        grads = [torch.ones_like(p) for p in run.parameters]
        with sync_refused(device), ReadsRefused():
            for _ in range(2):
                for p, grad in zip(run.parameters, grads, strict=True):
                    p.grad = grad
                run.scaler.step(run.optimizer, max_norm=1.0)
                run.scaler.update()


def test_without_a_flag_counts_are_right_at_once(apart, device, lists_refused):
    run = Run(device)
    for p in run.parameters:
        p.grad = torch.ones_like(p)
    fastamp.optimizer_step(run.optimizer)
    assert run.counts() == [1.0] * 4
    lists_refused()
    run.optimizer.state_dict()


def test_copies_go_their_own_way(apart, device):
    run = Run(device)
    run.steps(2)
    for copies in (copied, pickled, saved):
        other = Run(device)
        other.optimizer = copies(run.optimizer)
        other.parameters = [p for g in other.optimizer.param_groups for p in g["params"]]
        other.number = 2
        assert other.steps(3) == "native"
        other.optimizer.state_dict()
        assert other.counts() == [2.0] * 4


def test_hooks_are_registered_once_and_leave_the_optimizer_to_the_collector(apart, device):
    run = Run(device)
    run.steps(5)
    optimizer = run.optimizer
    for kind in ("step_pre", "state_dict_pre", "load_state_dict_pre"):
        assert list(vars(optimizer)[f"_optimizer_{kind}_hooks"].values()) == [counts.settle]
    assert optimizer in counts._watched
    before = len(counts._watched)
    del run, optimizer
    assert len(counts._watched) == before - 1


def test_learning_rates_on_the_device_are_read_there(apart, device):
    def script(run):
        for step in range(4):
            for group in run.optimizer.param_groups:
                group["lr"].mul_(0.9)
            if step == 2:
                run.optimizer.param_groups[1]["lr"] = 0.5
                run.optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
            assert run.steps(1).startswith("native")
            if step == 2:
                break

    for cls in (ADAMW, torch.optim.SGD, ADAGRAD):
        where = "cpu" if apart == "emulated" else device

        def on_device(run, cls=cls, where=where):
            for group in run.optimizer.param_groups:
                at = where if run.parameters[0].device.type == where else "cpu"
                group["lr"] = torch.tensor(float(group["lr"]), device=at)
            script(run)

        assert_as_the_fallback(on_device, device, cls=cls)


def test_learning_rates_that_are_nowhere_near_are_torchs(apart, device):
    run = Run(device)
    run.steps(1)
    run.optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    assert native.read(run.optimizer) == "lr is not a number that can be read here"


def launches_of(parameters, groups, fused):
    """Return how many kernels a step launches beside those that read the gradients."""
    size = len(parameters) // groups
    made = [
        {"params": parameters[i * size : (i + 1) * size], "lr": 1e-3 / (1 + i)}
        for i in range(groups)
    ]
    optimizer = ADAMW(made, fused=fused)
    for p in parameters:
        p.grad = torch.ones_like(p)

    def step():
        return fastamp.optimizer_step(optimizer, max_norm=1.0)

    assert step().way == "native"
    grads = [p.grad for p in parameters]
    return count_launches(step) - count_launches(lambda: fastamp.get_total_norm(grads))


@pytest.mark.emulated
@pytest.mark.parametrize("fused", [True, None])
def test_launches_are_one_for_600_parameters_and_never_one_per_group(apart, fused):
    if apart != "emulated":
        pytest.skip("only the emulation counts launches")
    counts = 1 if fused else 0  # the launch that counts on the device
    for parameters, groups, expected in (
        (4, 2, 1),
        (148, 2, 1),
        (600, 2, 1),
        (600, 40, 1),
        (465, 465, 2),
        (2300, 1, 4),
    ):
        made = [torch.nn.Parameter(torch.ones(1 + i % 7)) for i in range(parameters)]
        assert launches_of(made, groups, fused) == expected + counts


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize(("number", "groups"), [(465, 465), (2300, 3), (700, 60), (17, 17)])
def test_many_parameters_and_groups_have_the_fallbacks_bits(apart, device, number, groups, fused):
    class Many(Run):
        def __init__(self, device, **_):
            super().__init__(device, sizes=[(1 + i % 5,) for i in range(number)])
            made = [{"params": [], "lr": 1e-3 * (1 + i), "weight_decay": i} for i in range(groups)]
            for i, p in enumerate(self.parameters):
                made[i * groups // number]["params"].append(p)
            self.optimizer = ADAMW(made, fused=fused)

    ours = Many(device)
    ours.steps(4)
    with _ops.use_only("fallback"):
        theirs = Many("cpu")
        theirs.steps(4)
    assert ours.everything() == theirs.everything()


def test_gradients_and_parameters_may_begin_anywhere_in_a_bucket(apart, device):
    found = []
    for where, backend in ((device, nullcontext()), ("cpu", _ops.use_only("fallback"))):
        with backend:
            generator = torch.Generator().manual_seed(0)

            def views(dtype, generator=generator, where=where):
                bucket = torch.randn(8 * 1031, generator=generator).to(where, dtype)
                return bucket.split(1031)  # an odd number

            dtypes = (torch.float32, torch.bfloat16, torch.float16)
            parameters = [torch.nn.Parameter(p) for dtype in dtypes for p in views(dtype)]
            optimizer = ADAMW(parameters, lr=0.1)
            for _ in range(2):
                grads = [grad for dtype in dtypes for grad in views(dtype)]
                for p, grad in zip(parameters, grads, strict=True):
                    p.grad = grad
                assert fastamp.optimizer_step(optimizer, max_norm=1.0).way.startswith("native")
            found.append([bits(p.detach()).tobytes() for p in parameters])
    assert found[0] == found[1]


def test_optimizers_and_parameters_on_several_devices_are_torchs(backend, device):
    made = [torch.nn.Parameter(torch.ones(3, device=where)) for where in (device, "meta")]
    for p in made:
        p.grad = torch.ones_like(p)
    assert native.read(ADAMW(made)) == "a parameter's dtype, layout or device"
    assert native.read(ADAMW(made[1:])) == "no compiled code for meta"


def test_optimizers_on_different_devices_do_not_share_a_factor(backend, device, monkeypatch):
    optimizers = [ADAMW(parameters_with(torch.ones(3, device=device))) for _ in range(2)]
    read, calls = native.read, []

    def elsewhere(optimizer):
        step = read(optimizer)
        calls.append(optimizer)
        if len(calls) == 2:
            step.grads.device = torch.device("meta")
        return step

    monkeypatch.setattr(native, "read", elsewhere)
    way = fastamp.optimizer_step(optimizers, max_norm=1.0).way
    assert "the optimizers are on several devices" in way


def test_graphs_are_torchs(backend, device):
    parameters = parameters_with(torch.ones(3, device=device))
    assert native.read(ADAMW(parameters, capturable=True)) == "capturable=True"


class OnCuda:
    """As much of an optimizer as says on which device it is."""

    device = torch.device("cuda", 0)

    def __init__(self):
        self.param_groups = [{"params": [self]}]


def test_a_step_that_a_graph_captures_is_torchs(monkeypatch):
    monkeypatch.setattr(_ops, "ops_for", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert native._update_of(OnCuda(), _ops.Rule.ADAM) == "a graph captures the step"
