"""Other people's weights and modules: key maps, conversion, acceleration."""

from regard.weights.convert import convert

__all__ = ["convert"]
