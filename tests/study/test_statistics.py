"""Studies of models that take statistics of images, and what a worker refuses."""

import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

from regard.data.open import open_data
from regard.data.preprocess import Preprocess
from regard.errors import InputError
from regard.models.simple_vit import SimpleViT
from regard.study.plan import Grid, Plan, Run, StudyFolder, StudyOptions, build
from regard.study.study import study as make_study
from regard.study.trial import batch_at, reference_of, trial
from regard.study.workers import run_all
from regard.training.calibration import COUNT
from regard.training.schedule import rate
from tests.study.test_trial import MODEL, made_up, settings_for

STEM = {**MODEL, "stem": "conv"}
PLAIN = Preprocess(size=(8, 8), channels=1)


def test_a_run_of_a_conv_stem_is_a_plain_loop():
    """Whitened before the first step, and evaluated by statistics of the training images."""
    pictures = made_up()
    model = build("rms", STEM, 1).train()
    reference = pictures.images.float() / 127.5 - 1
    model.initialise_from(reference)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1, betas=(0.9, 0.95), weight_decay=0)
    losses = []
    for step in range(20):
        index = torch.from_numpy(batch_at(step, 48, 16, 1))
        loss = cross_entropy(model(reference[index]), pictures.labels[index])
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate(step, 20, 0.1)
        optimizer.step()
        losses.append(loss.item())
    model.calibrate(reference)
    model.eval()
    with torch.no_grad():
        logits = model(pictures.val_images.float() / 127.5 - 1)
    run = Run("adamw", "rms", 3e-3, 1)
    settings = settings_for(pictures, model=STEM, weight_decay=0.0)
    found = trial(run, settings, pictures)
    assert found["final_loss"] == pytest.approx(sum(losses[-2:]) / 2, rel=1e-3)
    expected = float(cross_entropy(logits, pictures.val_labels))
    assert found["held_out_loss"] == pytest.approx(expected, rel=1e-3)
    assert found["checks"][-1]["loss"] == found["held_out_loss"], "the same ten held-out images"
    again = trial(run, settings, pictures)
    assert {**again, "seconds": 0} == {**found, "seconds": 0}


def test_every_evaluation_is_calibrated_just_before(monkeypatch):
    calls = []
    calibrate, forward = SimpleViT.calibrate, SimpleViT.forward
    monkeypatch.setattr(
        SimpleViT, "calibrate", lambda self, x: calls.append(len(x)) or calibrate(self, x)
    )
    monkeypatch.setattr(
        SimpleViT, "forward", lambda self, x: calls.append(self.training) or forward(self, x)
    )
    trial(Run("adamw", "none", 1e-3, 0), settings_for(made_up(), model=STEM), made_up())
    evaluated = [i for i, call in enumerate(calls) if call is False]
    assert len(evaluated) == 11
    assert all(calls[i - 1] == 48 for i in evaluated)


def test_the_reference_is_from_all_over():
    pictures = made_up(images=COUNT + 1000)
    found = reference_of(build("none", STEM, 0), pictures, PLAIN)
    assert len(found) == COUNT
    assert torch.equal(found[0], PLAIN.normalise(pictures.images[0]))
    assert torch.equal(found[-1], PLAIN.normalise(pictures.images[-2]))
    assert reference_of(build("none", MODEL, 0), pictures, PLAIN) is None


def test_a_batch_of_one_is_refused_before_any_worker(tmp_path, monkeypatch):
    model = {**STEM, "num_classes": 10, "image_size": [8, 8]}
    of_run = lambda options: (open_data("digits"), model, PLAIN, 64)  # noqa: E731
    monkeypatch.setattr(sys.modules["regard.study.study"], "of_run", of_run)
    out = tmp_path / "new"
    options = StudyOptions(like=tmp_path, out=out, batch_size=1, images=20, device="cpu")
    with pytest.raises(InputError, match="batch_size is 1; simple-vit-nano/4 has batch norms"):
        make_study(options, say=lambda line: None)
    assert not out.exists()


def test_what_a_worker_refuses_reaches_the_user_in_its_own_words(tmp_path):
    folder, pictures = StudyFolder(tmp_path), made_up()
    grid = Grid(("adamw",), ("none",), (0.1,), 1)
    model = {**STEM, "image_size": [8, 8]}
    folder.write_plan(Plan(settings_for(pictures, model=model, batch_size=1), grid))
    pictures.save(folder.pictures_file)
    with pytest.raises(InputError, match=r"^a batch of 1 in training; batch norm needs 2 images"):
        run_all(folder, grid.runs(), 20, 1, "cpu", lambda done, finished: None)
