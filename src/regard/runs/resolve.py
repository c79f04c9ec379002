"""From what was asked to what is done: a new run's recipe, or a resumed run's changes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from regard.errors import InputError, counted
from regard.images import Augment, Data
from regard.models.create import family
from regard.runs.config import Recipe, TrainConfig
from regard.runs.presets import COMMON, choose_preset, model_for, side_for

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
