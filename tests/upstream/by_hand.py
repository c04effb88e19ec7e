"""A module whose two optimizers are stepped by hand."""

from typing import Any

import torch
from torch import Tensor

from tests.upstream.models import (
    ByHand,
)


class TwoThree(ByHand):
    """One backward for the first optimizer, two for the second, in every batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        first, second = self.optimizers()
        assert self.inner.weight.grad is None
        self.manual_backward(self.loss(batch))
        first.step()
        first.zero_grad()
        second.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        once = self.outer.weight.grad.clone()
        self.manual_backward(loss)
        assert torch.equal(self.outer.weight.grad, 2 * once)
        second.step()
        first.zero_grad()
        second.zero_grad()
        return loss
