"""Tensors that are spread over ranks, in real processes over gloo: the result of one process.

In every layout: fully sharded, tensor parallel, sums to come, hybrid, and all of them in one list.
"""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from support import ranks, shard_cases, shard_trainings
from support.bits import assert_close
from support.devices import needs_core
from support.gradients import parameters_with
from support.training import FUSED, OPTIMIZERS

import fastamp

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")

LAYOUTS = ["fsdp", "tensor parallel", "partial", "hsdp", "mixed"]
COMPILED = [name for name in fastamp.backends() if name != "fallback"]
WAYS = ["step", "unscale, then step", "clip, then step", "clip_grad_norm_"]


@pytest.fixture(scope="module")
def four():
    with ranks.start(4) as started:
        yield started


def same(results):
    """Return what all ranks returned, which has to be the same."""
    assert all(result == results[0] for result in results), results
    return results[0]


# --- norms and verdicts ---


@pytest.mark.parametrize("backend", fastamp.backends())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [2, 4])
def test_the_norm_equals_one_process_to_the_last_float32_bit(four, count, layout, backend):
    ours, alone = same(four.run(count, shard_cases.norms, backend, layout))
    if layout == "partial":  # whose sums are rounded
        alone = pytest.approx(alone, rel=1e-6)
    assert ours == alone


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch 2.8 itself breaks the graph")
def test_in_a_graph_of_torch_compile_dtensors_go_torchs_way(four):
    for theirs, ours in four.run(2, shard_cases.clipped_in_a_graph):
        for one, other in zip(theirs, ours, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("layout", "collectives"), [("fsdp", 1), ("hsdp", 2), ("mixed", 3)])
def test_a_mesh_that_does_not_span_the_world_takes_its_own_groups(four, layout, collectives):
    norm, expected, count = same(four.run(4, shard_cases.norm_in_larger_world, layout))
    assert (norm, count) == (expected, collectives)


@pytest.mark.parametrize("layout", ["fsdp", "tensor parallel", "hsdp", "mixed"])
def test_a_bad_value_on_one_rank_is_everybodys_verdict(four, layout):
    places = [(0, 0), (0, 3), (3, 4), (3, 5)]  # of a replica and of a part
    values = [math.nan, math.inf] if layout in ("fsdp", "hsdp") else [math.inf, math.nan]
    for (rank, index), value in zip(places, values * 2, strict=True):
        norm, skipped = same(four.run(4, shard_cases.norm_with, value, layout, rank, index))
        assert skipped
        if layout in ("fsdp", "tensor parallel") and index == 4:  # else a replica that is not read
            assert norm == str(value)


@pytest.mark.parametrize("with_plain", [False, True])
def test_the_norm_of_dtensors_is_a_replicated_dtensor_and_plain_in_reports(four, with_plain):
    for found, expected, wrong in four.run(2, shard_cases.norms_of_dtensors, with_plain):
        assert found == pytest.approx((expected,) * 3, rel=1e-7)
        assert not wrong


# --- steps ---


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize(
    ("layout", "rule", "dtype"),
    [("fsdp", rule, torch.float32) for rule in shard_cases.RULES]
    + [(layout, "adamw", torch.float32) for layout in ("tensor parallel", "hsdp", "mixed")]
    + [("fsdp", "adamw", torch.bfloat16), ("mixed", "sgd", torch.bfloat16)],
    ids=str,
)
def test_native_steps_of_parts_have_the_bits_of_the_whole(four, layout, rule, dtype, backend):
    if layout == "mixed" and torch.__version__ < (2, 10):
        pytest.skip("torch before 2.10 remembers meshes of process groups that are gone")
    given = (backend, layout, rule, dtype, rule == "adam")
    for alone, ours in four.run(2 if layout == "fsdp" else 4, shard_cases.native_steps, *given):
        assert ours == alone


@pytest.mark.pairwise
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_end_unscaled_and_clipped_as_in_one_process(four, layout, name, how):
    is_refused = name == "sgd fused" or (layout == "mixed" and name in FUSED)
    if is_refused and torch.__version__ < (2, 10):
        pytest.skip("a fused update of torch 2.8 refuses these DTensors")
    for alone, ours in four.run(4, shard_cases.step, layout, name, how):
        for expected, got in zip(alone, ours, strict=True):
            # A sum over ranks is rounded before it is scaled, where one process has none.
            tolerance = 1e-6 if layout == "partial" or how == "clip_grad_norm_" else 2e-7
            for one, other in zip(got, expected, strict=True):
                assert_close(one, other, rtol=tolerance, atol=1e-9)


@needs_core
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_torchs_own_step_goes_on_in_the_middle(four, rule):
    for first, *others in four.run(2, shard_cases.torchs_steps_between, rule):
        for other in others:
            torch.testing.assert_close(first, other, rtol=1e-5, atol=1e-6)


@needs_core
def test_gradients_that_are_placed_otherwise_are_brought_to_their_parameters(four):
    for right, by_grad, by_state in four.run(2, shard_cases.gradients_placed_otherwise):
        assert right[0].startswith("native")
        assert right[0] == by_grad[0]
        assert "than its parameter" in by_state[0]
        torch.testing.assert_close(by_grad[1], right[1], rtol=0, atol=0)
        torch.testing.assert_close(by_state[1], right[1], rtol=1e-6, atol=1e-7)


def test_a_part_that_is_replaced_is_noticed(four):
    assert four.run(2, shard_cases.parts_that_are_replaced) == [[-2.0]] * 2


@pytest.mark.skipif(
    torch.__version__ < (2, 10), reason="torch before 2.10 refuses uneven shards here"
)
def test_fsdp2_over_tensor_parallel_has_one_norm(four):
    norm, expected, kinds = same(four.run(4, shard_cases.fsdp_over_tensor_parallel))
    assert norm == pytest.approx(expected, rel=1e-7)
    assert "_StridedShard" in kinds


@pytest.mark.parametrize(
    ("how", "count", "name"),
    [
        ("fsdp2", 4, "sgd momentum"),
        ("hsdp", 4, "adamw fused"),
        ("fsdp1", 2, "adamw fused"),
        ("ddp", 2, "adamw fused"),
    ],
)
def test_a_gpt_trains_over_ranks_as_in_one_process(four, how, count, name):
    seen, parameters = shard_trainings.train("alone", name)
    assert [skipped for skipped, _ in seen].index(True) == shard_trainings.BAD_STEP
    for said, ours in four.run(count, shard_trainings.train, how, name):
        assert said == seen
        # Parts of a batch are added in another order than the batch: the gradients differ by
        # float32 roundings, and Adam divides by their size. 7e-7 was seen, in steps of 2e-2.
        torch.testing.assert_close(ours, parameters, rtol=0, atol=5e-6)


@pytest.mark.parametrize("what", ["fsdp2", "hsdp", "tensor parallel"])
def test_a_step_takes_one_collective(four, what):
    assert four.run(4, shard_trainings.collectives, what) == [1] * 4


# --- process groups ---


def test_plain_parts_share_one_norm_where_a_rank_has_none(four):
    norm, expected, skipped = same(four.run(4, shard_cases.plain_parts, 2))
    assert (norm, skipped) == (expected, False)


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="needs torch 2.10's fused AdamW")
@pytest.mark.parametrize("bad_rank", [None, 3])
def test_stages_of_a_pipeline_share_one_norm_and_one_verdict(four, bad_rank):
    results = four.run(4, shard_cases.pipeline, bad_rank)
    norm, skipped, scale = zip(*(got for got, _, _ in results), strict=True)
    is_bad = bad_rank is not None
    assert (same(skipped), same(scale)) == (is_bad, 0.5 if is_bad else 1.0)
    if not is_bad:
        assert same(norm) == same([expected for _, expected, _ in results])
    assert same([count for *_, count in results]) == 1


def test_a_process_group_counts_nothing_of_a_mesh_twice_and_has_all_ranks_of_it(four):
    norm, expected, count, said = same(four.run(4, shard_cases.group_over_mesh))
    assert (norm, count) == (expected, 1)
    assert said == "process_group: expected one with all ranks of the gradients' mesh"


def test_experts_on_meshes_of_their_own_are_refused_without_a_process_group(four):
    for said, (norm, expected) in four.run(4, shard_cases.experts):
        assert "gradients on meshes of different ranks, [(" in said
        assert "process_group=" in said
        assert norm == pytest.approx(expected, rel=1e-7)


def test_without_a_scaler_ranks_with_different_gradients_skip_together(four):
    for skipped, norm, weight in four.run(2, shard_cases.step_in_a_group):
        assert (skipped, norm) == ([True, False], 2.0)
        assert weight == pytest.approx([-0.5] * 2)


@pytest.mark.parametrize("is_hooked", [False, True])
def test_shards_of_fsdp1_are_refused_without_a_process_group(is_hooked):
    """Each rank would clip by its own norm."""
    (p,) = parameters_with(torch.ones(4))
    p._fsdp_flattened = True
    optimizer, scaler = torch.optim.AdamW([p]), fastamp.GradScaler("cpu")
    if is_hooked:  # a step that is torch's
        optimizer.register_step_post_hook(lambda *_: None)
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


def test_a_copied_or_pickled_scaler_leaves_its_process_group_behind():
    group = dist.ProcessGroup(0, 1)
    scaler = fastamp.GradScaler("cpu", process_group=group)
    assert scaler.process_group is group
    for copied in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert copied.process_group is None
    assert set(scaler.state_dict()) == set(torch.amp.GradScaler("cpu").state_dict())


def test_what_is_no_process_group_is_refused():
    """A rank outside of a new group gets a placeholder in its place."""
    for group in (3, dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(TypeError, match="process_group: expected None or a process group"):
            fastamp.GradScaler("cpu", process_group=group)


# --- ranks without a gradient, and ranks that fail ---


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("how", ["step", "clip, then step", "without scaling", "clip_grad_norm_"])
@pytest.mark.parametrize(
    "what", ["DTensors", "DTensors, a plain one left", "process group, another type"]
)
def test_a_rank_without_a_gradient_leaves_no_other_waiting(four, what, how, bad):
    if how == "clip_grad_norm_" and what.startswith("process group"):
        pytest.skip("the function has no process_group")
    norm, expected, skipped, scale = same(four.run(2, shard_cases.clip_and_step, what, how, bad))
    assert norm == pytest.approx(expected, rel=1e-7)
    assert skipped == bad
    assert scale == (1.0 if how == "without scaling" else 2.0 if bad else 4.0)


# --- names of bad values ---


def test_bad_values_are_named_by_the_rank_that_holds_them(four):
    # 3 elements on ranks 0 to 2, 64 rows on 4 ranks
    of_first, of_third = ("4", 0, 1, 1 * 130 + 100), ("4", 0, 1, 8 * 130 + 3)
    named = four.run(4, shard_cases.bad_names)
    assert named == [[], [of_first], [("1", 1, 0, 0), of_third], []]
    assert [[each.rank for each in its] for its in named] == [[], [1], [2, 2], []]
