"""A study without training: results made up from a rule."""

import pytest

from regard.study.plan import Grid, Settings


def settings(**changes):
    values = {
        "data": "made <b>up", "like": None, "fingerprint": "f", "classes": 10,
        "most_images": 100, "images": 100, "held_out": 50, "chance": 0.1,
        "model": {"name": "simple-vit-nano/4", "num_classes": 10, "image_size": [8, 8]},
        "preprocess": {"size": [8, 8]}, "steps": 40, "batch_size": 10, "warmup": 0.1,
        "weight_decay": 0.05,
    }  # fmt: skip
    return Settings(**{**values, **changes})


def result(run, loss, accuracy, logit=1.0, entropy=1.0):
    """What a run leaves behind; a loss of None is one that diverged."""
    layers = [logit / 2, logit]
    points = [
        {"step": step, "largest_logit": layers, "entropy": [entropy + 0.1, entropy],
         "gradient_norm": 1.0 + step}
        for step in (1, 20, 40)
    ]  # fmt: skip
    checks = [
        {"step": s, "accuracy": (accuracy or 0.1) * s / 40, "loss": 1.0} for s in (10, 20, 40)
    ]
    return {
        **vars(run), "initial_loss": 2.3, "final_loss": loss, "accuracy": accuracy,
        "held_out_loss": loss, "diverged_at": 20 if loss is None else None,
        "losses": [{"step": 10.5, "loss": 2.0}, {"step": 30.5, "loss": loss}],
        "points": points, "checks": checks, "seconds": 1.0,
    }  # fmt: skip


@pytest.fixture
def made_study():
    """(settings, grid, results) of a grid whose figures `rule(run)` gives as keyword arguments."""

    def make(rule, forms=("none", "cap", "unit", "rms"), seeds=3, optimizers=("adamw",)):
        grid = Grid(optimizers, forms, (1e-3, 1e-2, 1e-1), seeds)
        return settings(), grid, [result(run, **rule(run)) for run in grid.runs()]

    return make
