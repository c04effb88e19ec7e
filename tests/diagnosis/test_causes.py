"""Causes from the numbers of ranks, without ranks."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.diagnosis.causes import cause_of_gradient, cause_of_loss, tied
from lightning_moeclip.diagnosis.evidence import Evidence, World
from lightning_moeclip.diagnosis.measures import relative_error
from lightning_moeclip.diagnosis.observations import GradientSeen
from lightning_moeclip.diagnosis.recorder import Comparer
from lightning_moeclip.diagnosis.sketch import Place, place_of, sketch
from lightning_moeclip.diagnosis.verify_rank import _sketch_of

NAME = "blocks.0.weight"
WORLD = World(4, expert_parallel_size=2, accumulate=3)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


REF = draw(0, 5, 7)
NOISE = [draw(seed, 5, 7) for seed in range(1, 5)]
# of four ranks, with REF as their mean
LOCALS = [REF + noise - sum(NOISE) / 4 for noise in NOISE]


def numbers(tensor: Tensor | None, place: Place | None = None) -> tuple[float, ...]:
    return () if tensor is None else tuple(sketch(NAME, tensor, place or place_of(tensor)).tolist())


def seen(
    final: Tensor | None,
    local: Tensor | None,
    ref: Tensor | None = REF,
    *,
    is_trainable: bool = True,
    place: Place | None = None,
) -> GradientSeen:
    error = 0.0 if final is None and ref is None else float("inf")
    ratio = residual = float("nan")
    if final is not None and ref is not None:
        error = relative_error(final, ref, 1.0)
        ratio = float((final * ref).sum() / (ref * ref).sum())
        residual = float((final - ratio * ref).norm() / final.norm())
    return GradientSeen(
        name=NAME,
        is_trainable=is_trainable,
        is_missing=final is None,
        is_missing_in_one=ref is None,
        error=error,
        ratio=ratio,
        residual=residual,
        norm=0.0 if final is None else float(final.norm()),
        num_nonfinite=0 if final is None else int((~final.isfinite()).sum()),
        arrivals=int(local is not None),
        local=numbers(local, place),
        final=numbers(final, place),
    )


def evidence(finals: list[Tensor | None], locals_: list[Tensor | None], ref: Tensor | None = REF) -> Evidence:
    ranks = {r: seen(final, local, ref) for r, (final, local) in enumerate(zip(finals, locals_, strict=True))}
    return Evidence(NAME, seen(ref, ref, ref), ranks)


def codes(found: Evidence, world: World = WORLD) -> tuple[str, bool]:
    cause = cause_of_gradient(found, world)
    return cause.code, cause.is_in_step


def kind(name: str) -> World:
    return replace(WORLD, kinds={NAME: name})


def test_gradients_that_each_rank_keeps_are_not_reduced() -> None:
    found = evidence([*LOCALS], [*LOCALS])
    assert codes(found) == ("not_reduced", False)
    outside = cause_of_gradient(found, replace(WORLD, outside=frozenset([NAME])))
    assert "it is in the optimizer and not in the LightningModule" in outside.text


@pytest.mark.parametrize(
    ("factor", "world", "code"),
    [
        (4.0, kind("dense"), "times_world_size"),
        (0.25, kind("dense"), "over_world_size"),
        (2.0, kind("expert"), "times_expert_parallel_size"),
        (0.5, kind("expert"), "over_expert_parallel_size"),
        (2.0, kind("dense"), "wrong_divisor"),
        (1.37, kind("expert"), "wrong_divisor"),
    ],
)
def test_right_local_gradients_with_another_factor_blame_the_divisor(factor: float, world: World, code: str) -> None:
    assert codes(evidence([factor * REF] * 4, [*LOCALS]), world) == (code, False)


def test_where_w_is_ep_the_kind_decides_and_the_other_reading_is_told() -> None:
    found = evidence([2.0 * REF] * 2, [REF + NOISE[0], REF - NOISE[0]])
    world = World(2, expert_parallel_size=2)
    expert = cause_of_gradient(found, replace(world, kinds={NAME: "expert"}))
    assert expert.code == "times_expert_parallel_size"
    assert "2 is world_size as well" in expert.text
    assert codes(found, replace(world, kinds={NAME: "dense"})) == ("times_world_size", False)


@pytest.mark.parametrize(
    ("factor", "loss_ratio", "code", "told"),
    [
        (4.0, 4.0, "loss_scaled", "4 = world_size times"),
        (3.0, 1.0, "counted_times", r"counts it 3 times \(3 is accumulate_grad_batches\)"),
        (4.0, 1.0, "counted_times", r"\(4 is world_size\)"),
        (0.25, 1.0, "own_rows", "4 = world_size times too small"),
        (1.37, 1.0, "multiple", "1.37 times the gradient"),
    ],
)
def test_a_factor_that_local_gradients_have_already_is_the_steps(
    factor: float, loss_ratio: float, code: str, told: str
) -> None:
    found = evidence([factor * REF] * 4, [factor * local for local in LOCALS])
    cause = cause_of_gradient(found, replace(WORLD, loss_ratio=loss_ratio))
    assert (cause.code, cause.is_in_step) == (code, True)
    assert re.search(told, cause.text)


def test_a_scalar_is_a_multiple_of_any_other_which_tells_nothing() -> None:
    one, other = torch.tensor(1.0).double(), torch.tensor(1.37).double()
    assert codes(evidence([other] * 4, [other] * 4, one)) == ("step", True)
    assert codes(evidence([other, one, one, one], [other, one, one, 1.7 * one], one))[0] == "step"


def test_slices_that_nobody_divides_are_times_ep_and_not_unreduced() -> None:
    whole = draw(8, 4, 7)
    places = [Place((4, 7), ((2 * k, 2 * k + 2), (0, 7))) for k in range(2)]
    ranks = {}
    for rank, place in enumerate(places):
        own = place.cut(whole)
        ranks[rank] = seen(2 * own, 2 * own, own, place=place)
    found = Evidence(NAME, seen(whole, whole, whole), ranks)
    world = World(2, expert_parallel_size=2, kinds={NAME: "expert"})
    assert codes(found, world) == ("times_expert_parallel_size", False)


def test_a_rank_without_a_gradient_counts_as_zeros_in_the_mean() -> None:
    parts = [4 / 3 * REF + noise - sum(NOISE[:3]) / 3 for noise in NOISE[:3]]
    assert codes(evidence([4 * REF] * 4, [*parts, None])) == ("times_world_size", False)


def test_missing_on_some_ranks_is_named_with_them() -> None:
    parts = [LOCALS[0], None, LOCALS[2], LOCALS[3]]
    cause = cause_of_gradient(evidence(parts, parts), WORLD)
    assert cause.code == "missing_on_ranks"
    assert "arrives on rank 1" in cause.text
    assert "what ranks 0, 2, 3 had" in cause.text


def test_a_rank_that_was_ended_within_the_step_counts_with_what_had_arrived() -> None:
    alone = Evidence(NAME, seen(REF, REF), {1: seen(None, None)}, {0: numbers(REF)})
    assert codes(alone, World(2)) == ("missing_on_ranks", False)
    other = Evidence(NAME, seen(REF, REF), {1: seen(REF - NOISE[0], REF - NOISE[0])}, {0: numbers(REF + NOISE[0])})
    assert codes(other, World(2)) == ("not_reduced", False)
    scalar = torch.tensor(2.0).double()
    ranks = {1: seen(1.5 * scalar, 1.5 * scalar, scalar)}
    single = Evidence(NAME, seen(scalar, scalar, scalar), ranks, {0: numbers(0.5 * scalar)})
    assert codes(single, World(2)) == ("not_reduced", False)


def test_missing_everywhere_is_the_steps() -> None:
    assert codes(evidence([None] * 4, [None] * 4)) == ("missing", True)


def test_a_gradient_where_one_process_has_none() -> None:
    zeros = evidence([torch.zeros(5, 7).double()] * 4, [None] * 4, None)
    assert cause_of_gradient(zeros, WORLD).text.startswith("zeros where one process has none")
    assert codes(evidence([REF] * 4, [REF] * 4, None)) == ("extra", False)


def test_frozen_on_one_rank() -> None:
    found = replace(evidence([0.9 * REF] * 4, [*LOCALS[:3], None]), frozen=(3,))
    assert codes(found) == ("frozen", True)
    assert "frozen on rank 3" in cause_of_gradient(found, WORLD).text


def test_nan_names_the_rank_where_it_began() -> None:
    nan = LOCALS[2] * float("nan")
    found = evidence([nan] * 4, [LOCALS[0], LOCALS[1], nan, LOCALS[3]])
    assert "on rank 2 before any reduction" in cause_of_gradient(found, WORLD).text
    assert "the loss is NaN or infinite on rank 1" in cause_of_gradient(found, replace(WORLD, nan_losses=(1,))).text
    late = cause_of_gradient(evidence([nan] * 4, [*LOCALS]), WORLD)
    assert "though what autograd brought was finite" in late.text
    assert not late.is_in_step
    both = evidence([nan] * 4, [*LOCALS], nan)
    assert "in one process too" in cause_of_gradient(both, WORLD).text


def test_right_local_gradients_mixed_up_are_the_strategys() -> None:
    assert codes(evidence([REF + NOISE[0]] * 4, [*LOCALS])) == ("reduced_wrongly", False)


def test_other_local_gradients_are_the_steps() -> None:
    wrong = [local + 0.3 * NOISE[0] for local in LOCALS]
    found = evidence([REF + 0.3 * NOISE[0]] * 4, [*wrong])
    assert codes(found) == ("step", True)
    far = NOISE[0] - REF * (NOISE[0] * REF).sum() / (REF * REF).sum()
    assert codes(evidence([far] * 4, [far] * 4)) == ("uncorrelated", True)
    close = REF * (1 + 1e-7 * NOISE[1])
    assert codes(evidence([close] * 4, [close] * 4)) == ("float32", True)


@pytest.mark.parametrize(
    ("known", "code"),
    [
        ({"is_repeatable": False, "is_random": True}, "not_deterministic"),
        ({"is_repeatable": True, "is_random": True, "batch_norms": ("norm",)}, "random"),
        ({"is_repeatable": True, "is_random": False, "batch_norms": ("norm",), "ties": ("router",)}, "batch_norm"),
        ({"is_repeatable": True, "is_random": False, "ties": ("moe.router",)}, "routing_tie"),
        ({"is_repeatable": True, "is_random": False}, "step"),
        ({"has_other_batches": True}, "batches_differ"),
    ],
)
def test_what_further_runs_tell_names_the_cause_of_a_wrong_step(known: dict[str, object], code: str) -> None:
    wrong = [local + 0.3 * NOISE[0] for local in LOCALS]
    found = evidence([REF + 0.3 * NOISE[0]] * 4, [*wrong])
    world = replace(WORLD, **known)  # type: ignore[arg-type]
    assert codes(found, world) == (code, True)
    if code != "batches_differ":
        assert cause_of_loss(0.9, world).code == code


def test_other_weights_from_the_start_are_named_first() -> None:
    found = replace(evidence([REF + NOISE[0]] * 4, [*LOCALS]), has_other_weights=True)
    assert codes(found) == ("weights_differ", True)


def test_loss_of_another_size() -> None:
    assert cause_of_loss(4.0, WORLD).code == "loss_scaled"
    assert "rank 2" in cause_of_loss(float("nan"), replace(WORLD, nan_losses=(2,))).text


def test_ties_are_gaps_of_the_size_of_rounding() -> None:
    assert tied({"a": 1e-12, "b": 1e-3}) == ("a",)


def test_sketches_of_slices_add_up_to_the_sketch_of_the_whole() -> None:
    whole = draw(9, 6, 5)
    parts = [place_of(whole[2 * k : 2 * k + 2], expert_rank=k, expert_size=3, is_spread=True) for k in range(3)]
    assert parts[1] == Place((6, 5), ((2, 4), (0, 5)))
    total = sum(sketch(NAME, part.cut(whole), part) for part in parts)
    torch.testing.assert_close(total, sketch(NAME, whole, place_of(whole)))
    columns = Place((6, 5), ((0, 6), (1, 3)))
    rest = [Place((6, 5), ((0, 6), (0, 1))), Place((6, 5), ((0, 6), (3, 5)))]
    total = sum(sketch(NAME, part.cut(whole), part) for part in [columns, *rest])
    torch.testing.assert_close(total, sketch(NAME, whole, place_of(whole)))


def test_sketch_is_linear_and_depends_on_the_name() -> None:
    a, b = draw(1, 40), draw(2, 40)
    both = sketch(NAME, 2 * a - b, place_of(a))
    torch.testing.assert_close(both, 2 * sketch(NAME, a, place_of(a)) - sketch(NAME, b, place_of(b)))
    assert not torch.equal(sketch("other", a, place_of(a)), sketch(NAME, a, place_of(a)))
    swapped = a.clone()
    swapped[[0, 16]] = a[[16, 0]]  # of one bucket
    assert not torch.equal(sketch(NAME, swapped, place_of(a)), sketch(NAME, a, place_of(a)))
    assert sketch(NAME, torch.tensor(1.0), place_of(torch.tensor(1.0))).abs().max() >= 0.5


def test_a_loss_that_sums_over_its_rows_is_one_cause() -> None:
    quarter = [local / 4 for local in LOCALS]
    found = evidence([REF / 4] * 4, quarter)
    world = replace(WORLD, loss_ratio=0.25)
    assert codes(found, world) == codes_of_loss(0.25) == ("loss_summed", True)
    text = cause_of_gradient(found, world).text
    assert text == cause_of_loss(0.25, world).text
    assert "it sums over the rows" in text
    assert "Take the mean over the rows, or multiply by world_size" in text


def codes_of_loss(ratio: float) -> tuple[str, bool]:
    cause = cause_of_loss(ratio, WORLD)
    return cause.code, cause.is_in_step


def test_a_mean_loss_that_is_no_multiple_never_tells_a_number() -> None:
    text = cause_of_loss(float("nan"), WORLD).text
    assert text.startswith("the mean of the ranks' losses is not the loss of one process: ")
    assert "means over different numbers of elements on each rank (ignore_index, a mask)" in text
    assert "a buffer that each rank makes from its own rows" in text


def test_batches_with_a_nan_or_words_are_compared() -> None:
    first = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])
    assert _sketch_of(((first, ["a", "b"]),)) == _sketch_of(((first.clone(), ["a", "b"]),))
    assert _sketch_of(((first, ["a", "b"]),)) != _sketch_of(((first, ["a", "c"]),))
    assert _sketch_of((first,)) != _sketch_of((first.nan_to_num(0.0),))


def test_a_gradient_that_one_process_does_not_have_keeps_its_size(tmp_path: Path) -> None:
    comparer = Comparer(tmp_path, 0, "0")
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    comparer.parameters, comparer.places = {NAME: parameter}, {NAME: place_of(parameter.detach())}
    comparer._keep_gradients([NAME])
    (extra,) = comparer.seen.gradients
    assert (extra.norm, extra.error) == (2.0, float("inf"))
    found = Evidence(NAME, seen(None, None, None), {0: extra, 1: extra})
    assert cause_of_gradient(found, World(2)).text.startswith("a gradient where one process has none")
