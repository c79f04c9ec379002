"""A model and a run small enough to train in a second."""

from pathlib import Path

import pytest

from regard.training.config import TrainConfig
from regard.training.trainer import train

TINY = {"dim": 16, "heads": 2, "dim_head": 8, "depth": 2, "mlp_dim": 32}


def tiny_config(out: Path, **changes) -> TrainConfig:
    """Twelve steps on the digits, an evaluation every four."""
    settings = {
        "data": "digits",
        "model": "simple-vit-nano/4",
        "model_options": TINY,
        "precision": "fp32",
        "steps": 12,
        "batch_size": 64,
        "optimizer": "adamw",
        "lr": 3e-3,
        "eval_every": 0.16,
    }
    return TrainConfig(out=out, **{**settings, **changes})


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a finished run, not to be changed, and what training said."""
    out = tmp_path_factory.mktemp("finished") / "run"
    lines = []
    result = train(tiny_config(out), say=lines.append)
    return out, result, lines
