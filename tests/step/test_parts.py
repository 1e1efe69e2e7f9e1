"""Native steps of DTensors, in real processes over gloo: bit-equal to those of whole tensors."""

import pytest
import torch
from support import part_cases, ranks
from support.devices import needs_core

import fastamp

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")


@pytest.fixture(scope="module")
def four():
    with ranks.start(4) as started:
        yield started


@pytest.mark.parametrize("backend", [b for b in fastamp.backends() if b != "fallback"])
@pytest.mark.parametrize(
    ("layout", "rule", "dtype"),
    [("fsdp", rule, torch.float32) for rule in part_cases.RULES]
    + [(layout, "adamw", torch.float32) for layout in ("tensor parallel", "hsdp", "mixed")]
    + [("fsdp", "adamw", torch.bfloat16), ("mixed", "sgd", torch.bfloat16)],
    ids=str,
)
def test_parts_are_stepped_as_the_whole(four, layout, rule, dtype, backend):
    if layout == "mixed" and torch.__version__ < (2, 10):
        pytest.skip("torch 2.8 remembers meshes of process groups that are gone")
    zero_grad = rule == "adam"
    count = 2 if layout == "fsdp" else 4
    for alone, ours in four.run(
        count, part_cases.native_steps, backend, layout, rule, dtype, zero_grad
    ):
        assert ours == alone


@needs_core
@pytest.mark.parametrize("rule", part_cases.RULES)
def test_torchs_own_step_goes_on_in_the_middle(four, rule):
    for first, *others in four.run(2, part_cases.torchs_steps_between, rule):
        for other in others:
            torch.testing.assert_close(first, other, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(
    torch.__version__ < (2, 10), reason="torch 2.8's FSDP2 over gloo adds gradients up"
)
def test_fsdp_with_ignored_parameters_is_stepped_in_one_go(four):
    for (way, _, alone), (spread_way, kinds, ours) in four.run(
        2, part_cases.fsdp_with_ignored_parameters
    ):
        assert way.startswith("native")
        assert spread_way == way
        assert kinds == 2
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)


@needs_core
def test_gradients_that_are_placed_otherwise_are_brought_to_their_parameters(four):
    for right, by_grad, by_state in four.run(2, part_cases.gradients_placed_otherwise):
        assert right[0].startswith("native")
        assert right[0] == by_grad[0]
        assert "other placements than its parameter" in by_state[0]
        torch.testing.assert_close(by_grad[1], right[1], rtol=0, atol=0)
        torch.testing.assert_close(by_state[1], right[1], rtol=1e-6, atol=1e-7)


def test_a_part_that_is_replaced_is_noticed(four):
    assert four.run(2, part_cases.parts_that_are_replaced) == [[-2.0]] * 2
