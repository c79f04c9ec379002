"""Image sizes that grow over a run."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from regard.data.batches import Batch
from regard.errors import InputError
from regard.models.registry import create
from regard.training import trainer as loop
from regard.training.config import Recipe
from regard.training.run_folder import RunFolder
from regard.training.schedule import brought_to, mean_step, size_multiple, training_size, work_done
from regard.training.trainer import train
from tests.training.conftest import tiny_config


@pytest.fixture
def recipe(finished) -> Recipe:
    return RunFolder(finished[0]).config().recipe


def growing(recipe, steps):
    return dataclasses.replace(recipe, steps=steps, start_size=(8, 8), image_size=(16, 24))


def test_sizes_grow_in_multiples_to_the_full_size(recipe):
    recipe = growing(recipe, 16)  # the first twelve steps grow
    assert [training_size(recipe, s, (4, 4)) for s in (0, 3, 6, 9, 11)] == [
        (8, 8), (8, 12), (12, 16), (12, 20), (12, 20)
    ]  # fmt: skip
    assert {training_size(recipe, s, (4, 4)) for s in (12, 15)} == {(16, 24)}
    assert training_size(recipe, 0, (5, 5)) == (5, 5)
    assert training_size(dataclasses.replace(recipe, start_size=None), 0, (4, 4)) == (16, 24)
    with pytest.raises(InputError, match=r"start_size is \(32, 8\).*up to that"):
        dataclasses.replace(recipe, start_size=(32, 8))


def test_the_mean_step_follows_the_area(recipe):
    recipe = growing(recipe, 16)
    seconds = {(8, 8): 1.0}  # one second and 10 ms a pixel more than 64
    for step in range(16):
        h, w = training_size(recipe, step, (4, 4))
        seconds[h, w] = 1 + 0.01 * (h * w - 64)
    wanted = sum(seconds[training_size(recipe, s, (4, 4))] for s in range(16)) / 16
    assert mean_step(recipe, (4, 4), 1.0, seconds[16, 24]) == pytest.approx(wanted)
    whole = dataclasses.replace(recipe, start_size=None)
    assert mean_step(whole, (4, 4), 7.0, 3.0) == 3.0


def test_the_work_of_a_run_is_its_pixels(recipe):
    recipe = growing(recipe, 4)
    assert [training_size(recipe, s, (4, 4)) for s in range(4)] == [
        (8, 8), (8, 12), (12, 16), (16, 24)
    ]  # fmt: skip
    work = work_done(recipe, (4, 4))
    assert [work(step) for step in range(5)] == [0, 64, 160, 352, 736]
    whole = work_done(dataclasses.replace(recipe, start_size=None), (4, 4))
    assert [whole(step) for step in (0, 3)] == [0, 3]


def test_batches_are_resized_and_nothing_else(recipe):
    assert size_multiple(create("simple-vit-nano/4", num_classes=2)) == (4, 4)
    assert size_multiple(create("pixel-resnet-nano", num_classes=2)) == (2, 2)
    batch = Batch(torch.randn(2, 1, 16, 16), *(torch.zeros(2) for _ in range(4)))
    assert brought_to(batch, (16, 16)) is batch
    small = brought_to(batch, (8, 8))
    wanted = F.interpolate(batch.images, (8, 8), mode="bilinear", antialias=True)
    assert torch.equal(small.images, wanted)
    assert small.targets is batch.targets


def test_a_run_trains_at_those_sizes_and_resumes(tmp_path, monkeypatch):
    real, seen = loop.accumulate, []

    def accumulate(job, batch):
        seen.append(tuple(batch.images.shape[-2:]))
        return real(job, batch)

    monkeypatch.setattr(loop, "accumulate", accumulate)
    config = tiny_config(tmp_path / "run", start_size=(8, 8), test_flips="on")
    train(config, say=lambda line: None)
    assert seen == [(8, 8)] * 5 + [(12, 12)] * 4 + [(16, 16)] * 3
    stored = RunFolder(tmp_path / "run").config()
    assert stored.recipe.start_size == (8, 8)
    assert stored.model["test_flips"] is True
    assert RunFolder(tmp_path / "run").load_model(torch.device("cpu")).test_flips


def test_compiled_training_takes_the_same_steps(tmp_path):
    found = []
    for name, compiled in (("plain", False), ("compiled", True)):
        config = tiny_config(tmp_path / name, steps=4, eval_every=100.0, compile=compiled)
        train(config, say=lambda line: None)
        assert RunFolder(tmp_path / name).config().recipe.compile is compiled
        lines = [line for line in RunFolder(tmp_path / name).metrics() if "lr" in line]
        found.append([(line["loss"], line["gradient_norm"]) for line in lines])
    assert len(found[0]) == 4
    for (loss, norm), (compiled_loss, compiled_norm) in zip(*found, strict=True):
        assert compiled_loss == pytest.approx(loss, rel=1e-3)
        assert compiled_norm == pytest.approx(norm, rel=0.1)  # AdamW enlarges what rounding leaves
