"""Parts for the user's model: losses over the global batch."""

from lightning_moeclip.modules.losses import ContrastiveLoss, SigmoidLoss, contrastive_loss

__all__ = ["ContrastiveLoss", "SigmoidLoss", "contrastive_loss"]
