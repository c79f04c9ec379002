"""A run opened for export: its model, and the images to prove a file on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.deploy.facts import digest
from regard.errors import InputError
from regard.images import Split, open_data, readable
from regard.runs.config import RunConfig
from regard.runs.folder import RunFolder


@dataclass(frozen=True)
class Source:
    """What an export starts from; the model is in eval mode, on the CPU."""

    folder: RunFolder
    config: RunConfig
    model: torch.nn.Module
    sha256: str
    split: Split
    proven_on: str

    def about(self) -> dict[str, Any]:
        """What the run folder says that a model card repeats."""
        folder = self.folder
        held = folder.evaluation() if folder.evaluation_file.is_file() else None
        steps = [line["step"] for line in folder.metrics()]
        return {
            "data": self.config.recipe.data,
            "evaluation": held,
            "step": max(steps, default=self.config.recipe.steps),
        }

    def example(self) -> Tensor:
        """The first validation image that can be read, uint8 (c, H, W)."""
        for _, picture in readable(self.split, range(len(self.split))):
            return picture
        raise InputError(f"no image of {self.proven_on} can be read; restore them, or give --data")


def open_source(run: Path, data: str | None) -> Source:
    """The run's model and its validation images, or those of `data`, classes matched by name."""
    folder = RunFolder.open(run)
    config, model = open_model(folder)
    if data is None:
        opened, title = folder.data(), "val"
    else:
        opened = open_data(data, channels=config.preprocess.channels)
        title = "test" if "test" in opened.splits else "val"
    split = relabelled(opened.splits[title], opened.classes, config.classes, opened.name)
    return Source(
        folder=folder,
        config=config,
        model=model,
        sha256=digest(folder.weights_file),
        split=split,
        proven_on=f"the {title} split of {opened.name}",
    )


def open_model(folder: RunFolder, device: torch.device | str = "cpu") -> tuple[RunConfig, Any]:
    """A run's config and its model in eval mode; refuses a run without weights."""
    config = folder.config()
    if not folder.weights_file.is_file():
        raise InputError(
            f"{folder} has no weights yet ({folder.weights_file.name} is missing); let the run "
            "finish, or go on with it by `regard train … --resume`"
        )
    check_classes(config.model, config.classes, str(folder))
    return config, folder.load_model(device).eval()


def check_classes(arguments: dict[str, Any], classes: tuple[str, ...], where: str) -> None:
    """Refuse a model whose outputs are not one a class."""
    if arguments.get("num_classes") != len(classes):
        raise InputError(
            f"the model in {where} has {arguments.get('num_classes')} outputs and "
            f"{len(classes)} class names; they must be as many: restore its config"
        )


def relabelled(split: Split, names: tuple[str, ...], classes: tuple[str, ...], where: str) -> Split:
    """The split with labels that count the run's classes, matched by name."""
    strange = [name for name in names if name not in classes]
    if strange:
        raise InputError(
            f"{where} has {len(names)} classes, among them {strange[0]!r}, and the run "
            f"{len(classes)} without it; give data of the run's classes"
        )
    number = np.array([classes.index(name) for name in names])
    return Split(split.source, split.items, number[split.labels], len(classes))
