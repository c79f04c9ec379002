"""Named recipes: everything a request leaves open. Each says where it is from and what it reaches.

A preset is chosen by the data unless named, and the choice is said aloud.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard.data.augment import Augment
from regard.data.dataset import Data
from regard.errors import InputError, counted
from regard.models.registry import family
from regard.training.config import Recipe, TrainConfig

MANY = 100_000  # images from which a plain ViT learns well by the recipe made for a million

# What every preset shares unless it says otherwise.
COMMON: dict[str, Any] = {
    "model_options": {},
    "test_flips": "off",
    "fit": "stretch",
    "class_weights": "none",
    "clip": 1.0,
    "schedule": "cosine",
    "ema": 0.0,
    "seed": 0,
    "workers": 0,
    "device": "auto",
    "strategy": "auto",
    "precision": "auto",
    "eval_every": 1.0,
    "save_every": 10.0,
    "keep": 2,
    "memory": 2.0,
}


@dataclass(frozen=True)
class Preset:
    """`values` are fields of `Recipe`, and "epochs"; `model` and `image_size` may be left out."""

    source: str
    minutes: str
    score: str
    values: Mapping[str, Any]


PRESETS = {
    "digits": Preset(
        # Digits of 8 × 8 pixels are brought to 16 × 16, as a patch of 4 single-channel values
        # loses its brightness and contrast to the first LayerNorm: at patch 2 of 8 × 8 the same
        # recipe reaches 92%. QK norm is the class's own: under Muon at this rate no form differs
        # from another (docs/stability.md).
        source="our own search on scikit-learn's digits",
        minutes="half a minute on 2 cores",
        score="99 to 100% of the held-out tenth",
        values={
            "model": "simple-vit-nano/4",
            "image_size": (16, 16),
            "epochs": 20,
            "batch_size": 64,
            "lr": 1e-2,
            "optimizer": "muon",
            "weight_decay": 0.05,
            "warmup": 0.1,
            "label_smoothing": 0.1,
            "augment": Augment(shift=2),
            "eval_every": 5.0,
        },
    ),
    "small-images": Preset(
        # Twelve passes take 3.9e14 multiplications and additions for 45,000 images of 32 × 32.
        source="airbench94 (Jordan 2024, arXiv 2404.00498), in batches of 500 for its 2,000; our "
        "figures are in docs/results.md",
        minutes="half an hour for 45,000 images on 2 cores with bfloat16 instructions",
        score="90% of CIFAR-10 in 17 minutes there, with images that grow from 20 pixels",
        values={
            "model": "pixel-resnet-s",
            "epochs": 12,
            "batch_size": 500,
            "lr": 2e-2,
            "optimizer": "muon-sgd",
            "weight_decay": 0.2,
            "warmup": 0.0,
            "schedule": "linear",
            "clip": 0.0,
            "label_smoothing": 0.2,
            "augment": Augment(flip="alternate", shift=2),
            "test_flips": "on",
        },
    ),
    "imagenet": Preset(
        # The source's decay of 1e-4 a step is not multiplied by the rate, and ours is: 1e-4 / 1e-3.
        source="Beyer, Zhai and Kolesnikov 2022, arXiv 2205.01580: the plain ViT's 90 epochs",
        minutes="days on one GPU for 1.3 million images",
        score="76.5% on ImageNet-1k as published; not run here",
        values={
            "model": "simple-vit-s/16",
            # Under AdamW at such rates the unit form, the class's default, starts slower, and RMS
            # is the less sensitive to the rate (docs/stability.md; small models, two data sets).
            "model_options": {"qk_norm": "rms"},
            "image_size": (224, 224),
            "epochs": 90,
            "batch_size": 1024,
            "lr": 1e-3,
            "optimizer": "adamw",
            "weight_decay": 0.1,
            "warmup": 0.09,  # 10,000 of 112,600 steps
            "label_smoothing": 0.0,
            "augment": Augment(
                crop_scale=(0.05, 1.0), randaugment=(2, 10), flip="random", mixup=0.2
            ),
            "fit": "crop",
        },
    ),
    "small": Preset(
        source="Muon for small transformers (Jordan et al. 2024); the augmentation of Hassani et "
        "al. 2021, arXiv 2104.05704, without its policy search",
        minutes="depends on the data",
        score="88% of CIFAR-10 after an hour on 2 cores: SimpleViT 128 wide, 4 deep, at twice "
        "the rate (docs/results.md)",
        values={
            # With this stem a pass teaches more, and a step takes less time (docs/results.md).
            "model_options": {"stem": "conv"},
            "epochs": 100,
            "batch_size": 128,
            "lr": 5e-3,
            "optimizer": "muon",
            "weight_decay": 0.05,
            "warmup": 0.05,
            "label_smoothing": 0.1,
            "augment": Augment(flip="random", shift=2),
        },
    ),
}


def choose_preset(data: Data, name: str | None, model: str | None) -> tuple[str, Preset]:
    """The preset of this name, or the one for this data and model."""
    if name is None:
        name = preset_for(data, model)
    if name not in PRESETS:
        raise InputError(f"there is no preset {name!r}; give one of {', '.join(PRESETS)}")
    return name, PRESETS[name]


def preset_for(data: Data, model: str | None) -> str:
    """digits for the digits, else by the model's family and the number and size of the images.

    A transformer that starts from nothing needs many images, or a long schedule and much
    augmentation; a convolutional net does not.
    """
    if data.name == "digits":
        return "digits"
    if model is not None and model.startswith("pixel-resnet"):
        return "small-images"
    large = side_for(data) == 128
    if len(data.splits["train"]) >= MANY and large:
        return "imagenet"
    return "small-images" if model is None and not large else "small"


def model_for(side: int) -> str:
    """A small ViT that cuts an image of this side into 8 × 8 patches or fewer."""
    return f"simple-vit-ti/{max(1, side // 8)}"


def side_for(data: Data) -> int:
    """32, 64 or 128 pixels, the nearest below the usual shorter side of the training images."""
    return 128 if data.usual_side >= 128 else 64 if data.usual_side >= 64 else 32


# From what was asked to what is done: a new run's recipe, or a resumed run's changes.


# These decide how a run goes on, not what it is: --resume may change them.
CHANGEABLE = (
    "epochs", "steps", "minutes", "lr", "workers", "device", "strategy", "microbatch",
    "eval_every", "save_every", "keep", "memory", "tensorboard",
)  # fmt: skip


AUGMENTATIONS = tuple(f.name for f in dataclasses.fields(Augment))


def given(config: TrainConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the request says itself: fields of `Recipe`, and fields of `Augment`."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    said = {n: v for n, v in values.items() if v is not None and v is not False and v != {}}
    said |= {name: str(said[name]) for name in ("init", "quarantine") if name in said}
    augment = {name: said.pop(name) for name in AUGMENTATIONS if name in said}
    return {n: v for n, v in said.items() if n not in ("out", "resume")}, augment


def new_recipe(
    config: TrainConfig, data: Data, world: int, inherited: Mapping[str, Any]
) -> tuple[Recipe, list[str]]:
    """The recipe of a new run, and what to tell the user about its choices.

    `inherited` is what a run given by --init decides. With --minutes the steps are those of the
    preset's epochs until they are planned.
    """
    name, preset = choose_preset(data, config.preset, config.model or inherited.get("model"))
    asked, augment = given(config)
    notes = []
    if config.preset is None:
        cause = "model" if config.model or inherited.get("model") else "data"
        notes.append(f"preset {name}, for this {cause} (give --preset to choose another)")
    values = {**COMMON, **preset.values, **inherited, **asked, "preset": name}
    if "model" in asked and family(asked["model"]) != family(preset.values.get("model", "")):
        values["model_options"] = asked.get("model_options", {})  # the preset's are of its family
    elif "model" not in inherited:
        values["model_options"] = {
            **preset.values.get("model_options", {}), **asked.get("model_options", {})
        }  # fmt: skip
    values["augment"] = dataclasses.replace(values.get("augment", Augment()), **augment)
    values.setdefault("image_size", (side_for(data),) * 2)
    values.setdefault("model", model_for(min(values["image_size"])))
    decided = {*asked, *inherited}
    if "model" not in decided:
        notes.append(f"model {values['model']}")
    if "image_size" not in decided:
        notes.append("images at {} × {} pixels".format(*values["image_size"]))
    images = len(data.splits["train"])
    values["batch_size"] = min(values["batch_size"], largest_batch(images, world))
    if config.batch_size is not None:
        if config.batch_size > images:
            raise InputError(
                f"batch_size is {config.batch_size}, and {data.name} has {images} training images; "
                "give at most that"
            )
        values["batch_size"] = config.batch_size
    values.setdefault("microbatch", max(1, values["batch_size"] // world))
    epochs = values.pop("epochs", preset.values["epochs"])
    if config.steps is None and config.minutes is None:
        values["epochs"] = epochs
    values["steps"] = config.steps or steps_of(epochs, images, values["batch_size"])
    if config.minutes is None:
        notes.append(
            f"{counted(values['steps'], 'step')} of {counted(values['batch_size'], 'image')}"
        )
    return Recipe(**values), notes


def resumed_recipe(
    recipe: Recipe, config: TrainConfig, data: Data, world: int
) -> tuple[Recipe, dict[str, Any]]:
    """The recipe a run goes on with, and what of it is new; other differences are refused."""
    asked, augment = given(config)
    if augment:
        asked["augment"] = dataclasses.replace(recipe.augment, **augment)
    changed = {n: v for n, v in asked.items() if v != getattr(recipe, n)}
    if changed.get("model_options", {}).items() <= recipe.model_options.items():
        changed.pop("model_options", None)
    fixed = [name for name in changed if name not in CHANGEABLE]
    if fixed:
        name = fixed[0]
        raise InputError(
            f"{name} is {changed[name]!r}, but the run was started with {getattr(recipe, name)!r}; "
            f"leave it out, or start a new run without --resume. --resume may change "
            f"{', '.join(CHANGEABLE)}"
        )
    length = changed.keys() & {"epochs", "steps", "minutes"}
    if length:
        changed |= {"epochs": config.epochs, "minutes": config.minutes}
        images = len(data.splits["train"])
        if config.epochs is not None:
            changed["steps"] = steps_of(config.epochs, images, recipe.batch_size)
    microbatch = changed.get("microbatch", recipe.microbatch)
    if recipe.batch_size % (microbatch * world) and "microbatch" not in changed:
        changed["microbatch"] = max(1, recipe.batch_size // world)
    return dataclasses.replace(recipe, **changed), changed


def steps_of(epochs: float, images: int, batch_size: int) -> int:
    """The steps that see every image `epochs` times, rounded up."""
    return max(1, -int(-epochs * images // batch_size))


def largest_batch(images: int, world: int) -> int:
    """A preset's batch is at most a quarter of the images, in equal shares for the processes, of
    two images or more where there are so many: a batch norm needs two."""
    return max(images // 4 // world, min(2, images // world), 1) * world
