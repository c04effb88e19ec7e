"""Callbacks that look at the gradients of each step and may act: the front doors of the house."""
