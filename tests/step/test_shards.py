"""Gradients over ranks, in real processes over gloo: one norm, one verdict, one scale for all."""

import copy
import itertools
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from support import ranks, shard_cases, shard_trainings
from support.bits import assert_close
from support.training import OPTIMIZERS

import fastamp

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")

LAYOUTS = ["fsdp", "tensor parallel", "partial", "hsdp", "mixed"]


OLD_REFUSES = [("fsdp", "sgd fused"), ("mixed", "adamw fused")]


@pytest.fixture(scope="module")
def four():
    with ranks.start(4) as started:
        yield started


def same(results):
    """Return what all ranks returned, which has to be the same."""
    assert all(result == results[0] for result in results), results
    return results[0]


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
    assert norm == expected
    assert count == collectives


@pytest.mark.parametrize("layout", ["fsdp", "tensor parallel", "hsdp", "mixed"])
def test_a_bad_value_on_one_rank_is_everybodys_verdict(four, layout):
    places = [(0, 0), (0, 3), (3, 4), (3, 5)]  # of a replica and of a part
    values = [math.nan, math.inf] if layout in ("fsdp", "hsdp") else [math.inf, math.nan]
    for (rank, index), value in zip(places, values * 2, strict=True):
        _, skipped = same(four.run(4, shard_cases.norm_with, value, layout, rank, index))
        assert skipped


def test_nan_on_one_rank_is_the_norm_of_all(four):
    norm, _ = same(four.run(4, shard_cases.norm_with, math.nan, "fsdp", 1, 4))
    assert norm == "nan"


@pytest.mark.parametrize(
    ("layout", "name"),
    [("fsdp", name) for name in OPTIMIZERS]
    + [(layout, "adamw fused") for layout in LAYOUTS[1:]]
    + [("mixed", "sgd momentum")],
)
def test_gradients_end_unscaled_and_clipped_as_in_one_process(four, layout, name):
    if torch.__version__ < (2, 10) and (layout, name) in OLD_REFUSES:
        pytest.skip("a fused update of torch 2.8 refuses these DTensors")
    for alone, ours in itertools.chain(*four.run(4, shard_cases.step, layout, name)):
        for expected, got in zip(alone, ours, strict=True):
            # A sum over ranks is rounded before it is scaled, where one process has none.
            tolerance = 1e-6 if layout == "partial" else 2e-7
            for one, other in zip(got, expected, strict=True):
                assert_close(one, other, rtol=tolerance, atol=1e-9)


@pytest.mark.parametrize("name", ["sgd momentum"])
def test_a_part_with_gaps_in_its_memory_steps_like_one_without(four, name):
    for (grad, parameter), (plain_grad, plain_parameter) in four.run(
        2, shard_cases.step_with_gaps, name
    ):
        torch.testing.assert_close(grad, plain_grad, rtol=1e-6, atol=0)
        torch.testing.assert_close(parameter, plain_parameter, rtol=1e-6, atol=0)
        assert parameter.abs().min() > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_functions_clip_as_in_one_process(four, layout):
    for alone, ours in four.run(4, shard_cases.clip_functions, layout):
        torch.testing.assert_close(ours, alone, rtol=1e-6, atol=0)


def test_the_error_tells_which_gradient_or_that_it_is_elsewhere(four):
    texts = four.run(4, shard_cases.error_text)
    assert "(first in the gradient of parameters[1])" in texts[0]
    assert all("(in a gradient of another rank)" in text for text in texts[1:])


@pytest.fixture(scope="module")
def alone():
    """Return what one process makes of the same batches, with the same inf."""
    return {name: shard_trainings.train_alone(name) for name in ("adamw fused", "sgd momentum")}


def assert_close_to_one_process(ours, parameters):
    # Parts of a batch are added in another order than the batch: the gradients differ by float32
    # roundings, and Adam divides by their size. 7e-7 was seen, where steps moved things by 2e-2.
    torch.testing.assert_close(ours, parameters, rtol=0, atol=5e-6)


def assert_trained_as(expected, results):
    """Compare runs over ranks with one of a single process."""
    seen, parameters = expected
    assert seen["skipped"] == [i == shard_trainings.BAD_STEP for i in range(shard_trainings.STEPS)]
    common = same([result for result, _ in results])
    assert common["skipped"] == seen["skipped"]
    assert common["scales"] == seen["scales"]
    for _, ours in results:
        assert_close_to_one_process(ours, parameters)


@pytest.mark.parametrize(
    ("sizes", "name"), [((4,), "sgd momentum"), ((2, 2), "adamw fused")], ids=["fsdp2-4", "hsdp-4"]
)
def test_a_gpt_trains_over_ranks_as_in_one_process(four, alone, sizes, name):
    count = math.prod(sizes)
    results = four.run(count, shard_trainings.train_sharded, name, sizes, count - 1)
    assert_trained_as(alone[name], results)


def test_a_gpt_trains_with_fsdp1_as_in_one_process(four, alone):
    assert_trained_as(
        alone["adamw fused"], four.run(2, shard_trainings.train_fsdp1, "adamw fused", 1)
    )


@pytest.mark.parametrize("accumulate", [False, True], ids=["every batch", "no_sync"])
def test_ddp_needs_nothing(four, accumulate):
    plain = four.run(1, shard_trainings.train_ddp, "adamw fused", False)[0]
    results = four.run(2, shard_trainings.train_ddp, "adamw fused", accumulate)
    same([scales for scales, _ in results])
    for _, parameters in results:
        assert_close_to_one_process(parameters, plain[1])


def test_ddp_joins_uneven_inputs(four):
    results = four.run(2, shard_trainings.train_uneven)
    assert [steps for steps, _ in results] == [5, 3]


def test_stock_lets_one_rank_step_and_another_skip_and_ours_does_not(four):
    theirs = four.run(2, shard_trainings.split_verdict, True)
    assert [moved for moved, _ in theirs] == [False, True]
    assert [scale for _, scale in theirs] == [2.0**15, 2.0**16]
    assert same(four.run(2, shard_trainings.split_verdict, False)) == (False, 2.0**15)


def test_stock_fails_at_a_fused_step_after_unscale_and_ours_does_not(four):
    assert "doesn't match the broadcast shape" in same(
        four.run(2, shard_trainings.unscale_then_fused, True)
    )
    assert same(four.run(2, shard_trainings.unscale_then_fused, False)) == pytest.approx([-0.1] * 4)


@pytest.mark.parametrize("how", ["unscale_", "step"])
def test_stock_has_two_verdicts_for_replicate_and_shard_and_ours_one(four, how):
    assert four.run(2, shard_trainings.mixed_verdict, True, how) == [0.0, 1.0]
    assert four.run(2, shard_trainings.mixed_verdict, False, how) == [1.0, 1.0]


@pytest.mark.parametrize(("what", "stock"), [("fsdp2", 2), ("hsdp", 2), ("tensor parallel", 2)])
def test_a_step_takes_one_collective(four, what, stock):
    assert same(four.run(4, shard_trainings.collectives, what, False)) == 1
    assert same(four.run(4, shard_trainings.collectives, what, True)) == stock


@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="needs the compiled core")
def test_clipping_dtensors_calls_less_than_stock(four):
    # The bench measures the host's time; calls are the same on a busy machine. Of torch's first
    # clip nothing is asked: it calls less where an earlier test has made torch find its rules.
    stock, ours = four.run(2, shard_trainings.calls_of_clipping, 50)[0]
    assert stock[1] > ours[1]


@pytest.mark.parametrize("missing", [0, 2])
def test_plain_parts_share_one_norm_where_a_rank_has_none(four, missing):
    norm, expected, skipped = same(four.run(4, shard_cases.plain_parts, missing))
    assert norm == expected
    assert not skipped


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="needs torch 2.10's fused AdamW")
@pytest.mark.parametrize("bad_rank", [None, 3])
def test_stages_of_a_pipeline_share_one_norm_and_one_verdict(four, bad_rank):
    results = four.run(4, shard_cases.pipeline, bad_rank)
    norm, skipped, scale = zip(*(got for got, _, _ in results), strict=True)
    is_bad = bad_rank is not None
    assert (same(skipped), same(scale)) == (is_bad, 0.5 if is_bad else 1.0)
    if not is_bad:
        assert same(norm) == same([expected for _, expected, _ in results])
    assert same([count for *_, count in results]) == 2  # the stage's mesh, then the process group


@pytest.mark.parametrize(("name", "collectives"), [("world", 1), ("inner", 2), ("outer", 2)])
def test_a_process_group_of_ranks_of_one_mesh_counts_nothing_twice(four, name, collectives):
    norm, expected, count = same(four.run(4, shard_cases.group_over_mesh, name))
    assert norm == expected
    assert count == collectives


@pytest.mark.parametrize("layout", ["fsdp", "tensor parallel"])
def test_bad_values_are_named_with_their_rank_and_place_there(four, layout):
    found, text = same(four.run(4, shard_cases.bad_names, layout))
    if layout == "fsdp":  # 3 elements on ranks 0 to 2, 64 rows on 4 ranks
        assert found == [
            (1, ("w4", 0, 1, 1 * 130 + 100)),
            (2, ("w1", 1, 0, 0)),
            (2, ("w4", 0, 1, 8 * 130 + 3)),
        ]
        assert text == f"NonFinite(name='w4', n_nan=0, n_inf=1, first_index={130 + 100}, rank=1)"
    else:  # every rank has the replica
        assert [entry for entry in found if entry[1][0] == "w1"] == [
            (rank, ("w1", 1, 0, 2)) for rank in range(4)
        ]


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch 2.8 refuses uneven shards here")
def test_fsdp2_over_tensor_parallel_has_one_norm(four):
    norm, expected, kinds = same(four.run(4, shard_cases.fsdp_over_tensor_parallel))
    assert norm == pytest.approx(expected, rel=1e-7)
    assert "_StridedShard" in kinds


def test_bad_values_of_plain_parts_are_named_for_all_in_a_process_group(four):
    results = four.run(2, shard_cases.bad_names_of_plain_parts, 1)
    entry = (1, ("w0", 0, 1, 1))
    assert results == [[[], [entry]], [[entry], [entry]]]


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
        with pytest.raises(TypeError, match="process_group: expected None or a process group"):
            fastamp.nonfinite_parameters(torch.nn.Linear(1, 1), group)
