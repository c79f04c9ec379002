"""Models of timm by name, against timm itself."""

import json
import sys

import pytest
import torch

import regard

timm = pytest.importorskip("timm")


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("resnet10t", (40, 32), {}),
        ("vit_tiny_patch16_224", (32, 48), {"depth": 2, "drop_path_rate": 0.1}),
    ],
)
def test_same_numbers_as_timm(name, size, options):
    model = regard.create(f"timm:{name}", num_classes=4, channels=1, image_size=size, **options)
    takes_size = {"img_size": size} if name.startswith("vit") else {}
    theirs = timm.create_model(name, num_classes=4, in_chans=1, **takes_size, **options)
    theirs.load_state_dict(model.model.state_dict())
    images = torch.randn(2, 1, *size)
    model.eval()
    theirs.eval()
    assert torch.equal(model(images), theirs(images))
    classifier = theirs.get_classifier()
    torch.testing.assert_close(classifier(model.features(images)), theirs(images))

    config = json.loads(json.dumps(model.config))
    again = regard.create(f"timm:{config.pop('name')}", **config)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(images), model(images))
    with pytest.raises(regard.InputError, match="images have 3 channels; this model takes 1"):
        model(torch.zeros(1, 3, *size))


def test_no_classes_give_the_features():
    model = regard.create("timm:resnet10t", num_classes=None, image_size=32).eval()
    images = torch.randn(2, 3, 32, 32)
    assert model(images).shape == (2, 512)
    assert torch.equal(model(images), model.features(images))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet10x", {}, "timm has no model 'resnet10x'; nearest: resnet10"),
        ("resnet10t", {"colour": 1}, "timm does not build resnet10t .*argument 'colour'"),
        ("resnet10t.nobody", {}, "timm does not build resnet10t.nobody .*nobody"),
        ("resnet10t", {"image_size": 0}, "image_size=0: give a positive integer"),
        ("resnet10t", {"num_classes": 0}, "num_classes=0: give a positive integer"),
    ],
)
def test_refusals(name, options, message):
    with pytest.raises(regard.InputError, match=message):
        regard.create(f"timm:{name}", **{"num_classes": 2, **options})


def test_pretrained_is_passed_on_and_a_failed_download_is_our_refusal(monkeypatch):
    seen = {}

    def create_model(name, **arguments):
        seen.update(arguments)
        raise FileNotFoundError("no route to the weights\nretrying")

    monkeypatch.setattr(timm, "create_model", create_model)
    message = r"weights of timm:resnet10t cannot be had here \(no route to the weights\)"
    with pytest.raises(regard.InputError, match=message):
        regard.create("timm:resnet10t", num_classes=2, pretrained=True)
    assert seen["pretrained"] is True


def test_without_timm_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(regard.MissingExtraError, match=r"pip install 'regard\[timm\]'"):
        regard.create("timm:resnet10t", num_classes=2)
