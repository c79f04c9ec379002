"""Run folders to ship from: small models, fitted for a moment on the embedded digits."""

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.data.augment import Augment
from regard.data.open import open_data
from regard.data.preprocess import Preprocess
from regard.training.config import Recipe, RunConfig
from regard.training.presets import COMMON
from regard.training.run_folder import RunFolder

VIT = {"name": "simple-vit-nano/4", "image_size": [8, 8], "channels": 1, "depth": 1}
NET = {"name": "pixel-resnet-nano", "image_size": [8, 8], "channels": 1, "widths": [8, 16],
       "depth": 1}  # fmt: skip


def recipe(data: str, model: dict, preprocess: Preprocess) -> Recipe:
    chosen = {
        **COMMON, "data": data, "model": model["name"], "preset": "test", "steps": 30,
        "batch_size": 64, "microbatch": 64, "lr": 3e-3, "optimizer": "adamw",
        "weight_decay": 0.0, "warmup": 0.0, "label_smoothing": 0.0, "augment": Augment(),
        "image_size": preprocess.size, "fit": preprocess.fit,
    }  # fmt: skip
    return Recipe(**chosen)


def fit(model, data, preprocess, steps):
    """A few steps of Adam, so that logits have a size and most classes are right."""
    torch.manual_seed(0)
    train = data.splits["train"]
    images = torch.stack([preprocess(train.read(i)) for i in range(len(train))])
    labels = torch.from_numpy(train.labels)
    if hasattr(model, "initialise_from"):
        model.initialise_from(images)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        at = torch.arange(step * 64, step * 64 + 64) % len(images)
        loss = torch.nn.functional.cross_entropy(model.train()(images[at]), labels[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if hasattr(model, "calibrate"):
        model.calibrate(images)
    return model.eval()


def write_run(path, model_options, data="digits", steps=60, preprocess=None):
    """A run folder as training leaves it, without its history."""
    opened = open_data(data)
    preprocess = preprocess or Preprocess((8, 8), channels=1, mean=(0.3,), std=(0.35,))
    arguments = {**model_options, "num_classes": len(opened.classes)}
    torch.manual_seed(0)
    model = fit(regard.create(**arguments), opened, preprocess, steps)
    folder = RunFolder(path)
    path.mkdir(parents=True)
    config = RunConfig(
        recipe=recipe(data, arguments, preprocess),
        model=arguments,
        classes=opened.classes,
        preprocess=preprocess,
        segments=(),
    )
    folder.write_config(config)
    folder.write_weights(model.state_dict(), config, 30)
    regard._io.write_json(folder.split_file, opened.record())
    return path


@pytest.fixture(scope="session")
def vit_run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "vit", VIT)


@pytest.fixture(scope="session")
def net_run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "net", NET)


@pytest.fixture
def pictures(tmp_path):
    """Fifteen grey pictures of several sizes and formats, by path and pixels."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    draws = np.random.default_rng(0)
    found = {}
    for i in range(15):
        pixels = draws.integers(0, 256, (8 + i % 3, 8 + i % 5), dtype=np.uint8)
        path = folder / f"{i:02d}.{'png' if i % 2 else 'bmp'}"
        Image.fromarray(pixels).save(path)
        found[str(path)] = pixels
    return found
