"""A run opened for use."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from regard._device import pick_device
from regard._io import write_json, write_text
from regard.data.batches import eval_batches
from regard.data.dataset import Data, Split
from regard.data.open import open_data
from regard.errors import InputError, nearest
from regard.training.config import RunConfig
from regard.training.distributed import Processes
from regard.training.metrics import Evaluation
from regard.training.run_folder import RunFolder


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


# Predictions on a split, exact on any number of processes, and a run measured on data.


def predict_split(
    model: nn.Module,
    data: Data,
    split: str,
    config: RunConfig,
    device: torch.device,
    processes: Processes | None = None,
) -> Evaluation:
    """Class probabilities of every image of a split, each counted once; the same on all processes.

    In float32, whatever training runs in, and in batches of the recipe's microbatch.
    """
    rank, world = (processes.rank, processes.world) if processes else (0, 1)
    images = data.splits[split]
    batch_size = config.recipe.microbatch
    batches = eval_batches(
        images,
        config.preprocess,
        batch_size=batch_size,
        workers=config.recipe.workers,
        rank=rank,
        world=world,
    )
    indices, labels, probabilities, unreadable = [], [], [], []
    rounds = 0
    with torch.inference_mode():
        for batch in batches:
            logits = model(batch.images.to(device)).float()
            read = batch.weights > 0
            indices.append(batch.indices[read])
            labels.append(batch.labels[read])
            probabilities.append(logits.softmax(dim=-1).cpu()[read])
            unreadable += [(name, reason) for _, name, reason in batch.unreadable]
            rounds += 1
        if processes and processes.sharded:  # a sharded model's forward needs every process
            blank = torch.zeros(1, config.preprocess.channels, *config.preprocess.size)
            for _ in range(rounds, math.ceil(len(images) / (batch_size * world))):
                model(blank.to(device))
    width = len(config.classes)
    mine = (
        np.concatenate([np.zeros(0, np.int64), *(part.numpy() for part in indices)]),
        np.concatenate([np.zeros(0, np.int64), *(part.numpy() for part in labels)]),
        np.concatenate([np.zeros((0, width), np.float32), *(p.numpy() for p in probabilities)]),
        unreadable,
    )
    every = processes.gather(mine) if processes else [mine]
    where = np.concatenate([part[0] for part in every])
    order = np.argsort(where)
    if not len(order):
        raise InputError(f"no image of the {split} split of {data.name} could be read")
    return Evaluation(
        data=data.name,
        split=split,
        classes=config.classes,
        names=tuple(images.name(int(i)) for i in where[order]),
        labels=np.concatenate([part[1] for part in every])[order],
        probabilities=np.concatenate([part[2] for part in every])[order].astype(np.float64),
        unreadable=tuple(sorted(entry for part in every for entry in part[3])),
    )


def held_out(data: Data) -> str:
    """The split that is measured on: test where there is one, else val, else all images."""
    return next(title for title in ("test", "val", "all") if title in data.splits)


def same_data(one: str, other: str) -> bool:
    """Whether two requests name the same images, however a path to them is written."""
    return one == other or (Path(one).exists() and Path(one).resolve() == Path(other).resolve())


def evaluate(
    run: str | Path | RunFolder,
    data: str | None = None,
    *,
    split: str | None = None,
    device: str = "auto",
) -> Evaluation:
    """Measure a run with the weights in its folder.

    Without `data`, or with the run's own, its own held-out images are used; of other data the
    "test" or "val" split where it has one of its own, else every image, as the split "all".
    Classes are matched by name.
    """
    folder = RunFolder.open(run)
    config = folder.config()
    own = data is None or same_data(data, config.recipe.data)
    opened = folder.data() if own else open_other(str(data), config)
    split = split or held_out(opened)
    if split not in opened.splits:
        raise InputError(f"{opened.name} has no {split} split; {nearest(split, opened.splits)}")
    where = pick_device(device)
    return predict_split(folder.load_model(where), opened, split, config, where)


def open_other(spec: str, config: RunConfig) -> Data:
    """Data that a run was not trained on, with its classes as the run numbers them."""
    data = open_data(spec, channels=config.preprocess.channels)
    for name in data.classes:
        if name not in config.classes:
            raise InputError(
                f"{data.name} has the class {name!r}, which the run does not know; "
                f"{nearest(name, config.classes)}"
            )
    number = np.array([config.classes.index(name) for name in data.classes])
    splits = data.splits
    if data.rule["made"] == "seeded":  # a split of ours holds out nothing here: take them all
        whole = {"all": joined([s for t, s in splits.items() if t != "test"])}
        splits = {**whole, **{t: s for t, s in splits.items() if t == "test"}}
    k = len(config.classes)
    splits = {t: Split(s.source, s.items, number[s.labels], k) for t, s in splits.items()}
    return dataclasses.replace(data, classes=config.classes, splits=splits)


def joined(splits: list[Split]) -> Split:
    """The images of several splits of one source, in the order of the source."""
    items = np.concatenate([split.items for split in splits])
    labels = np.concatenate([split.labels for split in splits])
    order = np.argsort(items)
    return Split(splits[0].source, items[order], labels[order], splits[0].num_classes)


def write_evaluation(folder: RunFolder, evaluation: Evaluation) -> None:
    """evaluation.json, and predictions, scores by class and confusion matrix as CSV."""
    write_json(folder.evaluation_file, evaluation.summary())
    write_text(folder.predictions_file, evaluation.predictions_csv())
    write_text(folder.per_class_file, evaluation.per_class_csv())
    write_text(folder.confusion_file, evaluation.confusion_csv())
