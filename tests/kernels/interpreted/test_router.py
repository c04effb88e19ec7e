"""The router's kernels under Triton's interpreter against one token after another in float64."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from lightning_moeclip.kernels import reference, router_triton
from lightning_moeclip.kernels.backend import runs_triton

from tests.kernels.routing import (
    DTYPES,
    SIZES,
    assert_bitwise,
    assert_close,
    cotangent_like,
    logits,
    plain_route,
    routed,
    watch_devices,
)


@pytest.fixture(autouse=True)
def _as_a_gpu_counts() -> Iterator[None]:
    assert runs_triton(torch.zeros(1)), "Triton is not installed"
    # numpy, which the interpreter computes with, warns of what a GPU does in silence
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
@pytest.mark.parametrize("normalize", [True, False])
def test_kernel_equals_the_reference(num_tokens: int, num_experts: int, top_k: int, normalize: bool) -> None:
    compare(logits(num_tokens, num_experts), top_k, normalize=normalize)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_kernel_reads_16_bits_and_counts_in_float32(dtype: torch.dtype) -> None:
    # the store of the cotangent in bfloat16 cuts off under the interpreter, where a GPU rounds: one place of its digits
    compare(logits(37, 6, dtype), 2, normalize=False, extra=torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0)


@pytest.mark.parametrize(("num_experts", "top_k"), [(600, 2), (20, 9)])
def test_what_the_kernel_is_not_built_for_is_left_to_torch(num_experts: int, top_k: int) -> None:
    compare(logits(3, num_experts), top_k, normalize=True)
    z = logits(3, 20, torch.float64)
    assert routed(z, 2, normalize=True)[0].dtype == torch.float64


def compare(z: torch.Tensor, top_k: int, *, normalize: bool, extra: float = 0.0) -> None:
    weights, *integers, grad = routed(z, top_k, normalize=normalize)
    truth = reference.route(z.detach().double(), top_k, normalize_topk=normalize)
    assert_bitwise(integers, truth[1:])
    plain, plain_grad = plain_route(z, top_k, normalize=normalize)
    assert_close(weights, plain, truth[0])
    alignment = torch.zeros(z.shape, dtype=torch.float64).scatter(1, integers[0], cotangent_like(weights).double())
    exact = reference.router_logits_gradient(z.detach().double(), integers[0], alignment, normalize_topk=normalize)
    assert_close(grad, plain_grad, exact, extra=extra)


@pytest.mark.parametrize(("normalize", "rule"), [(False, "compensated"), (True, "dense"), (False, "dense")])
def test_kernel_follows_the_formula_of_the_other_rules(normalize: bool, rule: str) -> None:
    z = logits(20, 6)
    weights, chosen, *_, grad = routed(z, 3, normalize=normalize, rule=rule)
    alignment = torch.zeros(z.shape, dtype=torch.float64).scatter(1, chosen, cotangent_like(weights).double())
    exact = reference.router_logits_gradient(z.detach().double(), chosen, alignment, normalize_topk=False, rule=rule)
    # a softmax of 6 and a sum of 3 products
    assert (grad - exact).norm() <= 10 * torch.finfo(torch.float32).eps * exact.norm()


def test_fold_sums_more_rows_than_one_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_triton, "_FOLD", 16)
    compare(logits(300, 8), 2, normalize=True)


def test_lowest_id_wins_among_equal_logits_and_zeros_of_either_sign() -> None:
    z = torch.tensor([[0.0, 1.0, 1.0, 0.0], [-0.0, -1.0, 0.0, -0.0], [-2.0, -2.0, -2.0, -2.0]], requires_grad=True)
    assert routed(z, 3, normalize=True)[1].tolist() == [[1, 2, 0], [0, 2, 3], [0, 1, 2]]


@pytest.mark.parametrize("normalize", [True, False])
def test_bad_logits_stay_in_their_row_and_ids_in_range(normalize: bool) -> None:
    clean = logits(8, 6)
    z = clean.detach().clone()
    z[1, 2], z[3, 4], z[5, 0], z[6] = float("nan"), float("inf"), float("-inf"), float("-inf")
    z[7, 3] = -float("nan")
    found, expected = (routed(x.requires_grad_(), 2, normalize=normalize) for x in (z, clean))
    for i in (0, 1, 4):
        assert torch.equal(found[i][[0, 2, 4]], expected[i][[0, 2, 4]])
    assert_bitwise(found[1:4], reference.route(z.detach(), 2, normalize_topk=normalize)[1:])
    assert found[0].isnan().any(1).tolist() == [False, True, False, True, False, False, True, True]
    if normalize:
        # zeros where nothing was chosen, also in the row of a NaN
        assert not found[4].scatter(1, found[1], 0.0).any()


def test_kernel_is_bitwise_repeatable() -> None:
    assert_bitwise(*(routed(logits(70, 8), 2, normalize=True) for _ in range(2)))


def test_every_launch_is_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be the current one: each kernel runs inside of ``device_of`` some tensor."""
    inside = watch_devices(monkeypatch, router_triton)
    routed(logits(5, 3), 2, normalize=True)
    assert inside == [True] * 3
