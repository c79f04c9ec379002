"""Class folders made on the spot."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

MakeFolder = Callable[..., Path]


def picture(seed: int, size: tuple[int, int] = (12, 10)) -> Image.Image:
    """A smooth random colour picture, width x height as PIL counts."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Write pictures NN.png into the folders named by `counts`, all different."""

    def make(name: str = "data", **counts: int) -> Path:
        root = tmp_path / name
        seed = 0
        for folder, count in counts.items():
            target = root / folder.replace("__", "/")
            target.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                picture(seed).save(target / f"{i:02d}.png")
                seed += 1
        return root

    return make
