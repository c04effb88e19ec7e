"""Callbacks that look at the gradients of each step and may act: the front doors of the house."""

from lightning_moeclip.callbacks.variance_heatmap import VarianceHeatmap

__all__ = ["VarianceHeatmap"]
