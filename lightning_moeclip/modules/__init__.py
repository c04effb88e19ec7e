"""Parts for the user's model: ordinary modules on one process, exact when their work is spread over ranks."""

from lightning_moeclip.modules.auxiliary import auxiliary_loss
from lightning_moeclip.modules.features import paired_features
from lightning_moeclip.modules.losses import ContrastiveLoss, SigmoidLoss, contrastive_loss, sigmoid_loss
from lightning_moeclip.modules.moe import MoE

__all__ = [
    "ContrastiveLoss",
    "MoE",
    "SigmoidLoss",
    "auxiliary_loss",
    "contrastive_loss",
    "paired_features",
    "sigmoid_loss",
]
