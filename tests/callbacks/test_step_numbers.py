"""Cotangents that a user hands in: what is refused."""

import pytest
import torch

from lightning_moeclip.callbacks.cosine_rollback import CosineRollback


def test_cotangents_that_are_no_tensors_are_refused() -> None:
    features = [torch.ones(2, requires_grad=True) for _ in range(2)]
    unused = torch.autograd.grad(features[0].sum(), features, allow_unused=True)
    message = r"hand_in\(first, second\) takes tensors, and first\[1\] is None.*write .*materialize_grads=True"
    with pytest.raises(TypeError, match=message):
        CosineRollback().hand_in(unused, [torch.ones(2)] * 2)
    with pytest.raises(TypeError, match=r"takes tensors, and second is None"):
        CosineRollback().hand_in(torch.ones(2), None)  # type: ignore[arg-type]
