"""One run of a study: batches, schedule, divergence, figures."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from regard.data.batches import TrainBatches
from regard.data.dataset import Data
from regard.data.open import open_data
from regard.data.preprocess import Preprocess
from regard.study import trial as trials
from regard.study.plan import Run, Settings, build
from regard.study.trial import (
    Pictures,
    batch_at,
    due,
    gradient_norm,
    read_pictures,
    smoothed,
    trial,
)
from regard.training.schedule import rate

MODEL = {"name": "simple-vit-nano/4", "num_classes": 2, "image_size": 8, "channels": 1, "depth": 2}


def made_up(images=48):
    """Two classes told apart by brightness."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(images) % 2
    pixels = torch.randint(0, 120, (images, 1, 8, 8), generator=generator)
    pixels = (pixels + 130 * labels.view(-1, 1, 1, 1)).to(torch.uint8)
    return Pictures(pixels, labels, pixels[:10], labels[:10])


def settings_for(pictures, **changes):
    values = {
        "data": "made up", "like": None, "fingerprint": "", "classes": 2, "most_images": 48,
        "images": len(pictures.labels), "held_out": len(pictures.val_labels),
        "chance": pictures.chance, "model": MODEL,
        "preprocess": Preprocess(size=(8, 8), channels=1).to_dict(),
        "steps": 20, "batch_size": 16, "warmup": 0.1, "weight_decay": 0.05,
    }  # fmt: skip
    return Settings(**{**values, **changes})


def test_batches_are_those_of_training():
    data = open_data("digits")
    split = data.splits["train"].take(np.arange(50))
    batches = TrainBatches(split, Preprocess(size=(8, 8), channels=1), batch_size=16, seed=7)
    for step in (0, 2, 3, 11):
        assert batch_at(step, 50, 16, seed=7).tolist() == batches.at(step).indices.tolist()


def test_a_batch_may_span_several_epochs():
    assert sorted(batch_at(0, 5, 15, seed=0).tolist()) == sorted([*range(5)] * 3)


def test_a_run_is_a_plain_loop():
    """The same weights step by step with torch's own AdamW, written out."""
    pictures = made_up()
    settings = settings_for(pictures, weight_decay=0.0)
    run = Run("adamw", "rms", 3e-3, 1)
    model = build("rms", MODEL, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1, betas=(0.9, 0.95), weight_decay=0)
    losses, norms = [], []
    for step in range(20):
        index = torch.from_numpy(batch_at(step, 48, 16, 1))
        x = pictures.images[index].float() / 127.5 - 1
        loss = cross_entropy(model(x), pictures.labels[index])
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate(step, 20, 0.1)
        optimizer.zero_grad()
        loss.backward()
        squares = sum(float(p.grad.double().square().sum()) for p in model.parameters())
        norms.append(math.sqrt(squares))
        optimizer.step()
        losses.append(loss.item())
    found = trial(run, settings, pictures)
    assert found["initial_loss"] == pytest.approx(losses[0], rel=1e-5)
    assert found["final_loss"] == pytest.approx(sum(losses[-2:]) / 2, rel=1e-3)
    assert [p["step"] for p in found["points"]] == [*range(1, 21)]
    measured = [p["gradient_norm"] for p in found["points"]]
    assert measured[:5] == pytest.approx(norms[:5], rel=1e-3)
    with torch.no_grad():
        right = model(pictures.val_images.float() / 127.5 - 1).argmax(1) == pictures.val_labels
    assert found["accuracy"] == pytest.approx(float(right.float().mean()))


def test_a_run_learns_and_its_figures_are_whole_and_repeatable():
    pictures = made_up()
    settings = settings_for(pictures, steps=60)
    ticks = []
    found = trial(Run("muon", "unit", 1e-2, 0), settings, pictures, ticks.append)
    assert found["initial_loss"] == pytest.approx(math.log(2))
    assert found["final_loss"] < 0.1
    assert found["accuracy"] == 1.0
    assert found["diverged_at"] is None
    assert len(found["points"]) == 20
    assert all(len(p["entropy"]) == len(p["largest_logit"]) == 2 for p in found["points"])
    assert all(0 <= e <= math.log(4) + 1e-5 for p in found["points"] for e in p["entropy"])
    assert [c["step"] for c in found["checks"]][-1] == 60
    assert ticks == [p["step"] for p in found["points"]]
    again = trial(Run("muon", "unit", 1e-2, 0), settings, pictures)
    for result in (found, again):
        del result["seconds"]
    assert json.dumps(found) == json.dumps(again)


def test_a_run_that_diverges_says_where_and_stops():
    pictures = made_up()
    settings = settings_for(pictures, steps=200)
    found = trial(Run("adamw", "none", 1e30, 0), settings, pictures)
    assert found["final_loss"] is None
    assert found["accuracy"] is None
    assert found["initial_loss"] == pytest.approx(math.log(2))
    assert 1 < found["diverged_at"] <= 20
    assert found["points"][-1]["step"] < 200
    json.dumps(found, allow_nan=False)


def test_measurements_are_evenly_spread_and_include_both_ends():
    for steps, times in ((20, 20), (200, 20), (250, 10), (33, 10)):
        at = [step for step in range(steps) if due(step, steps, times)]
        assert len(at) == times
        assert at[0] == 0
        assert at[-1] == steps - 1
        gaps = {b - a for a, b in itertools.pairwise(at)}
        assert max(gaps) - min(gaps) <= 1


def test_smoothed_losses_are_means_and_gaps():
    values = [float(i) for i in range(40)]
    found = smoothed(values)
    assert len(found) == trials.POINTS
    assert found[0] == {"step": 1.5, "loss": 0.5}
    assert smoothed([1.0] * 39 + [math.nan])[-1]["loss"] is None


def test_gradient_norm_of_known_gradients():
    model = torch.nn.Linear(2, 1)
    model.weight.grad = torch.tensor([[3.0, 0.0]])
    model.bias.grad = torch.tensor([4.0])
    assert gradient_norm(model) == pytest.approx(5.0)


def test_pictures_are_few_shared_and_the_same_each_time(tmp_path):
    data = open_data("digits")
    preprocess = Preprocess(size=(8, 8), channels=1)
    said = []
    some = read_pictures(data, preprocess, 30, said.append)
    assert some.images.shape == (30, 1, 8, 8)
    assert some.val_images.shape == (30, 1, 8, 8)
    split = data.splits["train"]
    every = {split.read(i).numpy().tobytes(): int(split.labels[i]) for i in range(len(split))}
    for image, label in zip(some.images, some.labels, strict=True):
        assert every[image.numpy().tobytes()] == label
    some.save(tmp_path / "pictures.npz")
    again = Pictures.load(tmp_path / "pictures.npz")
    assert all(torch.equal(a, b) for a, b in zip(vars(some).values(), vars(again).values(),
                                                 strict=True))  # fmt: skip
    counts = torch.bincount(some.val_labels)
    assert some.chance == pytest.approx(int(counts.max()) / 30)
    assert not said


def test_images_that_cannot_be_read_are_left_out_and_said(tmp_path):
    from regard.errors import InputError

    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(4):
            image.new("RGB", (8, 8)).save(tmp_path / name / f"{i}.png")
    data: Data = open_data(tmp_path)
    broken = data.splits["train"]
    broken_path = tmp_path / broken.name(0)
    broken_path.write_bytes(b"no picture")
    said = []
    found = read_pictures(data, Preprocess(size=(8, 8)), 100, said.append)
    assert len(found.images) == len(broken) - 1
    assert said == [f"{data.name}: 1 train image could not be read and left out"]
    for i in range(len(broken)):
        (tmp_path / broken.name(i)).write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"no train image of .* could be read"):
        read_pictures(data, Preprocess(size=(8, 8)), 100, said.append)
