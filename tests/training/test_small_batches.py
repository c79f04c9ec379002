"""Models whose batch norms need two images: batches of one are refused before a run has begun."""

import numpy as np
import pytest

from regard.errors import InputError
from regard.training.calibration import COUNT, spread
from regard.training.config import TrainConfig
from regard.training.presets import largest_batch
from regard.training.run_folder import RunFolder
from regard.training.trainer import train
from tests.training.conftest import TINY, tiny_config

STEM = {"model_options": {**TINY, "stem": "conv"}}


def quiet(line):
    pass


@pytest.mark.parametrize("sizes", [{"batch_size": 1}, {"batch_size": 8, "microbatch": 1}])
@pytest.mark.parametrize(
    "model", [STEM, {"model": "pixel-resnet-nano", "model_options": {"widths": (8,), "depth": 1}}]
)
def test_a_batch_of_one_leaves_nothing_behind(sizes, model, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(InputError, match="need 2 images or more at a time: raise --batch-size"):
        train(tiny_config(out, **model, **sizes), say=quiet)
    assert not out.exists()


def test_a_patch_stem_trains_on_single_images(tmp_path):
    train(tiny_config(tmp_path / "run", batch_size=1, steps=2, eval_every=9.0), say=quiet)


def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path):
    out = tmp_path / "run"
    train(tiny_config(out, **STEM, steps=2), say=quiet)
    before = RunFolder(out).config()
    with pytest.raises(InputError, match="need 2 images or more"):
        train(TrainConfig(out=out, resume=True, steps=4, microbatch=1), say=quiet)
    assert RunFolder(out).config() == before
    train(TrainConfig(out=out, resume=True, steps=4), say=quiet)
    assert RunFolder(out).config().recipe.steps == 4


@pytest.mark.parametrize(
    ("images", "world", "batch"),
    [(1, 1, 1), (2, 1, 2), (7, 1, 2), (8, 1, 2), (40, 1, 10), (7, 2, 4), (3, 2, 2), (1, 2, 2)],
)
def test_the_largest_batch_has_two_images_for_each_process_where_there_are_so_many(
    images, world, batch
):
    assert largest_batch(images, world) == batch


@pytest.mark.parametrize("images", [1, 2047, 2048, 2049, 4095, 45_000])
def test_images_for_statistics_stand_evenly_over_all(images):
    found = np.asarray(spread(images))
    assert len(found) == min(images, COUNT)
    assert found[0] == 0
    steps = np.diff(np.append(found, images))
    assert steps.min() >= 1
    assert steps.max() - steps.min() <= 1
