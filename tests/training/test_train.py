"""A run from the request to the folder: exact, resumable, and clear when it cannot go on."""

import dataclasses
import errno
import hashlib
import itertools
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch.nn import functional as F

from regard._io import read_weights
from regard.data.open import open_data
from regard.errors import InputError
from regard.models.registry import create
from regard.models.simple_vit import SimpleViT
from regard.training import checkpoint
from regard.training import trainer as loop
from regard.training.autotune import fitting_steps
from regard.training.config import TrainConfig
from regard.training.evaluate import evaluate
from regard.training.loggers import MetricsLog, Reporter
from regard.training.nan_diagnosis import NotFinite
from regard.training.run_folder import RunFolder, RunStopped
from regard.training.setup import inverse_frequency, refuse_sharded
from regard.training.stop import Interrupted
from regard.training.trainer import train
from tests.training.conftest import TINY, tiny_config

NET = {
    "model": "pixel-resnet-nano",
    "model_options": {"widths": (8, 16), "depth": 1},
    "optimizer": "muon-sgd",
    "schedule": "linear",
    "lr": 2e-2,
}


def quiet(line):
    pass


def digest(run):
    """Weights and last checkpoint, as one hash."""
    last = RunFolder(run).checkpoint(RunFolder(run).saved_steps()[-1])
    files = [Path(run) / "model.safetensors", last / "state.safetensors"]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def stop_at(step, monkeypatch, number=signal.SIGTERM):
    """Send this process a signal in the middle of a step."""
    real, calls = loop.accumulate, []

    def accumulate(job, batch):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), number)
        return real(job, batch)

    monkeypatch.setattr(loop, "accumulate", accumulate)


def test_the_folder_holds_what_the_map_says(finished):
    out, result, lines = finished
    metrics = RunFolder(out).metrics()
    scores = {m["step"]: (m["accuracy"], -m["log_loss"]) for m in metrics if "accuracy" in m}
    assert list(scores) == [4, 8, 12]
    kept = sorted({8, 12, max(scores, key=lambda step: scores[step])})
    parts = ("progress.json", "state.safetensors")
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()) == [
        ".lock",
        *(f"checkpoint/step-{step:09d}/{part}" for step in kept for part in parts),
        "config.json",
        "confusion.csv",
        "environment.json",
        "evaluation.json",
        "metrics.jsonl",
        "model.safetensors",
        "per_class.csv",
        "predictions.csv",
        "split.json",
    ]
    assert result.held_out == 179
    assert lines[0].startswith("preset digits")
    assert lines[-1].startswith("step 12 of 12: accuracy ")
    assert lines[-1].endswith(", 0 s left")
    assert [line["step"] for line in metrics if "loss" in line] == list(range(1, 13))
    with safe_open(out / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == [str(i) for i in range(10)]


def test_evaluation_from_the_folder_alone_is_the_same(finished):
    out, result, _ = finished
    again = evaluate(out)
    assert np.array_equal(again.probabilities, result.evaluation.probabilities)
    assert again.names == result.evaluation.names
    assert json.loads((out / "evaluation.json").read_text())["accuracy"] == again.accuracy
    assert evaluate(out, "digits", split="train").labels.shape == (1618,)


def test_the_run_s_own_data_is_known_however_its_path_is_written(tmp_path, monkeypatch):
    data = pictures(tmp_path / "data")
    result = train(picture_config(data, tmp_path / "run"), say=quiet)
    monkeypatch.chdir(tmp_path)
    for way in ("data", "data/", "./run/../data", str(data)):
        again = evaluate(tmp_path / "run", way)
        assert (again.split, again.names) == ("val", result.evaluation.names)
    (tmp_path / "copy").symlink_to(data)
    assert evaluate(tmp_path / "run", "copy").names == result.evaluation.names


@pytest.mark.parametrize("changes", [{"optimizer": "muon"}, {"ema": 0.9, "workers": 2}, NET])
def test_a_stopped_run_resumes_to_the_same_bits(changes, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(tiny_config(whole, **changes), say=quiet)
    with monkeypatch.context() as patch:
        stop_at(6, patch)
        with pytest.raises(Interrupted, match="stopped after step 6 of 12, saved") as stop:
            train(tiny_config(cut, **changes), say=quiet)
    assert stop.value.exit_code == 143
    assert RunFolder(cut).saved_steps() == [4, 6]
    train(TrainConfig("digits", out=cut, resume=True), say=quiet)
    assert digest(cut) == digest(whole)
    lines = [RunFolder(run).metrics() for run in (whole, cut)]
    for line in lines[0] + lines[1]:
        for measured in ("seconds", "images_per_second"):
            line.pop(measured, None)
    assert lines[0] == lines[1]
    assert [s.from_step for s in RunFolder(cut).config().segments] == [0, 6]


def test_muon_sgd_is_refused_for_other_models_before_a_run_begins(tmp_path):
    with pytest.raises(InputError, match="rates for PixelResNet alone, and this is a SimpleViT"):
        train(tiny_config(tmp_path / "r", optimizer="muon-sgd"), say=quiet)
    assert not (tmp_path / "r").exists()


def test_ctrl_c_has_its_own_exit_code_and_a_changed_rate_is_a_segment(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(2, patch, signal.SIGINT)
        with pytest.raises(Interrupted, match="--resume` goes on") as stop:
            train(tiny_config(tmp_path / "r"), say=quiet)
    assert stop.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    train(TrainConfig("digits", out=tmp_path / "r", resume=True, lr=1e-4), say=quiet)
    config = RunFolder(tmp_path / "r").config()
    assert config.recipe.lr == 1e-4
    assert config.segments[1].changed == {"lr": 1e-4}
    lrs = [line["lr"] for line in RunFolder(tmp_path / "r").metrics() if "lr" in line]
    assert lrs[1] > 1e-3 > lrs[2]


def test_steps_given_on_resume_are_the_new_total(tmp_path):
    done = train(tiny_config(tmp_path / "r"), say=quiet).folder
    before = RunFolder(done).config().recipe.steps
    train(TrainConfig("digits", out=done, resume=True, steps=before + 3), say=quiet)
    config = RunFolder(done).config()
    assert config.recipe.steps == before + 3
    assert RunFolder(done).metrics()[-1]["step"] == before + 3


def test_what_a_kill_leaves_is_swept_and_its_later_metrics_forgotten(tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(tiny_config(whole), say=quiet)
    with monkeypatch.context() as patch:
        stop_at(6, patch)
        with pytest.raises(Interrupted):
            train(tiny_config(cut), say=quiet)
    folder = RunFolder(cut)
    (folder.checkpoints / ".step-000000008.x.part").mkdir()
    (folder.checkpoints / ".step-000000008.x.part" / "state.safetensors").write_bytes(b"half")
    with folder.metrics_file.open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    train(TrainConfig("digits", out=cut, resume=True), say=quiet)
    assert digest(cut) == digest(whole)
    assert [line["step"] for line in folder.metrics() if "loss" in line] == list(range(1, 13))
    assert not list(folder.checkpoints.glob(".*"))


def test_accumulation_changes_nothing_beyond_rounding(finished, tmp_path):
    train(tiny_config(tmp_path / "parts", microbatch=16), say=quiet)
    one, four = (
        read_weights(run / "model.safetensors") for run in (finished[0], tmp_path / "parts")
    )
    assert max(float((one[k] - four[k]).abs().max()) for k in one) < 1e-4


def test_a_folder_is_not_trained_into_twice(finished, tmp_path):
    with pytest.raises(InputError, match="exists already; add --resume"):
        train(tiny_config(finished[0]), say=quiet)
    folder = RunFolder(tmp_path / "busy")
    with (
        folder.lock(),
        pytest.raises(InputError, match=rf"is being written by process {os.getpid()}"),
    ):
        train(tiny_config(folder.path), say=quiet)
    with pytest.raises(
        InputError, match="does not exist; give the folder that `regard train` wrote"
    ):
        train(tiny_config(tmp_path / "none", resume=True), say=quiet)
    with pytest.raises(InputError, match="--resume needs --out"):
        train(TrainConfig("digits", resume=True), say=quiet)


def test_a_refused_run_leaves_nothing_behind(tmp_path):
    for name in ("one", "two"):
        with pytest.raises(InputError, match="there is no model 'simple-vit-nino/4'"):
            train(tiny_config(tmp_path / "runs" / name, model="simple-vit-nino/4"), say=quiet)
        assert (tmp_path / "runs").exists() == (name == "two")
        (tmp_path / "runs" / "other").mkdir(parents=True, exist_ok=True)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]


def test_without_a_bar_a_line_says_how_far_it_is(monkeypatch):
    lines, now = [], [100.0]
    monkeypatch.setattr("regard.training.loggers.time.monotonic", lambda: now[0])
    reporter = Reporter(say=lines.append)
    reporter.start(10, 40)
    for done, at in ((11, 130.0), (15, 170.0), (16, 200.0)):
        now[0] = at
        reporter.step(done, {"loss": 1.25})
    assert lines == ["step 15 of 40: loss 1.25, 5 min 50 s left"]  # 70 s for 5 of 30 steps


def test_the_time_left_counts_growing_work(monkeypatch):
    lines, now = [], [0.0]
    monkeypatch.setattr("regard.training.loggers.time.monotonic", lambda: now[0])
    reporter = Reporter(say=lines.append)
    reporter.start(0, 3, [0, 1, 5, 10].__getitem__)
    now[0] = 4.0
    reporter.milestone(1, "one")
    now[0] = 20.0
    reporter.milestone(2, "two")
    reporter.milestone(3, "three")
    assert lines == [
        "step 1 of 3: one, 36 s left",  # 4 s for one of ten
        "step 2 of 3: two, 20 s left",
        "step 3 of 3: three, 0 s left",
    ]


def test_runs_without_a_name_take_the_next_free_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    assert RunFolder.fresh(None, "digits").path == Path("runs/digits-2")
    (tmp_path / "runs" / "digits-2").mkdir()
    assert RunFolder.fresh(None, "digits").path == Path("runs/digits-3")


def test_a_nan_stops_before_anything_is_overwritten(tmp_path, monkeypatch):
    out = tmp_path / "run"
    real = loop.set_rate
    steps = []

    def poison(optimizers, lr):
        steps.append(1)
        if len(steps) == 6:
            bias = optimizers[0].param_groups[1]["params"][-1]
            bias.data.fill_(float("inf"))
        real(optimizers, lr)

    monkeypatch.setattr(loop, "set_rate", poison)
    with pytest.raises(NotFinite) as stop:
        train(tiny_config(out), say=quiet)
    words = str(stop.value)
    assert "at step 6 is not finite; first not finite: the weight classifier.bias itself" in words
    assert "The checkpoint of step 4 is whole" in words
    assert "--resume --lr 0.001`" in words
    assert RunFolder(out).saved_steps() == [4]
    assert all(t.isfinite().all() for t in read_weights(out / "model.safetensors").values())


def slow_checkpoints(monkeypatch):
    """Let every checkpoint take longer to write than the steps that follow it."""
    real = checkpoint.write_weights

    def slow(path, tensors, metadata=None):
        time.sleep(1)
        real(path, tensors, metadata)

    monkeypatch.setattr(checkpoint, "write_weights", slow)


def test_a_stop_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    out = tmp_path / "run"
    slow_checkpoints(monkeypatch)
    real, steps = loop.clip_gradient, []

    def poison(model, limit):
        steps.append(1)
        return float("nan") if len(steps) == 5 else real(model, limit)

    monkeypatch.setattr(loop, "clip_gradient", poison)
    with pytest.raises(NotFinite, match=r"at step 5 .* The checkpoint of step 4 is whole"):
        train(tiny_config(out), say=quiet)


def test_a_full_disk_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    slow_checkpoints(monkeypatch)
    real = MetricsLog.step

    def full(log, progress, *numbers):
        if progress.step == 5:
            with log.folder.writing():
                raise OSError(errno.ENOSPC, "No space left on device")
        real(log, progress, *numbers)

    monkeypatch.setattr(MetricsLog, "step", full)
    with pytest.raises(RunStopped, match=r"is full; make room\. The checkpoint of step 4 is whole"):
        train(tiny_config(tmp_path / "run"), say=quiet)


def test_weights_that_answer_with_no_numbers_are_not_kept(tmp_path, monkeypatch):
    out = tmp_path / "run"
    real, calls = loop.evaluate_now, []

    def poison(job):
        calls.append(1)
        if len(calls) == 2:
            with torch.no_grad():
                job.state.model.blocks[1].mlp.down.bias.fill_(float("inf"))
        real(job)

    monkeypatch.setattr(loop, "evaluate_now", poison)
    with pytest.raises(NotFinite) as stop:
        train(tiny_config(out), say=quiet)
    words = str(stop.value)
    assert "after step 8 the model's answers for 179 of 179 images, such as digits/" in words
    assert "; first not finite: the output of blocks.1.mlp.down (Linear) (the largest" in words
    assert "The checkpoint of step 4 is whole" in words
    assert "--resume --lr 0.001`" in words
    assert RunFolder(out).saved_steps() == [4]
    assert all(t.isfinite().all() for t in read_weights(out / "model.safetensors").values())


def test_a_full_disk_is_a_clear_stop_with_the_last_checkpoint_whole(tmp_path, monkeypatch):
    out = tmp_path / "run"
    real, calls = checkpoint.write_weights, []

    def full(path, tensors, metadata=None):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, tensors, metadata)

    monkeypatch.setattr(checkpoint, "write_weights", full)
    with pytest.raises(RunStopped, match=r"is full; make room\. The checkpoint of step 4 is whole"):
        train(tiny_config(out), say=quiet)
    assert RunFolder(out).saved_steps() == [4]
    monkeypatch.undo()
    train(TrainConfig("digits", out=out, resume=True), say=quiet)


def test_a_vanished_folder_is_a_clear_stop(tmp_path, monkeypatch):
    out = tmp_path / "run"
    real = loop.evaluate_now

    def vanish(job):
        out.rename(tmp_path / "elsewhere")
        real(job)

    monkeypatch.setattr(loop, "evaluate_now", vanish)
    with pytest.raises(RunStopped, match=r"vanished, .* Its checkpoints went with it: `regard"):
        train(tiny_config(out), say=quiet)


def test_the_best_is_kept_besides_the_last(tmp_path, monkeypatch):
    real = loop.predict_split
    seen = []

    def first_is_best(*arguments):
        found = real(*arguments)
        seen.append(found)
        if len(seen) == 1:
            found.probabilities[:] = np.eye(10)[found.labels]
        return found

    monkeypatch.setattr(loop, "predict_split", first_is_best)
    out = tmp_path / "run"
    result = train(tiny_config(out, keep=1), say=quiet)
    assert RunFolder(out).saved_steps() == [4, 12]
    kept = read_weights(out / "model.safetensors")
    best = read_weights(RunFolder(out).checkpoint(4) / "state.safetensors")
    assert all(torch.equal(kept[name], best[f"model.{name}"]) for name in kept)
    assert evaluate(out).accuracy == result.accuracy


def test_the_average_is_what_is_kept_and_it_is_the_average(tmp_path, monkeypatch):
    real, weights = loop.set_rate, []

    def watch(optimizers, lr):
        weights.append(
            [p.detach().clone() for g in optimizers[0].param_groups for p in g["params"]]
        )
        real(optimizers, lr)

    monkeypatch.setattr(loop, "set_rate", watch)
    train(tiny_config(tmp_path / "run", ema=0.7), say=quiet)
    state = read_weights(RunFolder(tmp_path / "run").checkpoint(12) / "state.safetensors")
    kept = read_weights(tmp_path / "run" / "model.safetensors")
    assert torch.equal(kept["classifier.weight"], state["ema.classifier.weight"])
    shapes = [w.shape for w in weights[0]]
    place = shapes.index(torch.Size([10, 16]))
    average = weights[0][place]
    for step, now in enumerate([w[place] for w in weights[1:]], start=1):
        decay = min(0.7, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * now
    last = state["model.classifier.weight"]
    average = (13 / 22) * average + (1 - 13 / 22) * last
    assert torch.allclose(kept["classifier.weight"], average, atol=1e-6)


def pictures(root, classes=("cat", "dog"), count=14, sizes=(12, 12)):
    """A folder of class folders with bright and dark pictures."""
    rng = np.random.default_rng(0)
    for level, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 100, (*sizes, 3)) + 140 * (level % 2)
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{i}.png")
    return root


def picture_config(data, out, **changes):
    settings = {"image_size": (8, 8), "batch_size": 8, "steps": 4, "preset": "small"}
    return TrainConfig(
        str(data), out=out, model="simple-vit-nano/4", model_options=TINY, precision="fp32",
        **{**settings, **changes},
    )  # fmt: skip


def test_a_bad_file_is_named_and_left_out_and_a_changed_dataset_refused(tmp_path):
    data = pictures(tmp_path / "data")
    bad = next(n for n in (data / "cat").iterdir())
    bad.write_bytes(bad.read_bytes()[:60])
    lines = []
    result = train(picture_config(data, tmp_path / "run", steps=12), say=lines.append)
    said = [line for line in lines if "unreadable and left out: 1 picture, such as" in line]
    assert bad.name in said[0]
    kept = json.loads((tmp_path / "run" / "quarantine.json").read_text())
    assert [Path(entry["name"]).name for entry in kept["quarantined"]] == [bad.name]
    assert result.evaluation.unreadable == ()
    assert evaluate(tmp_path / "run").accuracy == result.accuracy
    (data / "dog" / "new.png").write_bytes((data / "dog" / "0.png").read_bytes())
    with pytest.raises(InputError, match="has changed since its split was made"):
        train(TrainConfig(str(data), out=tmp_path / "run", resume=True), say=quiet)


def test_a_lost_disk_of_images_stops_the_run(tmp_path, monkeypatch):
    data = pictures(tmp_path / "data")
    real = loop.evaluate_now

    def lose(job):
        real(job)
        for file in data.rglob("*.png"):
            file.unlink()

    monkeypatch.setattr(loop, "evaluate_now", lose)
    config = picture_config(data, tmp_path / "run", steps=20, eval_every=0.5, memory=0.0)
    with pytest.raises(RunStopped, match="more than half of the images of step"):
        train(config, say=quiet)


def test_init_keeps_the_classifier_for_the_same_classes_only(tmp_path):
    first = pictures(tmp_path / "a")
    train(picture_config(first, tmp_path / "one"), say=quiet)
    lines = []
    other = pictures(tmp_path / "b", classes=("ant", "bee", "cat"))
    config = TrainConfig(str(other), out=tmp_path / "two", init=tmp_path / "one", steps=1,
                         lr=1e-12, batch_size=8, precision="fp32")  # fmt: skip
    train(config, say=lines.append)
    assert any("with a new classifier for 3 classes" in line for line in lines)
    before, after = (read_weights(tmp_path / run / "model.safetensors") for run in ("one", "two"))
    assert torch.allclose(
        before["blocks.0.mlp.up.weight"], after["blocks.0.mlp.up.weight"], atol=1e-9
    )
    assert after["classifier.weight"].shape == (3, 16)
    assert RunFolder(tmp_path / "two").config().model["name"] == "simple-vit-nano/4"
    train(TrainConfig(str(first), out=tmp_path / "three", init=tmp_path / "one", steps=1, lr=1e-12,
                      batch_size=8, precision="fp32"), say=lines.append)  # fmt: skip
    assert any("its classifier too" in line for line in lines)
    same = read_weights(tmp_path / "three" / "model.safetensors")
    assert torch.allclose(before["classifier.weight"], same["classifier.weight"], atol=1e-9)
    with pytest.raises(InputError, match=r"do not fit this model: .*leave out --model"):
        train(TrainConfig(str(first), out=tmp_path / "four", init=tmp_path / "one", steps=1,
                          model="simple-vit-nano/2", batch_size=8), say=quiet)  # fmt: skip


def test_evaluation_on_other_data_matches_classes_by_name(tmp_path):
    train(picture_config(pictures(tmp_path / "a"), tmp_path / "run"), say=quiet)
    dogs = tmp_path / "other"
    pictures(dogs, classes=("dog", "cat"), count=3)
    found = evaluate(tmp_path / "run", str(dogs))
    assert found.split == "all"
    assert found.classes == ("cat", "dog")
    assert sorted(found.labels.tolist()) == [0, 0, 0, 1, 1, 1]
    own = dict(zip(found.names, found.labels, strict=True))
    assert all((label == 0) == ("cat" in name) for name, label in own.items())
    pictures(tmp_path / "third", classes=("dig", "cat"))
    with pytest.raises(
        InputError, match="has the class 'dig', which the run does not know; nearest: dog"
    ):
        evaluate(tmp_path / "run", str(tmp_path / "third"))


def test_class_weights_make_each_class_weigh_the_same():
    labels = np.array([0] * 6 + [1] * 3 + [2])
    weights = inverse_frequency(labels, 3)
    totals = [float(weights[c]) * n for c, n in enumerate((6, 3, 1))]
    assert totals == pytest.approx([10 / 3] * 3)
    assert sum(float(weights[c]) for c in labels) / 10 == pytest.approx(1.0)


def test_the_first_gradient_is_that_of_the_weighted_loss(tmp_path, monkeypatch):
    data = pictures(tmp_path / "data", count=9)
    for extra in range(5):
        (data / "dog" / f"more{extra}.png").write_bytes((data / "dog" / "0.png").read_bytes())
    kept = []
    real = loop.clip_gradient

    def look(model, limit):
        kept.append([p.grad.clone() for p in model.parameters()])
        return real(model, limit)

    monkeypatch.setattr(loop, "clip_gradient", look)
    jobs = []
    real_accumulate = loop.accumulate
    monkeypatch.setattr(
        loop, "accumulate", lambda j, b: (jobs.append((j, b)), real_accumulate(j, b))[1]
    )
    train(picture_config(data, tmp_path / "run", steps=1, class_weights="auto", label_smoothing=0.1,
                         microbatch=2, flip="none", shift=0), say=quiet)  # fmt: skip
    job, batch = jobs[0]
    counts = np.bincount(job.data.splits["train"].labels)
    torch.manual_seed(0)
    model = create(**job.config.model)
    total = 0.0
    for image, label in zip(batch.images, batch.labels.tolist(), strict=True):
        logs = model(image[None]).log_softmax(-1)[0]
        for c in range(2):
            target = 0.9 * (c == label) + 0.1 / 2
            total = total - counts.sum() / (2 * counts[c]) * target * logs[c]
    (total / 8).backward()
    for ours, parameter in zip(kept[0], model.parameters(), strict=True):
        assert torch.allclose(ours, parameter.grad, atol=1e-6)


def test_images_that_could_not_be_read_do_not_weaken_the_gradient(tmp_path, monkeypatch):
    data = pictures(tmp_path / "data", count=9)
    seen, kept = [], []
    accumulate, clip = loop.accumulate, loop.clip_gradient

    def with_a_hole(job, batch):
        weights = batch.weights.clone()
        weights[0] = 0
        seen.append((job, batch))
        return accumulate(job, dataclasses.replace(batch, weights=weights))

    def look(model, limit):
        kept.append([p.grad.clone() for p in model.parameters()])
        return clip(model, limit)

    monkeypatch.setattr(loop, "accumulate", with_a_hole)
    monkeypatch.setattr(loop, "clip_gradient", look)
    train(picture_config(data, tmp_path / "run", steps=1, microbatch=4), say=quiet)
    job, batch = seen[0]
    torch.manual_seed(0)
    model = create(**job.config.model)
    losses = torch.nn.functional.cross_entropy(
        model(batch.images), batch.targets, reduction="none",
        label_smoothing=job.config.recipe.label_smoothing,
    )  # fmt: skip
    losses[1:].mean().backward()
    for ours, parameter in zip(kept[0], model.parameters(), strict=True):
        assert torch.allclose(ours, parameter.grad, atol=1e-6)


def test_minutes_are_planned_and_said(tmp_path):
    lines = []
    config = tiny_config(tmp_path / "run", steps=None, minutes=0.02)
    train(config, say=lines.append)
    recipe = RunFolder(tmp_path / "run").config().recipe
    assert any(line.startswith(f"{recipe.steps} steps of") for line in lines)
    assert recipe.minutes == 0.02
    other = train(tiny_config(tmp_path / "same", steps=recipe.steps), say=quiet)
    assert digest(other.folder) == digest(tmp_path / "run")  # planning left no trace


def test_steps_that_fit_a_time_are_the_most_that_do():
    def takes(steps, step, evaluation, interval):
        evaluations = sum(i % interval == 0 or i == steps for i in range(1, steps + 1))
        return steps * step + evaluations * evaluation

    for left, step, evaluation, interval in itertools.product(
        (0.5, 7.0, 19.6, 64.0), (0.25, 1.0), (0.125, 3.5), (1, 3, 100)
    ):
        steps = fitting_steps(left, step, evaluation, interval)
        assert takes(steps + 1, step, evaluation, interval) > left
        assert steps == 1 or takes(steps, step, evaluation, interval) <= left


def test_precision_is_measured_once_and_stored(tmp_path):
    lines = []
    train(tiny_config(tmp_path / "run", steps=1, precision=None), say=lines.append)
    stored = RunFolder(tmp_path / "run").config()
    assert stored.recipe.precision in ("fp32", "bf16")
    assert any(line.startswith(f"precision {stored.recipe.precision}, as") for line in lines)
    assert any(note.startswith("precision") for note in stored.notes)


def test_bf16_is_the_forward_pass_only(tmp_path, monkeypatch):
    # What the layers make of autocast depends on the CPU; that it is on, and where, does not.
    forward, loss = [], []
    real_forward, real_loss = SimpleViT.forward, F.cross_entropy

    def spy_forward(self, images):
        forward.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
        return real_forward(self, images)

    def spy_loss(logits, *args, **options):
        loss.append((torch.is_autocast_enabled("cpu"), logits.dtype))
        return real_loss(logits, *args, **options)

    monkeypatch.setattr(SimpleViT, "forward", spy_forward)
    monkeypatch.setattr(F, "cross_entropy", spy_loss)
    train(tiny_config(tmp_path / "run", steps=1, precision="bf16"), say=quiet)
    # the try of the attention's health, the step, then health and evaluation
    assert forward[:2] == [False, torch.bfloat16]
    assert not any(forward[2:])
    assert loss == [(False, torch.float32)]
    weights = read_weights(tmp_path / "run" / "model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.float32}


def test_a_device_that_is_not_there_is_refused(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(
        InputError, match="device is 'cuda', which PyTorch does not find here; give"
    ):
        train(tiny_config(tmp_path / "run", device="cuda"), say=quiet)
    with pytest.raises(InputError, match="strategy is fsdp, but there is one process"):
        train(tiny_config(tmp_path / "run", strategy="fsdp"), say=quiet)


def test_a_model_that_calibrates_is_not_sharded():
    sharded = SimpleNamespace(sharded=True)
    net = create("pixel-resnet-nano", num_classes=3, image_size=16, widths=(8, 8))
    with pytest.raises(InputError, match=r"PixelResNet takes statistics .*; give --strategy ddp"):
        refuse_sharded(net, sharded)
    refuse_sharded(create("simple-vit-nano/4", num_classes=3, dim=16, depth=1), sharded)
    refuse_sharded(net, SimpleNamespace(sharded=False))


def test_tensorboard_gets_the_same_numbers(tmp_path):
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tiny_config(tmp_path / "run", tensorboard=True), say=quiet)
    events = board.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = {e.step: e.value for e in events.Scalars("accuracy")}
    lines = RunFolder(tmp_path / "run").metrics()
    wanted = {line["step"]: line["accuracy"] for line in lines if "accuracy" in line}
    assert found == pytest.approx(wanted)


def test_the_split_follows_the_seed_and_is_written_down(tmp_path):
    train(tiny_config(tmp_path / "run", steps=1, seed=5), say=quiet)
    own = RunFolder(tmp_path / "run").data()
    drawn = open_data("digits", seed=5)
    assert np.array_equal(own.splits["val"].items, drawn.splits["val"].items)
    assert not np.array_equal(drawn.splits["val"].items, open_data("digits").splits["val"].items)
