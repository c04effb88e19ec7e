"""The training task: contrastive loss plus balance of the experts, recall on pairs never seen, and the curves."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from emoji_clip.data import Batch
from emoji_clip.model import EmojiCLIP
from lightning_moeclip.binding import pl
from lightning_moeclip.modules import ContrastiveLoss, auxiliary_loss


class Recall(MetricCollection):
    """recall_at_1 and recall_at_5 among ``num_pairs`` pairs: the mean of image to text and text to image.

    To find the partner of a row among all columns is to classify it, so recall at k is top-k accuracy.
    """

    def __init__(self, num_pairs: int) -> None:
        super().__init__(
            {f"recall_at_{k}": MulticlassAccuracy(num_pairs, top_k=k, average="micro") for k in (1, 5)},
        )

    def update(self, image_features: Tensor, text_features: Tensor) -> None:
        """image_features, text_features: [num_pairs, D], row i of both is pair i."""
        similarity = normalize(image_features.float(), dim=-1) @ normalize(text_features.float(), dim=-1).T
        partner = torch.arange(len(similarity), device=similarity.device)
        super().update(similarity, partner)
        super().update(similarity.T, partner)


class EmojiTask(pl.LightningModule):
    """Learns which name belongs to which picture.

    Args:
        num_words: size of the vocabulary.
        max_words: length of a padded caption.
        num_pairs: held-out pairs among which recall is measured.
        total_steps: optimizer steps until the learning rate is zero.
        warmup_steps: steps over which it rises.
        learning_rate: its peak.
        weight_decay: of matrices; vectors, positions and the logit scale have none.
        balance: coefficient of the load-balance loss.
    """

    def __init__(
        self,
        num_words: int,
        max_words: int,
        num_pairs: int,
        total_steps: int,
        *,
        warmup_steps: int = 30,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.05,
        balance: float = 0.01,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = EmojiCLIP(num_words, max_words)
        self.loss = ContrastiveLoss()
        self.train_loss = MeanMetric()
        self.recall = Recall(num_pairs)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        contrastive = self.loss(*self.model(batch.images, batch.tokens))
        self.train_loss.update(contrastive.detach())
        self.log("logit_scale", self.loss.logit_scale.exp(), prog_bar=True)
        return contrastive + auxiliary_loss(self.model, balance=self.hparams["balance"])

    def on_train_epoch_end(self) -> None:
        # logged as numbers: a metric with prog_bar=True is computed, which is a collective, when rank 0's bar likes to
        self.log("loss", self.train_loss.compute(), prog_bar=True, sync_dist=True)
        self.train_loss.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.recall.update(*self.model(batch.images, batch.tokens))
        self.log_dict(self.recall, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        is_matrix = {name: p.ndim >= 2 and "position" not in name for name, p in self.named_parameters()}
        groups = [
            {"params": [p for name, p in self.named_parameters() if is_matrix[name]]},
            {"params": [p for name, p in self.named_parameters() if not is_matrix[name]], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=self.hparams["learning_rate"], betas=(0.9, 0.98), weight_decay=self.hparams["weight_decay"]
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def learning_rate_factor(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to zero."""
        warmup = min(1.0, (step + 1) / self.hparams["warmup_steps"])
        return warmup * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.hparams["total_steps"])))
