"""What is concluded from comparisons and residuals: when to look, what to tell, when to give up."""

import math

import pytest
import torch

from lightning_moeclip.gradients.comparison import Category, Comparison, Difference
from lightning_moeclip.gradients.report import ReductionResidual
from lightning_moeclip.monitor.consistency import ConsistencyMonitor, ConsistencySettings, describe


def monitor(*, world_size: int = 2, **settings: float) -> ConsistencyMonitor:
    return ConsistencyMonitor(ConsistencySettings(**settings), world_size=world_size)


def difference(
    name: str = "image.blocks.3.mlp.w_in",
    entry: str = "exp_avg",
    category: Category = "optimizer",
    *,
    ranks: tuple[int, ...] = (1,),
    num_different: int | None = 1,
    is_absent: bool = False,
) -> Difference:
    largest = None if num_different is None else 1.2e-7
    return Difference(
        category, name, entry, "dp", (0, 1, 2, 3), ranks, 0, 4096, num_different, largest, is_absent=is_absent
    )


def test_the_first_step_and_each_that_enters_a_new_window_are_due_once_for_all_micro_batches() -> None:
    watch = monitor(every_n_steps=3)
    assert [step for step in range(10) for _ in range(2) if watch.is_due(step)] == [0, 3, 6, 9]
    # a resumed run, and one whose two optimizers count two steps for each batch
    watch = monitor(every_n_steps=3)
    assert [step for step in range(7, 20, 2) if watch.is_due(step)] == [7, 9, 13, 15, 19]


def test_the_story_names_what_differed_where_by_how_much_and_what_was_done() -> None:
    watch = monitor()
    assert watch.judge(Comparison(), step=299) == ""
    assert watch.judge(Comparison((difference(),)), step=300) == (
        "optimizer state exp_avg of image.blocks.3.mlp.w_in differed on rank 1: 1 of 4096 elements, by at most "
        "1.2e-07; resynced from rank 0 (step 300)"
    )
    assert (watch.num_mismatches, watch.num_resyncs) == (1, 1)
    two = Comparison((difference("a", "", "parameters", ranks=(1, 3)), difference("a", "", "gradients")))
    assert watch.judge(two, step=350) == (
        "parameter a differed on ranks 1, 3: 1 of 4096 elements, by at most 1.2e-07; resynced from rank 0 (step 350)\n"
        "gradient of a differed on rank 1: 1 of 4096 elements, by at most 1.2e-07; step held (step 350)"
    )
    assert (watch.num_mismatches, watch.num_resyncs) == (3, 2)


def test_every_kind_of_difference_has_words() -> None:
    assert describe(difference("a", "master", "parameters")).startswith("master of a differed on rank 1:")
    assert describe(difference("loss scale", "", "scaler")).startswith("loss scale differed on rank 1:")
    assert describe(difference("a", num_different=None)) == (
        "optimizer state exp_avg of a was missing or of another kind on rank 1"
    )
    assert describe(difference("a", num_different=None, is_absent=True)) == (
        "optimizer state exp_avg of a was there on rank 1 and not on most replicas"
    )


def test_of_many_differences_the_first_are_told_and_the_others_counted() -> None:
    story = monitor().judge(Comparison(tuple(difference(f"layer{i}") for i in range(20))), step=1)
    assert story.count("differed") == 8
    assert story.endswith("and 12 more (step 1)")


def test_the_fourth_time_of_the_same_tensor_ends_the_run_with_the_story_of_all_four() -> None:
    for category in ("parameters", "gradients", "optimizer", "scaler"):
        watch = monitor()
        for step in (10, 20, 30):
            watch.judge(Comparison((difference("a", "", category), difference(f"b{step}", "", category))), step=step)
        with pytest.raises(RuntimeError, match="which was mended 3 times before") as raised:
            watch.judge(Comparison((difference("a", "", category),)), step=40)
        for step in (10, 20, 30, 40):
            assert f"(step {step})" in str(raised.value)


def test_others_between_do_not_reset_and_one_tensor_on_two_groups_counts_once() -> None:
    watch = monitor()
    for step in range(3):
        watch.judge(Comparison((difference("a", ranks=(1,)), difference("a", ranks=(2,)))), step=step)
        watch.judge(Comparison((difference(f"b{step}"),)), step=step)
        watch.judge(Comparison(), step=step)
    with pytest.raises(RuntimeError, match=r"optimizer state exp_avg of a differed on rank 3"):
        watch.judge(Comparison((difference("a", ranks=(3,)),)), step=9)


def residual(relative: float, dtype: torch.dtype = torch.float16, *, norm: float = 10.0) -> ReductionResidual:
    return ReductionResidual(relative * norm, norm, torch.finfo(dtype).eps, 4096)


def test_levels_of_the_residual_follow_the_dtype_and_the_number_of_ranks() -> None:
    for dtype, unit in ((torch.float16, 1e-3), (torch.bfloat16, 8e-3)):
        for world_size in (2, 4, 8):
            watch = monitor(world_size=world_size)
            bound = unit * math.sqrt(world_size / 2)
            levels = [watch.judge_residual(residual(f * bound, dtype)) for f in (0.0, 0.99, 1.01, 2.99, 3.01, 1e9)]
            assert levels == ["ok", "ok", "warn", "warn", "critical", "critical"]
    watch = monitor(threshold=0.5, critical_factor=1.0)
    assert [watch.judge_residual(residual(f)) for f in (0.49, 0.51)] == ["ok", "critical"]
    assert watch.relative == pytest.approx(0.51)


def test_no_gradient_at_all_and_one_that_is_not_finite_are_no_matter_of_precision() -> None:
    watch = monitor()
    assert watch.judge_residual(residual(0.0, norm=0.0)) == "ok"
    assert watch.relative == 0.0
    for error, norm in ((math.nan, math.nan), (math.inf, math.inf), (math.nan, 1.0)):
        assert watch.judge_residual(ReductionResidual(error, norm, 1e-3, 1)) == "ok"


def test_story_of_a_residual() -> None:
    watch = monitor()
    watch.judge_residual(residual(0.02))
    assert watch.residual_story(residual(0.02), step=7) == (
        "the sum over ranks in low precision differed from one in float32 by 0.02 of the gradients' L1 norm, in a "
        "sample of 4096 elements (step 7)"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 0.0}, r"threshold=0\.0 must be a positive number"),
        ({"threshold": math.nan}, "threshold=nan must be a positive number"),
        ({"threshold": math.inf}, "threshold=inf must be a positive number"),
        ({"threshold": None}, "threshold=None must be a positive number. The default is 1e-3"),
        ({"threshold": "1e-3"}, "threshold='1e-3' must be a positive number"),
        ({"threshold": True}, "threshold=True must be a positive number"),
        ({"critical_factor": None}, "critical_factor=None must be a number from 1"),
        ({"critical_factor": 0.5}, r"critical_factor=0\.5 must be a number from 1"),
        ({"critical_factor": math.nan}, "critical_factor=nan must be a number from 1"),
        ({"every_n_steps": 0}, "every_n_steps=0 must be an integer from 1"),
        ({"every_n_steps": 2.0}, r"every_n_steps=2\.0 must be an integer from 1"),
        ({"every_n_steps": True}, "every_n_steps=True must be an integer from 1"),
    ],
)
def test_bounds_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConsistencySettings(**settings)
