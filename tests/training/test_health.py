"""Attention health in the loop: the right numbers, at no cost to the bits of training."""

import math

import pytest
import torch

import regard
from regard.data.decode import UnreadableImage
from regard.data.open import open_data
from regard.data.preprocess import Preprocess
from regard.training import setup
from regard.training.config import TrainConfig
from regard.training.health_probe import HealthProbe, health_probe, some_images
from regard.training.run_folder import RunFolder
from regard.training.trainer import train
from tests.training.conftest import tiny_config

SMALL_RESNET = {"model": "pixel-resnet-nano", "model_options": {"widths": (8, 16), "depth": 1}}
PLACES = (0, 25, 50, 76, 101, 127, 152, 178)  # eight of the 179 held-out digits


def attention_lines(run):
    return [line for line in RunFolder(run).metrics() if "attention" in line]


def test_each_evaluation_has_the_health_of_each_layer(finished):
    out, _, _ = finished
    lines = attention_lines(out)
    assert [line["step"] for line in lines] == [4, 8, 12]
    keys = [key for line in RunFolder(out).metrics() for key in line]
    assert [k for k in keys if k in ("attention", "accuracy")] == ["attention", "accuracy"] * 3
    last = lines[-1]["attention"]
    assert list(last) == ["blocks.0.attention", "blocks.1.attention"]
    assert all(
        set(numbers) == {"entropy", "largest_logit", "q_gain", "k_gain"}
        for numbers in last.values()
    )


def test_the_numbers_are_those_of_the_checkpoint_on_eight_held_out_images(finished):
    folder = RunFolder(finished[0])
    config, data = folder.config(), folder.data()
    state = regard._io.read_weights(folder.checkpoint(12) / "state.safetensors")
    net = regard.create(**config.model).eval()
    net.load_state_dict({n: state[f"model.{n}"] for n in net.state_dict()})
    split = data.splits["val"]
    images = torch.stack([config.preprocess(split.read(i)) for i in PLACES])
    inputs = []
    net.blocks[1].register_forward_pre_hook(lambda m, i: inputs.append(i[0]))
    with torch.no_grad():
        net(images)
        q, k, _ = net.blocks[1].attention.queries_keys_values(inputs[0])
    entropies, largest = [], -math.inf
    for i in range(8):
        for g in range(2):
            logits = (q[i, g].double() @ k[i, g].double().T).tolist()
            for row in logits:
                total = sum(math.exp(s) for s in row)
                weights = [math.exp(s) / total for s in row]
                entropies.append(-sum(w * math.log(w) for w in weights))
                largest = max(largest, *row)
    stored = attention_lines(folder.path)[-1]["attention"]["blocks.1.attention"]
    assert stored["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
    assert stored["largest_logit"] == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize("changes", [{}, {**SMALL_RESNET, "ema": 0.9}])
def test_a_run_with_and_without_it_ends_in_the_same_bytes(changes, tmp_path, monkeypatch):
    weights = []
    for name in ("with", "without"):
        train(tiny_config(tmp_path / name, steps=8, **changes), say=lambda line: None)
        assert bool(attention_lines(tmp_path / name)) == (name == "with")
        last = RunFolder(tmp_path / name).checkpoint(8) / "state.safetensors"
        weights.append((last.read_bytes(), (tmp_path / name / "model.safetensors").read_bytes()))
        monkeypatch.setattr(setup, "health_probe", lambda *a: (None, ""))
    assert weights[0] == weights[1]


def test_measuring_leaves_mode_statistics_and_generators_alone():
    net = regard.create("pixel-resnet-nano", num_classes=3, image_size=16, widths=(8, 16), depth=1)
    kept = {name: t.clone() for name, t in net.state_dict().items()}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = HealthProbe(torch.randn(4, 3, 16, 16, generator=torch.Generator())).measure(net)
    assert list(found) == ["stages.1.attention"]
    assert net.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(t, kept[name]) for name, t in net.state_dict().items())


def test_a_model_without_attention_is_said_once_and_has_no_lines(tmp_path):
    plain = {"model": "pixel-resnet-nano", "model_options": {"widths": (8,), "depth": 1}}
    lines = []
    train(tiny_config(tmp_path / "run", steps=2, **plain), say=lines.append)
    train(TrainConfig("digits", out=tmp_path / "run", resume=True, steps=4), say=lines.append)
    words = "attention health is left out: no attention could be read in PixelResNet"
    assert len([line for line in lines if line.startswith(words)]) == 1
    notes = RunFolder(tmp_path / "run").config().notes
    assert len([note for note in notes if note.startswith(words)]) == 1
    assert attention_lines(tmp_path / "run") == []


def test_what_is_not_finite_is_none():
    net = regard.create(
        "simple-vit-nano/4", num_classes=3, image_size=8, channels=1, dim=16, depth=1, mlp_dim=32
    )
    with torch.no_grad():
        net.blocks[0].attention.q_norm.gamma.fill_(math.inf)
    found = HealthProbe(torch.randn(2, 1, 8, 8)).measure(net)["blocks.0.attention"]
    assert found["entropy"] is None
    assert found["q_gain"] is None
    assert found["k_gain"] == pytest.approx(1.0)


def test_the_images_are_few_fixed_and_readable(monkeypatch):
    data = open_data("digits")
    preprocess = Preprocess((16, 16), channels=1)
    images = some_images(data, preprocess)
    assert images.shape == (8, 1, 16, 16)
    assert torch.equal(images, some_images(data, preprocess))
    split = data.splits["val"]
    for image, place in zip(images, PLACES, strict=True):
        assert torch.equal(image, preprocess(split.read(place)))

    def unreadable(i):
        raise UnreadableImage("x", "gone")

    monkeypatch.setattr(split, "read", unreadable)
    found = health_probe(torch.nn.Identity(), data, preprocess, torch.device("cpu"))
    assert found == (None, "attention health is left out: no held-out image could be read")
