"""Counts of steps, and what else lies on a device that is apart from the host.

The emulated kernels play the device: the CPU's tensors are taken for tensors that the host does not
see. What is expected comes from the update in Python.
"""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from support.bits import bits
from support.emulated import count_launches
from support.gradients import parameters_with
from support.python_update import PythonScaler, python_step
from support.training import one_step
from support.updates import everything

import fastamp
from fastamp import _ops
from fastamp.step import native

ADAMW_OPTIONS = ["betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"]
SIZES = [(3,), (70, 5), (0,), (1025,)]
OVERFLOWS = {0, 1, 4}
ADAMW = torch.optim.AdamW


class Run:
    """A training of four parameters in two groups, with steps that overflow."""

    def __init__(self, device, scaler=fastamp.GradScaler, *, cls=ADAMW, sizes=SIZES, **options):
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(size, generator=generator) for size in sizes]
        self.parameters = [torch.nn.Parameter(value.to(device)) for value in values]
        groups = [{"params": self.parameters[:2]}, {"params": self.parameters[2:], "lr": 3e-3}]
        self.optimizer = cls(groups, **{"lr": 1e-2, **options})
        self.scaler = scaler(device, init_scale=1024.0)
        self.way = "native" if scaler is fastamp.GradScaler else "by Python"
        self.number = 0

    def steps(self, count, *, left_out=(), way=None):
        """Make steps, to which some parameters have no gradient, in the way that is expected."""
        for _ in range(count):
            generator = torch.Generator().manual_seed(self.number)
            for i, p in enumerate(self.parameters):
                grad = torch.randn(p.shape, generator=generator).to(p.device)
                p.grad = None if i in left_out else grad * self.scaler.get_scale()
            if self.number in OVERFLOWS:
                self.parameters[1].grad[0] = math.inf
            one_step(self.scaler, self.optimizer, self.parameters[0].device, max_norm=0.5)
            assert self.scaler.last_step.way == (way or self.way)
            self.scaler.update()
            self.number += 1

    def counts(self):
        """Return what the state holds, where fastamp keeps it."""
        steps = [(p.device, self.optimizer.state[p]["step"]) for p in self.parameters]
        assert all(step.device == device for device, step in steps)
        return [step.item() for _, step in steps]


def assert_as_python(script, device, make=Run, **options):
    """Run a script on a device that is apart and in Python: all is the same to the last bit."""
    ours, theirs = make(device, **options), make("cpu", PythonScaler, **options)
    for run in (ours, theirs):
        script(run)
    left = [everything(run.parameters, run.optimizer) for run in (ours, theirs)]
    assert left[0] == left[1]
    return ours


@pytest.mark.parametrize("cls", [ADAMW, torch.optim.Adam])
def test_bias_corrections_count_the_steps_that_were_taken(cls, apart, device):
    run = assert_as_python(lambda run: run.steps(7), device, cls=cls)
    assert run.counts() == [4.0] * 4


def test_parameters_may_take_part_in_some_steps_only(apart, device):
    def script(run):
        for left_out in ((), (2,), (0, 3), (), (0, 3), (3,)):
            run.steps(1, left_out=left_out)

    run = assert_as_python(script, device)
    assert run.counts() == [2.0, 3.0, 3.0, 1.0]


def test_counts_and_learning_rates_elsewhere_are_torchs(apart, device):
    run = Run(device)
    run.steps(1)
    group, elsewhere = run.optimizer.param_groups[0], torch.zeros((), device="meta")
    group["lr"] = elsewhere
    assert native.read(run.optimizer).text == "lr is not a number that can be read here"
    group["lr"] = 0.1
    for step in (torch.zeros((), dtype=torch.float64), elsewhere):
        run.optimizer.state[run.parameters[0]]["step"] = step
        assert native.read(run.optimizer).text == "step: its dtype, layout or device"


def test_torchs_steps_in_between_find_the_counts(apart, device):
    ours, theirs = Run(device), Run("cpu", PythonScaler)
    ours.steps(3)
    handle = ours.optimizer.register_step_post_hook(lambda *_: None)
    ours.steps(1, way="torch's: hooks, patches or modes around the step")
    handle.remove()
    assert ours.counts() == [2.0] * 4
    ours.steps(3)
    theirs.steps(7)
    assert ours.counts() == theirs.counts() == [4.0] * 4
    for own, expected in zip(ours.parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(own.cpu(), expected)  # torch's loop rounds otherwise


@pytest.mark.parametrize("cls", [ADAMW, torch.optim.SGD])
def test_learning_rates_on_the_device_are_read_there(cls, apart, device):
    def script(run):
        groups = run.optimizer.param_groups
        for group in groups:
            group["lr"] = torch.tensor(group["lr"], device=run.parameters[0].device)
        for _ in range(3):
            for group in groups:
                group["lr"].mul_(0.9)
            run.steps(1)
        groups[0]["lr"], groups[1]["lr"] = torch.tensor(0.1, dtype=torch.float64), 0.5
        run.steps(1)

    assert_as_python(script, device, cls=cls)


def launches_of(parameters, groups=1, cls=ADAMW, **options):
    """Return what a step launches."""
    made = [{"params": parameters[i::groups], "lr": 1e-3 / (1 + i)} for i in range(groups)]
    optimizer = cls(made, fused=True)
    for p in parameters:
        p.grad = torch.ones_like(p)

    def step():
        return fastamp.optimizer_step(optimizer, **{"max_norm": 1.0, **options})

    assert step().way == "native"
    return count_launches(step)


def many(count):
    return [torch.nn.Parameter(torch.ones(1 + i % 7)) for i in range(count)]


@pytest.mark.emulated
@pytest.mark.parametrize("apart", ["emulated"], indirect=True)
def test_a_step_is_three_launches_read_finish_and_update_whatever_its_groups(apart):
    for parameters, groups, expected in (
        (4, 2, 3),
        (148, 2, 3),
        (600, 2, 3),
        (600, 40, 3),
        (465, 465, 4),  # two tables of groups
        (2300, 1, 7),  # two tables of gradients, four of parameters
    ):
        assert launches_of(many(parameters), groups).kernels == expected
    assert launches_of(many(4), cls=torch.optim.SGD).kernels == 3  # counts no steps
    assert launches_of(many(4), max_norm=None).kernels == 2  # reads no norm: count and update


@pytest.mark.emulated
@pytest.mark.parametrize("apart", ["emulated"], indirect=True)
def test_a_short_list_has_short_arguments_and_fills_the_device(apart):
    assert launches_of(many(60)).nbytes < 4096 < launches_of(many(200)).nbytes
    of_read = (10**6 + 65535) // 65536 + 1
    assert launches_of(parameters_with(torch.ones(10**6))).blocks - of_read >= 132


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize(("number", "groups"), [(465, 465), (4100, 3), (700, 60), (17, 17)])
def test_many_parameters_and_groups_have_pythons_bits(apart, device, number, groups, fused):
    class Many(Run):
        def __init__(self, *args):
            super().__init__(*args, sizes=[(1 + i % 5,) for i in range(number)])
            made = [{"params": [], "lr": 1e-3 * (1 + i), "weight_decay": i} for i in range(groups)]
            for i, p in enumerate(self.parameters):
                made[i * groups // number]["params"].append(p)
            self.optimizer = ADAMW(made, fused=fused)

    assert_as_python(lambda run: run.steps(4), device, Many)


def test_gradients_and_parameters_may_begin_anywhere_in_a_bucket(apart, device):
    found = []
    for where, step in ((device, fastamp.optimizer_step), ("cpu", python_step)):
        generator = torch.Generator().manual_seed(0)

        def views(dtype, generator=generator, where=where):
            bucket = torch.randn(8 * 1031, generator=generator).to(where, dtype)
            return bucket.split(1031)  # an odd number

        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        parameters = [torch.nn.Parameter(p) for dtype in dtypes for p in views(dtype)]
        optimizer = ADAMW(parameters, lr=0.1, fused=True)
        for _ in range(2):
            grads = [grad for dtype in dtypes for grad in views(dtype)]
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad
            assert step(optimizer, max_norm=1.0).way in ("native", "by Python")
        found.append([bits(p.detach()).tobytes() for p in parameters])
    assert found[0] == found[1]


def test_an_optimizer_on_several_devices_is_torchs(compiled, device):
    made = parameters_with(*[torch.ones(3, device=where) for where in (device, "meta")])
    assert native.read(ADAMW(made)).text == "a parameter's dtype, layout or device"
    assert native.read(ADAMW(made[1:])).text == "no compiled code for meta"


@pytest.mark.cuda
def test_optimizers_on_different_devices_share_one_norm(device):
    values = [torch.full((1,), v, device=d) for v, d in ((3.0, device), (4.0, "cpu"))]
    made = parameters_with(*values)
    report = fastamp.optimizer_step([torch.optim.SGD([p], lr=1.0) for p in made], max_norm=1.0)
    assert (report.way, report.norm.item()) == ("native", 5.0)
    assert [p.item() for p in made] == pytest.approx([-0.6, -0.8])


def test_capturable_is_native_on_a_device_that_is_apart(compiled, device):
    found = native.read(ADAMW(parameters_with(torch.ones(3, device=device)), capturable=True))
    if compiled == "cpu":
        assert found.text == "capturable=True on the CPU"
    else:
        assert isinstance(found, native.NativeStep)


@pytest.mark.parametrize(
    ("options", "is_native"),
    [
        ([{}], False),
        ([{"fused": True}], True),
        ([{"capturable": True}], True),
        ([{"fused": True}, {}], False),
    ],
)
def test_a_capture_needs_groups_that_are_fused_or_capturable(options, is_native, monkeypatch):
    optimizer = ADAMW([{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in options])
    for group, option in zip(optimizer.param_groups, options, strict=True):
        group.update(option, params=[SimpleNamespace(device=torch.device("cuda", 0))])
    monkeypatch.setattr(_ops, "backend_for", lambda device: f"backend of {device}")
    core = SimpleNamespace(Update=str, rules={"Adam": ((), True, False, ADAMW_OPTIONS)})
    monkeypatch.setattr(_ops, "core", lambda: core)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    why = "a graph captures a group that is neither fused nor capturable"
    found = native.prepare(optimizer)
    if is_native:
        assert (found[0], found[1].update) == ("backend of cuda:0", "Adam")
    else:
        assert found == ("torch", why)


# --- calls of Python ---


def called(step):
    """Return the names of the functions of Python that a step calls."""
    names = []

    def note(frame, event, _):
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return names[1:]  # without the step itself, a lambda


def with_gradients(count):
    parameters = parameters_with(*[torch.ones(3, 4) for _ in range(count)])
    return torch.optim.AdamW(parameters, fused=True)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_steady_step_makes_ten_calls_of_python_and_a_list_of_two_twenty(scaled):
    if "cpu" not in fastamp.backends():
        pytest.skip("needs the compiled core")
    one, two = with_gradients(200), [with_gradients(100) for _ in range(2)]
    scaler = fastamp.GradScaler("cpu", init_scale=1.0, enabled=scaled)
    scaler.scale(torch.ones(()))
    for stepped, most in ((one, 10), ([one], 12), (two, 20)):
        for _ in range(3):
            if scaled:
                names = called(lambda stepped=stepped: scaler.step(stepped, max_norm=1.0))
                names = [
                    each for each in names if each != "_refresh_per_optimizer_state"
                ]  # torch's
                scaler.update()
            else:
                names = called(lambda stepped=stepped: fastamp.optimizer_step(stepped, 1.0))
        assert len(names) <= most, names


def test_a_list_of_two_is_one_read_of_all_and_has_the_bits_of_one_optimizer():
    if "cpu" not in fastamp.backends():
        pytest.skip("needs the compiled core")
    found = []
    for sizes in ([7], [3, 4]):
        parameters = parameters_with(*[torch.full((1000 + i,), 0.1 * i) for i in range(7)])
        optimizers, rest = [], [*parameters]
        for size in sizes:
            optimizers.append(torch.optim.AdamW(rest[:size], lr=0.1))
            del rest[:size]
        for _ in range(3):
            report = fastamp.optimizer_step(optimizers, max_norm=0.5)
        assert report.way == "native"
        states = [optimizer.state[p] for optimizer in optimizers for p in optimizer.state]
        found.append([report.norm, *parameters, *(each for s in states for each in s.values())])
    assert all(map(torch.equal, *found))
