"""Requests, recipes and config.json."""

import dataclasses
import json
import re

import pytest
import torch

from regard.data.augment import Augment
from regard.data.open import open_data
from regard.errors import InputError
from regard.training.config import Recipe, RunConfig, TrainConfig
from regard.training.presets import (
    COMMON,
    PRESETS,
    choose_preset,
    new_recipe,
    resumed_recipe,
    steps_of,
)
from regard.training.run_folder import RunFolder


def recipe(**changes):
    config = TrainConfig("digits", **changes)
    return new_recipe(config, open_data("digits"), 1, {})


def test_a_recipe_has_every_choice_of_a_request():
    asked = {f.name for f in dataclasses.fields(TrainConfig)} - {"out", "resume"}
    augment = {f.name for f in dataclasses.fields(Augment)}
    assert augment < asked
    assert {f.name for f in dataclasses.fields(Recipe)} == asked - augment | {"augment"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 0.0}, "lr is 0.0; give a number above 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"epochs": float("inf")}, "epochs is inf"),
        ({"batch_size": 0}, "batch_size is 0; give a number at least 1"),
        ({"warmup": 1.5}, "warmup is 1.5; give a number at least 0 and at most 1"),
        ({"epochs": 3, "minutes": 2}, "epochs and minutes are given together"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'; give one of adamw, muon, muon-sgd"),
    ],
)
def test_a_bad_request_is_refused_by_name(changes, words):
    with pytest.raises(InputError, match=re.escape(words)):
        TrainConfig("digits", **changes)


def test_a_microbatch_divides_the_batch():
    with pytest.raises(InputError, match="a microbatch of 48 does not divide the batch size 64"):
        recipe(batch_size=64, microbatch=48)


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(InputError, match="batch_size is 100000, and digits has 1618 training im"):
        recipe(batch_size=100_000)


@pytest.mark.parametrize("name", ["muon", "muon-sgd"])
def test_muon_is_not_sharded(name):
    with pytest.raises(InputError, match="muon orthogonalises whole matrices, which fsdp spreads"):
        recipe(optimizer=name, strategy="fsdp")


def test_what_is_given_beats_the_preset_and_the_rest_is_its():
    got, notes = recipe(lr=0.5, shift=3, steps=7)
    assert (got.lr, got.steps, got.epochs, got.augment.shift) == (0.5, 7, None, 3)
    preset = PRESETS["digits"].values
    assert (got.preset, got.model, got.clip) == ("digits", preset["model"], COMMON["clip"])
    assert got.weight_decay == preset["weight_decay"]
    assert notes == [
        "preset digits, for this data (give --preset to choose another)",
        "model simple-vit-nano/4",
        "images at 16 × 16 pixels",
        "7 steps of 64 images",
    ]
    _, notes = recipe(model="simple-vit-nano/2", image_size=(8, 8))
    assert not any(note.startswith(("model", "images")) for note in notes)


def test_epochs_become_steps_rounded_up():
    assert steps_of(1, 100, 32) == 4
    assert steps_of(2, 96, 32) == 6
    assert steps_of(0.01, 100, 64) == 1
    got, _ = recipe(epochs=2, batch_size=100)
    assert got.steps == 33  # 2 · 1618 / 100 = 32.36


class Pictures:
    """A training split of `count` pictures of one size, of which only some are asked for."""

    def __init__(self, count, height, width):
        self.count, self.shape = count, (3, height, width)

    def __len__(self):
        return self.count

    def read(self, i):
        return torch.zeros(self.shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("pictures", "model", "preset"),
    [
        (Pictures(5_000, 32, 48), None, "small-images"),
        (Pictures(5_000, 32, 48), "simple-vit-ti/4", "small"),
        (Pictures(5_000, 300, 200), None, "small"),
        (Pictures(99_999, 300, 200), "simple-vit-s/16", "small"),
        (Pictures(100_000, 300, 200), "simple-vit-s/16", "imagenet"),
        (Pictures(100_000, 300, 200), "pixel-resnet-s", "small-images"),
        (Pictures(100_000, 300, 100), None, "small-images"),
    ],
)
def test_a_preset_follows_the_data_and_the_model(pictures, model, preset):
    data = dataclasses.replace(open_data("digits"), name="others", splits={"train": pictures})
    assert choose_preset(data, None, model) == (preset, PRESETS[preset])
    assert choose_preset(data, "small", model) == ("small", PRESETS["small"])


def test_every_preset_makes_a_recipe():
    for name in PRESETS:
        got, _ = recipe(preset=name)
        assert (got.preset, got.epochs) == (name, PRESETS[name].values["epochs"])


def test_the_options_of_a_preset_are_those_of_its_family_of_models():
    def options(**changes):
        return recipe(preset="imagenet", **changes)[0].model_options

    assert options() == {"qk_norm": "rms"}
    assert options(model_options={"depth": 2}) == {"qk_norm": "rms", "depth": 2}
    assert options(model_options={"qk_norm": "unit"}) == {"qk_norm": "unit"}
    assert options(model="simple-vit-b/16") == {"qk_norm": "rms"}
    assert options(model="simple-vit-b/16", model_options={"qk_norm": "layer"}) == {
        "qk_norm": "layer"
    }
    assert options(model="timm:vit_small_patch16_224") == {}
    assert options(model="pixel-resnet-s") == {}
    assert recipe(preset="small")[0].model_options == {"stem": "conv"}
    assert recipe(preset="small", model="simple-vit-nano/4")[0].model_options == {}
    assert options(model="pixel-resnet-s", model_options={"depth": 1}) == {"depth": 1}


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(InputError, match=r"there is no preset 'digit'; give one of digits, small-"):
        recipe(preset="digit")


def test_resume_takes_what_was_decided_and_refuses_what_would_change_the_run():
    data = open_data("digits")
    first, _ = recipe(steps=10, batch_size=64)
    same, changed = resumed_recipe(first, TrainConfig("digits", resume=True), data, 1)
    assert (same, changed) == (first, {})
    slower, changed = resumed_recipe(first, TrainConfig("digits", lr=1e-5, workers=2), data, 1)
    assert changed == {"lr": 1e-5, "workers": 2}
    assert slower == dataclasses.replace(first, lr=1e-5, workers=2)
    longer, changed = resumed_recipe(first, TrainConfig("digits", epochs=2), data, 1)
    assert (longer.steps, longer.epochs) == (steps_of(2, 1618, 64), 2)
    for name, value in (("batch_size", 32), ("seed", 3), ("clip", 0.5), ("model", "simple-vit-s/2"),
                        ("preset", "small"), ("model_options", {"depth": 3})):  # fmt: skip
        with pytest.raises(InputError, match=f"^{name} is .*, but the run was started with"):
            resumed_recipe(first, TrainConfig("digits", **{name: value}), data, 1)
    with pytest.raises(InputError, match=r"^augment is Augment"):
        resumed_recipe(first, TrainConfig("digits", shift=3), data, 1)


def test_another_number_of_processes_gets_another_microbatch():
    first, _ = recipe(steps=10, batch_size=64)
    two, changed = resumed_recipe(first, TrainConfig("digits"), open_data("digits"), 2)
    assert changed == {"microbatch": 32}
    assert two.microbatch == 32


def test_config_json_comes_back_and_refuses_other_keys(finished):
    folder = RunFolder(finished[0])
    stored = json.loads(folder.config_file.read_text())
    config = folder.config()
    assert json.loads(json.dumps(config.to_dict())) == stored
    with pytest.raises(InputError, match=r"c, recipe: there is no setting 'lrr'; nearest: lr"):
        RunConfig.from_dict({**stored, "recipe": {**stored["recipe"], "lrr": 1}}, "c")
    short = {k: v for k, v in stored["recipe"].items() if k != "lr"}
    with pytest.raises(InputError, match="c, recipe: the setting 'lr' is missing"):
        RunConfig.from_dict({**stored, "recipe": short}, "c")
    with pytest.raises(InputError, match="a format this version does not read"):
        RunConfig.from_dict({**stored, "format": 2})
