"""Ranks that hold different gradients, or fail in the middle of a step; and the norm's type."""

from __future__ import annotations

import pytest
import torch
from support import ranks, uneven_ranks
from support.devices import HAS_CORE
from support.gradients import parameters_with

import fastamp

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
KINDS = ["DTensors", "DTensors, a plain one left", "process group, another type"]


@pytest.fixture(scope="module")
def two():
    with ranks.start(2) as started:
        yield started


@pytest.fixture(scope="module")
def four():
    with ranks.start(4) as started:
        yield started


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("how", ["step", "clip, then step", "without scaling", "clip_grad_norm_"])
@pytest.mark.parametrize("what", KINDS)
def test_a_rank_without_a_gradient_leaves_no_other_waiting(two, what, how, bad):
    if how == "clip_grad_norm_" and what.startswith("process group"):
        pytest.skip("the function has no process_group")
    first, second = two.run(2, uneven_ranks.clip_and_step, what, how, bad)
    assert first == second
    norm, expected, skipped, scale = first
    assert norm == pytest.approx(expected, rel=1e-7)
    assert skipped == bad
    assert scale == (1.0 if how == "without scaling" else 2.0 if bad else 4.0)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("fused", [None, True])
def test_a_step_that_fails_between_read_and_update_leaves_nothing_on_the_shards(
    two, fused, enabled
):
    if fused and not HAS_CORE:
        pytest.skip("torch 2.8's fused update takes no DTensors beside plain tensors")
    for left, expected, found in two.run(2, uneven_ranks.fail_in_a_collective, fused, enabled):
        assert left == ["lost", None]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("with_plain", [False, True])
def test_the_norm_of_dtensors_is_a_replicated_dtensor_and_plain_in_reports(two, with_plain):
    for found, expected, wrong in two.run(2, uneven_ranks.norms_of_dtensors, with_plain):
        assert found == pytest.approx((expected,) * 3, rel=1e-7)
        assert not wrong


def test_experts_on_meshes_of_their_own_are_refused_without_a_process_group(four):
    for said, (norm, expected) in four.run(4, uneven_ranks.experts):
        assert "gradients on meshes of different ranks, [(" in said
        assert "process_group=" in said
        assert norm == pytest.approx(expected, rel=1e-7)


def test_without_a_scaler_ranks_with_different_gradients_skip_together(two):
    for skipped, norm, weight in two.run(2, uneven_ranks.step_in_a_group):
        assert (skipped, norm) == ([True, False], 2.0)
        assert weight == pytest.approx([-0.5] * 2)


@pytest.mark.parametrize("fused", [None, True, False])
def test_shards_of_fsdp1_are_refused_without_a_process_group(fused):
    """Each rank would clip by its own norm."""
    (p,) = parameters_with(torch.ones(4))
    p._fsdp_flattened = True
    options = {"foreach": False} if fused is False else {"fused": fused}
    optimizer, scaler = torch.optim.AdamW([p], **options), fastamp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for call in (
        lambda: fastamp.optimizer_step(optimizer, max_norm=1.0),
        lambda: fastamp.optimizer_step([optimizer], max_norm=1.0),
        lambda: scaler.step(optimizer),
        lambda: scaler.clip_grad_norm_(optimizer, 1.0),
        lambda: scaler.unscale_(optimizer),
    ):
        with pytest.raises(ValueError, match=r"FSDP1 .* Give process_group=, or use FSDP2"):
            call()
    assert (p.tolist(), p.grad.tolist()) == ([0.0] * 4, [1.0] * 4)
    fastamp.optimizer_step(optimizer)  # reads nothing
    assert p[0].item() < 0
