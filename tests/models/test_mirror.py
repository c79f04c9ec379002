"""Test-time flips: logits averaged over each image and its mirror image."""

import pytest
import torch

import regard

MODELS = {
    "simple-vit-nano/4": {"depth": 1, "image_size": (8, 12)},
    "pixel-resnet-nano": {"widths": [8, 16], "depth": 1, "image_size": (8, 12)},
    "timm:resnet10t": {"image_size": (40, 32)},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_mean_of_both_outside_training_only(name):
    if name.startswith("timm"):
        pytest.importorskip("timm")
    torch.manual_seed(0)
    model = regard.create(name, num_classes=3, **MODELS[name])
    flipped = regard.create(name, num_classes=3, test_flips=True, **MODELS[name])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    flipped.load_state_dict(model.state_dict())
    assert (model.config["test_flips"], flipped.config["test_flips"]) == (False, True)
    images = torch.randn(2, 3, *MODELS[name]["image_size"])

    model.eval(), flipped.eval()
    mirrored = torch.from_numpy(images.numpy()[..., ::-1].copy())
    assert not torch.allclose(model(images), model(mirrored), rtol=1e-3)
    torch.testing.assert_close(flipped(images), (model(images) + model(mirrored)) / 2)
    torch.testing.assert_close(flipped.features(images), model.features(images))
    model.train(), flipped.train()
    assert torch.equal(flipped(images), model(images))
