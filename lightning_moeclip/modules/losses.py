"""The two losses over the global batch, as modules with a scale of their own."""

import math

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_moeclip.modules.contrastive import contrastive_loss, global_contrastive_loss
from lightning_moeclip.modules.logit_scale import ScaledLoss
from lightning_moeclip.modules.sigmoid import global_sigmoid_loss, sigmoid_loss

__all__ = ["ContrastiveLoss", "SigmoidLoss", "contrastive_loss", "sigmoid_loss"]


class ContrastiveLoss(ScaledLoss):
    """CLIP's symmetric InfoNCE with every other sample of the global batch as a negative.

    Each rank gives its own rows; the mean of the returned values over ranks is the loss of one process on the whole
    batch, and so are the gradients. A collective: every rank calls it, also with no rows.

    Args:
        init_temperature: the scale starts at its inverse. CLIP (Radford et al. 2021), 2.5.
        max_scale: bound of the scale, kept after each optimizer step. CLIP (Radford et al. 2021), 2.5.
        chunk_size: columns of the logits that exist at a time, at most.
        normalize: whether rows are brought to unit length first, in float32 at least.

    Attributes:
        logit_scale: 0-d, the log of the scale.
        wants_directions: see ``ScaledLoss``; a is the half image to text, b the half text to image.
    """

    def __init__(
        self,
        *,
        init_temperature: float = 0.07,
        max_scale: float = 100.0,
        chunk_size: int = 4096,
        normalize: bool = True,
    ) -> None:
        super().__init__(init_temperature, max_scale, chunk_size, normalize)

    @override
    def forward(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        """Loss of this rank's rows, 0-d, float32 at least.

        Args:
            image_features: [n_r, dim]; n_r may differ by rank and be 0.
            text_features: [n_r, dim], row i is the partner of image i.

        Raises:
            ValueError: on every rank alike, when shapes, widths or dtypes do not fit, or no rank holds a sample.
        """
        return global_contrastive_loss(
            image_features,
            text_features,
            self.logit_scale,
            self.chunk_size,
            None,
            normalize=self.normalize,
            directions=self.directions,
        )


class SigmoidLoss(ScaledLoss):
    """SigLIP's pairwise sigmoid loss over all pairs of the global batch.

    Each rank gives its own rows; the mean of the returned values over ranks is the loss of one process on the whole
    batch, and so are the gradients. A collective: every rank calls it, also with no rows.

    Its sums over directions are others than those of ``ContrastiveLoss``: image to text and text to image are one and
    the same sum over all pairs here, so that their cosine is always 1. Instead a is what the positives send to the
    features, and b what the negatives send, turned round: cos(a, b) is near 1 where pull and push balance.

    Args:
        init_temperature: the scale starts at its inverse. SigLIP (Zhai et al. 2023), 3.2.
        init_bias: added to every logit at first; most pairs do not match. SigLIP (Zhai et al. 2023), 3.2.
        max_scale: bound of the scale, kept after each optimizer step.
        chunk_size: columns of the logits that exist at a time, at most.
        normalize: whether rows are brought to unit length first, in float32 at least.

    Attributes:
        logit_scale: 0-d, the log of the scale.
        logit_bias: 0-d.
    """

    def __init__(
        self,
        *,
        init_temperature: float = 0.1,
        init_bias: float = -10.0,
        max_scale: float = 100.0,
        chunk_size: int = 4096,
        normalize: bool = True,
    ) -> None:
        super().__init__(init_temperature, max_scale, chunk_size, normalize)
        if not math.isfinite(init_bias):
            raise ValueError(f"init_bias={init_bias} must be finite. Use SigmoidLoss(init_bias=-10.0).")
        self.init_bias = init_bias
        self.logit_bias = nn.Parameter(torch.tensor(init_bias, dtype=torch.float32))

    @override
    def undecayed(self) -> list[nn.Parameter]:
        return [self.logit_scale, self.logit_bias]

    @override
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.logit_bias, self.init_bias)

    @override
    def forward(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        """Loss of this rank's rows, 0-d, float32 at least.

        Args:
            image_features: [n_r, dim]; n_r may differ by rank and be 0.
            text_features: [n_r, dim], row i is the partner of image i.

        Raises:
            ValueError: on every rank alike, when shapes, widths or dtypes do not fit, or no rank holds a sample.
        """
        return global_sigmoid_loss(
            image_features,
            text_features,
            self.logit_scale,
            self.logit_bias,
            self.chunk_size,
            None,
            normalize=self.normalize,
            directions=self.directions,
        )
