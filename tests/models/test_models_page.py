"""docs/models.md says what the models are."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import regard
from regard.models.create import RESNET_SIZES, VIT_SIZES

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
OF_BOTH = {"image_size", "channels", "num_classes", "test_flips", "device", "dtype", "self"}


def rows(after: str) -> list[list[str]]:
    """The cells of the table whose heading row begins so."""
    lines = PAGE[PAGE.index(after) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def parameters(name: str, classes: int) -> str:
    with torch.device("meta"):
        model = regard.create(name, num_classes=classes)
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million"


def test_sizes():
    assert rows("| SimpleViT |") == [
        [f"`{size}`", str(s.dim), str(s.heads), str(s.depth), parameters(f"simple-vit-{size}/16", 1000)]
        for size, s in VIT_SIZES.items()
    ]  # fmt: skip
    assert rows("| PixelResNet |") == [
        [f"`{size}`", ", ".join(map(str, s.widths)), str(s.depth), parameters(f"pixel-resnet-{size}", 10)]
        for size, s in RESNET_SIZES.items()
    ]  # fmt: skip


@pytest.mark.parametrize("model", [regard.SimpleViT, regard.PixelResNet])
def test_options(model):
    section = PAGE[PAGE.index(f"## Options of {model.__name__}") :]
    table = section[section.index("| option") :].split("\n\n")[0]
    named = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named == set(inspect.signature(model).parameters) - OF_BOTH
