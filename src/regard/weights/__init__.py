"""Other people's weights and modules: key maps, conversion, acceleration."""

from regard.weights.convert import convert
from regard.weights.layouts import LAYOUTS

__all__ = ["LAYOUTS", "convert"]
