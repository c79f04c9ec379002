"""Preprocessing inside an exported file, against the preprocessing itself and against a loop."""

import numpy as np
import pytest
import torch
from torch import nn

from regard.data.preprocess import Preprocess, round_ratio
from regard.export.formats import ImageInput, interpolation


class Keep(nn.Module):
    def forward(self, x):
        self.seen = x
        return x.flatten(1)


@pytest.mark.parametrize("fit", ["stretch", "crop", "letterbox"])
@pytest.mark.parametrize("size", [(28, 28), (9, 31)])
def test_it_is_the_preprocessing_itself(fit, size):
    preprocess = Preprocess(size, fit=fit, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    keep = Keep()
    inside = ImageInput(keep, preprocess)
    torch.manual_seed(0)
    for h, w in [(1, 1), (2, 2), (28, 28), (37, 81), (81, 37), (301, 200), (1, 50), (50, 1)]:
        pictures = torch.randint(0, 256, (2, h, w, 3), dtype=torch.uint8)
        inside(pictures)
        wanted = torch.stack([preprocess(p.permute(2, 0, 1)) for p in pictures])
        # in units of one step of a pixel: 1 / (255 · 0.2)
        assert (keep.seen - wanted).abs().max() < 2e-3 / 51, (h, w)


def test_one_line_by_a_loop():
    # 7 pixels, of which 1..5 are resized to outputs 1..3 of 4
    found = interpolation(7, (1, 5), 4, (1, 3), torch.device("cpu")).numpy()
    wanted = np.zeros((4, 7))
    scale = 5 / 3
    for i in range(3):
        centre = 1 + (i + 0.5) * scale
        for j in range(1, 6):
            wanted[1 + i, j] = max(0.0, 1 - abs(j + 0.5 - centre) / scale)
        wanted[1 + i] /= wanted[1 + i].sum()
    np.testing.assert_allclose(found, wanted, atol=1e-7)


def test_ratios_round_as_python_does():
    for a in range(200):
        for b in range(1, 40):
            assert round_ratio(a, b) == round(a / b)
