"""regard.load: every kind of picture, the run's own preprocessing, features, refusals."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard._io import read_weights, write_weights
from regard.data.decode import UnreadableImage
from regard.errors import InputError
from regard.models.hub import from_pretrained, save_pretrained
from regard.predict.predictor import load
from regard.training.run_folder import RunFolder


def by_hand(run, pixels):
    """Probabilities of a grey picture, step by step in float64 from the 8 × 8 pixels."""
    folder = RunFolder(run)
    x = torch.from_numpy(pixels).double()[None, None]
    x = torch.nn.functional.interpolate(x, (8, 8), mode="bilinear", antialias=True)
    x = (x / 255 - 0.3) / 0.35
    with torch.no_grad():
        return folder.load_model().double()(x).softmax(-1)[0].numpy()


def test_every_kind_of_picture_gives_the_same(vit_run, pictures):
    predictor = load(vit_run)
    path, pixels = next(iter(pictures.items()))
    wanted = by_hand(vit_run, pixels)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    kinds = [
        path,
        buffer.getvalue(),
        Image.fromarray(pixels),
        pixels,
        pixels[:, :, None],
        np.repeat(pixels[None, :, :, None], 1, axis=0),
        torch.from_numpy(pixels),
        torch.from_numpy(pixels)[None],
        torch.from_numpy(pixels)[None, None],
        torch.from_numpy(pixels).expand(3, *pixels.shape),
    ]
    for kind in kinds:
        found = predictor.predict(kind)
        assert len(found) == 1
        np.testing.assert_allclose(found.probabilities[0], wanted, atol=1e-5)
    many = predictor.predict((kind for kind in kinds), batch_size=3)
    assert many.probabilities.shape == (len(kinds), 10)
    np.testing.assert_allclose(many.probabilities, np.tile(wanted, (len(kinds), 1)), atol=1e-5)
    assert many[4].label == str(wanted.argmax()) == many.labels[4]
    assert many[4].top(2)[1][0] == str(np.argsort(-wanted)[1])
    assert many[2:5].labels == many.labels[2:5]
    assert predictor.predict([]).probabilities.shape == (0, 10)


def test_features_are_what_the_classifier_takes(vit_run, net_run, pictures):
    for run in (vit_run, net_run):
        predictor = load(run)
        features = predictor.embed(list(pictures), batch_size=4)
        weights = read_weights(RunFolder(run).weights_file)
        logits = features @ weights["classifier.weight"].numpy().T
        logits += weights["classifier.bias"].numpy()
        chosen = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        np.testing.assert_allclose(
            chosen, predictor.predict(list(pictures)).probabilities, atol=1e-5
        )


def test_the_module_itself_is_there_to_be_recorded(vit_run, pictures):
    predictor = load(vit_run)
    assert not predictor.model.training
    with regard.record(predictor.model) as seen:
        found = predictor.predict(list(pictures))
    assert seen["blocks.0.attention"].weights.shape[0] == len(found)


def test_the_weights_alone_say_what_they_are(vit_run, pictures, tmp_path):
    alone = load(RunFolder(vit_run).weights_file)
    whole = load(vit_run).predict(list(pictures))
    assert np.array_equal(alone.predict(list(pictures)).probabilities, whole.probabilities)
    bare = tmp_path / "bare.safetensors"
    write_weights(bare, read_weights(RunFolder(vit_run).weights_file))
    with pytest.raises(InputError, match="does not say what it is"):
        load(bare)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (np.zeros((8, 8), np.float32), "uint8"),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), "1 or 3 channels"),
        (np.zeros((3, 8, 8), np.uint8), "1 or 3 channels"),
        (np.zeros((0, 8, 3), np.uint8), "came"),
        (7, "no pictures are in an object of type int"),
    ],
)
def test_what_is_no_picture_is_refused(vit_run, images, words):
    with pytest.raises(InputError, match=words):
        load(vit_run).predict(images)


def test_unreadable_files_are_named(vit_run, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"nothing")
    with pytest.raises(UnreadableImage, match=r"broken\.jpg cannot be read: no known picture"):
        load(vit_run).predict(broken)
    with pytest.raises(UnreadableImage, match="No such file"):
        load(vit_run).predict(str(tmp_path / "absent.png"))


def test_runs_that_cannot_be_used_are_refused(vit_run, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load(tmp_path / "absent")
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    config = RunFolder(vit_run).config()
    run.write_config(config)
    with pytest.raises(InputError, match="has no weights yet"):
        load(run.path)
    values = json.loads(run.config_file.read_text())
    values["classes"] = values["classes"][:-1]
    run.config_file.write_text(json.dumps(values))
    run.write_weights(RunFolder(vit_run).load_model().state_dict(), config, 1)
    with pytest.raises(InputError, match="10 outputs and 9 class names"):
        load(run.path)
    with pytest.raises(InputError, match="does not exist"):
        load(tmp_path / "model.pt2")
    (tmp_path / "model.pt2").touch()
    with pytest.raises(InputError, match=r"run code .*regard\.load\(…, trusted=True\)"):
        load(tmp_path / "model.pt2")
    save_pretrained(regard.PixelAttention(8, 2, 4), tmp_path / "weights")
    with pytest.raises(InputError, match=r"by themselves, not a run; .*from_pretrained"):
        load(tmp_path / "weights")
    with pytest.raises(InputError, match=r"is a training run; regard\.load\(.*\)\.model opens"):
        from_pretrained(vit_run)
    with pytest.raises(InputError, match="no device 'gpu'"):
        load(vit_run, device="gpu")
