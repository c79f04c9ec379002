"""Other people's weights and modules: key maps, conversion, acceleration."""

from regard.weights.accelerate import Report, accelerate, restore
from regard.weights.convert import convert
from regard.weights.hub import from_pretrained, push_to_hub, save_pretrained
from regard.weights.layouts import LAYOUTS

__all__ = [
    "LAYOUTS",
    "Report",
    "accelerate",
    "convert",
    "from_pretrained",
    "push_to_hub",
    "restore",
    "save_pretrained",
]
