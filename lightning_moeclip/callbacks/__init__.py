"""Callbacks that look at the gradients of each step and may act: the front doors of the house."""

from lightning_moeclip.callbacks.cosine_rollback import CosineRollback
from lightning_moeclip.callbacks.expert_load_monitor import ExpertLoadMonitor
from lightning_moeclip.callbacks.residual_resync import ResidualResync
from lightning_moeclip.callbacks.variance_heatmap import VarianceHeatmap

__all__ = ["CosineRollback", "ExpertLoadMonitor", "ResidualResync", "VarianceHeatmap"]
