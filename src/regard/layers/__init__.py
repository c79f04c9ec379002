"""Tensors to tensors: attention, its norms, positions and blocks."""
