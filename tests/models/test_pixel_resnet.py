"""PixelResNet against its formula, and what training asks of it."""

import json
import math

import pytest
import torch
from torch import nn

import regard
from regard.layers.conv import MatrixConv, WhiteningStem
from regard.models.pixel_resnet import PixelResNet

TINY = {"image_size": 12, "num_classes": 5, "widths": (8, 16), "depth": 2}


def tiny(**changes):
    torch.manual_seed(0)
    return PixelResNet(**{**TINY, **changes})


def stirred(**changes):
    """A model none of whose parts is at its starting value."""
    model = tiny(**changes)
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            if value.is_floating_point():
                value.add_(0.1 * torch.rand_like(value))
    return model


def test_a_matrix_convolution_by_loops():
    torch.manual_seed(0)
    conv = MatrixConv(2, 3, dtype=torch.float64)
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64)
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    expected = torch.zeros(1, 3, 4, 3, dtype=torch.float64)
    for o in range(3):
        for i in range(4):
            for j in range(3):
                for p in range(3):
                    for q in range(3):
                        for c in range(2):
                            weight = conv.weight[o, (p * 3 + q) * 2 + c]
                            expected[0, o, i, j] += weight * padded[0, c, i + p, j + q]
    torch.testing.assert_close(conv(x), expected)
    bound = 18**-0.5
    drawn = MatrixConv(2, 400).weight
    assert 0.99 * bound < drawn.abs().max() <= bound
    assert drawn.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def norm(x, bn):
    mean, var, weight, bias = (
        v[:, None, None] for v in (bn.running_mean, bn.running_var, bn.weight, bn.bias)
    )
    return (x - mean) / (var + 1e-5).sqrt() * weight + bias


def halve(x):
    b, c, h, w = x.shape
    return x[:, :, : h // 2 * 2, : w // 2 * 2].reshape(b, c, h // 2, 2, w // 2, 2).amax((3, 5))


@pytest.mark.parametrize(("attention", "residual"), [(True, False), (False, False), (True, True)])
def test_the_model_by_its_formula(attention, residual):
    model = stirred(attention=attention, residual=residual, dtype=torch.float64).eval()
    images = torch.randn(2, 3, 12, 14, dtype=torch.float64)
    x = gelu(nn.functional.conv2d(images, model.stem.kernel) + model.stem.bias[:, None, None])
    for i, stage in enumerate(model.stages):
        x = gelu(norm(halve(stage.convs[0](x)), stage.norms[0]))
        y = gelu(norm(stage.convs[1](x), stage.norms[1]))
        x = x + y if residual else y
        if attention and i > 0:
            x = regard.pixel_attention(x, stage.attention.params(), 16, 1)
    features = x.flatten(2).max(dim=2).values
    torch.testing.assert_close(model.features(images), features)
    logits = features @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model(images), logits)
    headless = tiny(
        num_classes=None, attention=attention, residual=residual, dtype=torch.float64
    ).eval()
    headless.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(headless(images), features)


@pytest.mark.parametrize("reset", [False, True])
def test_convolutions_without_residuals_start_as_the_identity(reset):
    model = tiny(widths=(8, 16, 4), residual=False)
    if reset:
        model.reset_parameters()
    for stage in model.stages:
        for conv in stage.convs:
            x = torch.randn(1, conv.in_channels, 3, 5)
            same = min(conv.in_channels, conv.out_channels)
            torch.testing.assert_close(conv(x)[:, :same], x[:, :same])
            if conv.out_channels > same:
                assert conv.weight[same:].abs().min() > 0
    assert tiny(residual=True).stages[0].convs[1].weight.abs().min() > 0


def test_the_classifier_starts_small():
    weight = tiny(widths=(512,), num_classes=100).classifier.weight
    assert weight.std().item() == pytest.approx(1 / 512, rel=0.05)


def test_attention_starts_as_the_identity_and_can_be_left_out():
    with_it, without = tiny(), tiny(attention=False)
    left = with_it.load_state_dict(without.state_dict(), strict=False)
    assert left.missing_keys
    assert all(".attention." in key for key in left.missing_keys)
    assert not any(key.startswith("stages.0.") for key in left.missing_keys)
    images = torch.randn(3, 3, 12, 12)
    assert torch.equal(with_it.eval().features(images), without.eval().features(images))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 9, (8, 13), 28, 33, (96, 70)])
def test_sizes_and_channels(size, channels):
    model = tiny(image_size=size, channels=channels, widths=(8, 8, 8))
    nn.init.normal_(model.classifier.weight)
    for stage in model.stages[1:]:
        nn.init.normal_(stage.attention.out_weight)
    images = torch.randn(3, channels, *model.image_size)
    model.initialise_from(images)
    logits = model(images)
    assert logits.shape == (3, 5)
    logits.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
    height, width = model.image_size
    bigger = torch.randn(2, channels, height + 5, width + 1)
    assert model.eval()(bigger).shape == (2, 5)
    smaller = torch.zeros(1, channels, model.smallest - 1, width)
    with pytest.raises(regard.InputError, match=f"sides of {model.smallest} pixels or more"):
        model(smaller)


@pytest.mark.parametrize(
    ("size", "stride", "pools", "smallest"),
    [(8, 1, 2, 5), (9, 1, 3, 9), (32, 1, 3, 9), (64, 1, 3, 9), (65, 2, 3, 18), (224, 4, 3, 36)],
)
def test_the_stem_and_the_halvings_follow_the_size(size, stride, pools, smallest):
    model = tiny(image_size=size, widths=(4, 4, 4))
    assert model.config["stem_stride"] == stride
    expected = [(2, 2)] * pools + [(1, 1)] * (3 - pools)
    assert [stage.pool for stage in model.stages] == expected
    assert model.smallest == smallest


@pytest.mark.parametrize(("channels", "stride"), [(1, 1), (3, 1), (3, 2)])
def test_the_stem_whitens(channels, stride):
    torch.manual_seed(0)
    stem = WhiteningStem(channels, (stride, stride))
    smooth = nn.functional.avg_pool2d(torch.randn(300, channels, 20, 20), 5, 1) * 3
    stem.fit(smooth)
    again = WhiteningStem(channels, (stride, stride))
    again.fit(smooth)
    assert torch.equal(stem.kernel, again.kernel)

    m = stem.components
    assert torch.equal(stem.kernel[m:], -stem.kernel[:m])
    side = 2 * stride
    patches = torch.stack(
        [
            smooth[:, :, i : i + side, j : j + side].flatten(1)
            for i in range(0, 16 - side + 1, stride)
            for j in range(0, 16 - side + 1, stride)
        ]
    )
    patches = patches.flatten(0, 1).double()
    values = torch.linalg.eigvalsh(patches.T @ patches / len(patches)).flip(0)[:m]
    out = patches @ stem.kernel[:m].flatten(1).double().T
    moment = out.T @ out / len(out)
    torch.testing.assert_close(moment, torch.diag(values / (values + 5e-4)), rtol=0, atol=2e-4)


def test_the_kernel_of_the_stem_is_saved_and_never_trained():
    model = tiny()
    assert "stem.kernel" in model.state_dict()
    assert "stem.kernel" not in dict(model.named_parameters())
    gram = model.stem.kernel[:12].flatten(1)
    torch.testing.assert_close(gram @ gram.T, torch.eye(12), rtol=0, atol=1e-5)


def test_calibration_takes_the_statistics_of_the_images():
    model = stirred().eval()
    weights = {key: value.clone() for key, value in model.named_parameters()}
    images = torch.randn(400, 3, 12, 12)
    model.calibrate(images)
    first = model.stages[0]
    outputs = halve(first.convs[0](model.stem(images)))
    halves = outputs.split(200)  # 400 images are two batches of 200
    mean = sum(half.mean((0, 2, 3)) for half in halves) / 2
    var = sum(half.var((0, 2, 3)) for half in halves) / 2
    torch.testing.assert_close(first.norms[0].running_mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.norms[0].running_var, var, rtol=1e-4, atol=1e-5)
    assert not model.training
    assert first.norms[0].momentum == 0.1
    assert all(torch.equal(value, weights[key]) for key, value in model.named_parameters())


def test_calibration_forgets_what_training_saw():
    # So the statistics, like the weights, do not depend on which process saw which images.
    models = [tiny(), tiny()]
    images = torch.randn(64, 3, 12, 12)
    for i, model in enumerate(models):
        model.train()(torch.randn(16, 3, 12, 12) * (i + 1))
    assert not torch.equal(*(m.stages[0].norms[0].running_var for m in models))
    for model in models:
        model.calibrate(images)
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_it_learns():
    model = tiny(num_classes=4).train()
    nn.init.zeros_(model.classifier.weight)
    images, labels = torch.randn(24, 3, 12, 12), torch.arange(24) % 4
    model.initialise_from(images)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(images), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(math.log(4), abs=1e-6)
    assert losses[-1] < 0.05
    model.calibrate(images)
    assert (model.eval()(images).argmax(1) == labels).all()
    assert model.stages[1].attention.out_weight.abs().max() > 0.01


def test_every_weight_is_a_matrix_that_muon_takes():
    model = tiny()
    weights = [p for p in model.stages.parameters() if p.ndim > 1]
    assert len(weights) == 4 + 4, "four convolutions, four projections of the one attention"
    assert all(p.ndim == 2 for p in weights)


def test_config_rebuilds_the_model():
    model = stirred(image_size=(12, 70), channels=1, attention=False, depth=3)
    again = PixelResNet(**json.loads(json.dumps(model.config)))
    again.load_state_dict(model.state_dict())
    assert again.config == model.config
    images = torch.randn(2, 1, 36, 40)
    assert torch.equal(again.eval()(images), model.eval()(images))


def test_create_knows_the_sizes():
    expected = {"nano": ([32, 128, 128], 2), "s": ([64, 256, 256], 2), "m": ([128, 384, 512], 3)}
    for size, (widths, depth) in expected.items():
        config = regard.create(f"pixel-resnet-{size}", num_classes=10).config
        assert (config["widths"], config["depth"]) == (widths, depth)
        assert (config["image_size"], config["attention"]) == ([32, 32], True)
    named = regard.create("pixel-resnet-nano", num_classes=2, image_size=8, attention=False)
    assert named.config["attention"] is False
    with pytest.raises(regard.InputError, match="no option 'atention'; nearest: attention"):
        regard.create("pixel-resnet-s", num_classes=2, atention=False)
    with pytest.raises(regard.InputError, match="no model 'pixel-resnet-x'; nearest: pixel-resnet"):
        regard.create("pixel-resnet-x", num_classes=2)


def test_refusals():
    for odd in (32, [], "32"):
        with pytest.raises(regard.InputError, match="give the channels of each stage"):
            regard.create("pixel-resnet-nano", num_classes=2, widths=odd)
    for odd in ("false", 0, None):  # each would be true or false to Python
        with pytest.raises(regard.InputError, match=r"attention=.*: give true or false"):
            regard.create("pixel-resnet-nano", num_classes=2, attention=odd)
        with pytest.raises(regard.InputError, match=r"test_flips=.*: give true or false"):
            regard.create("simple-vit-nano/4", num_classes=2, image_size=8, test_flips=odd)
    with pytest.raises(regard.InputError, match="widths=0: give a positive integer"):
        tiny(widths=(8, 0))
    with pytest.raises(regard.InputError, match="height 1 and width 1 is too small"):
        tiny(image_size=1)
    model = tiny()
    with pytest.raises(regard.InputError, match="a batch of 1 in training; batch norm needs 2"):
        model.train()(torch.zeros(1, 3, 12, 12))
    with pytest.raises(regard.InputError, match="take statistics from are empty"):
        model.calibrate(torch.zeros(0, 3, 12, 12))
    assert model.stages[0].norms[0].momentum == 0.1
    with pytest.raises(regard.InputError, match="images have 1 channels; this model takes 3"):
        model.initialise_from(torch.zeros(4, 1, 12, 12))


def test_compiled_gradients_in_bfloat16_are_those_of_eager_mode():
    # amax, compiled, divides by how often its rounded result occurs among numbers not rounded
    model = tiny(attention=False)
    images = torch.randn(16, 3, 12, 12)
    found = []
    for call in (model, torch.compile(model)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = call(images)
        logits.float().square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    assert torch.linalg.norm(found[1] - found[0]) <= 0.05 * torch.linalg.norm(found[0])
