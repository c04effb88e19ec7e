"""The truths that kernels and modules are held to: plain torch, dense, in any floating dtype including float64.

Legend of the shape suffixes: N samples of the global batch, D feature width.
"""

import torch
from torch import Tensor

__all__ = ["contrastive_loss", "sigmoid_loss"]


def contrastive_loss(image_ND: Tensor, text_ND: Tensor, logit_scale: Tensor) -> Tensor:
    """Symmetric InfoNCE of a whole batch, by a dense N x N matrix of logits.

    L = 1/(2N) [sum_i (lse_j z_ij - z_ii) + sum_j (lse_i z_ij - z_jj)], z_ij = exp(logit_scale) I_i . T_j.
    CLIP (Radford et al. 2021), figure 3.

    Args:
        image_ND: [N, D], image features as they enter the product.
        text_ND: [N, D], row i is the partner of image i.
        logit_scale: 0-d, the log of the scale.

    Returns:
        0-d, the mean over both directions and all samples.
    """
    z_NN = logit_scale.exp() * (image_ND @ text_ND.T)
    by_image_N = z_NN.logsumexp(dim=1) - z_NN.diagonal()
    by_text_N = z_NN.logsumexp(dim=0) - z_NN.diagonal()
    return (by_image_N.sum() + by_text_N.sum()) / (2 * len(z_NN))


def sigmoid_loss(image_ND: Tensor, text_ND: Tensor, logit_scale: Tensor, logit_bias: Tensor) -> Tensor:
    """Pairwise sigmoid loss of a whole batch, by a dense N x N matrix of logits.

    L = 1/N sum_ij softplus(-y_ij (exp(logit_scale) I_i . T_j + logit_bias)), y_ii = 1 and -1 elsewhere.
    SigLIP (Zhai et al. 2023), equation 1 and algorithm 1.

    Args:
        image_ND: [N, D], image features as they enter the product.
        text_ND: [N, D], row i is the partner of image i.
        logit_scale: 0-d, the log of the scale.
        logit_bias: 0-d, added to every logit.

    Returns:
        0-d, the sum over all pairs divided by N.
    """
    z_NN = logit_scale.exp() * (image_ND @ text_ND.T) + logit_bias
    y_NN = 2 * torch.eye(len(z_NN), dtype=z_NN.dtype, device=z_NN.device) - 1
    # not F.softplus: beyond 20 it is the identity, an error of 2e-9
    return -torch.nn.functional.logsigmoid(y_NN * z_NN).sum() / len(z_NN)
