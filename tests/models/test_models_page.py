"""docs/models.md says what the models are."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import regard
from regard.models.registry import RESNET_SIZES, VIT_SIZES

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
    vits, nets = rows("| SimpleViT |"), rows("| PixelResNet |")
    for row, (size, s) in zip(vits, VIT_SIZES.items(), strict=True):
        numbers = [str(s.dim), str(s.heads), str(s.depth)]
        assert row == [f"`{size}`", *numbers, parameters(f"simple-vit-{size}/16", 1000)]
    for row, (size, s) in zip(nets, RESNET_SIZES.items(), strict=True):
        numbers = [", ".join(map(str, s.widths)), str(s.depth)]
        assert row == [f"`{size}`", *numbers, parameters(f"pixel-resnet-{size}", 10)]


@pytest.mark.parametrize("model", [regard.SimpleViT, regard.PixelResNet])
def test_options(model):
    section = PAGE[PAGE.index(f"## Options of {model.__name__}") :]
    table = section[section.index("| option") :].split("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(inspect.signature(model).parameters) - OF_BOTH
