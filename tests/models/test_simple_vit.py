"""SimpleViT against vit-pytorch's file, and what it adds."""

import math

import pytest
import torch
from torch import nn

import regard
from regard.convert.conversion import convert
from regard.layers.patch_embed import sincos_2d
from regard.layers.qk_norm import QKNorm
from regard.layers.transformer import Attention

SMALL = {"patch_size": 4, "dim": 32, "depth": 2, "heads": 3, "mlp_dim": 48, "dim_head": 8}


def small(**changes):
    return regard.SimpleViT(**{"image_size": 16, "num_classes": None, **SMALL, **changes})


def peer(**changes):
    module = pytest.importorskip("vit_pytorch.simple_vit_with_qk_norm")
    torch.manual_seed(0)
    model = module.SimpleViT(**{"image_size": 16, "num_classes": 10, **SMALL, **changes})
    with torch.no_grad():  # gains, biases and norms that differ, so that a swap is noticed
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


SIZES = [
    {"image_size": 16, "patch_size": 4},
    {"image_size": (8, 24), "patch_size": 4},
    {"image_size": (12, 8), "patch_size": (2, 4)},
    {"image_size": (8, 12), "patch_size": (4, 2), "channels": 1},
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_same_numbers_and_gradients_as_vit_pytorch(size):
    theirs = peer(**size)
    ours = small(**size)
    ours.load_state_dict(convert(theirs.state_dict(), source="vit-pytorch-qk"))
    height, width = ours.image_size
    images = torch.randn(3, ours.channels, height, width)
    torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=1e-5)

    probe = torch.randn(3, 32)
    (theirs(images) * probe).sum().backward()
    (ours(images) * probe).sum().backward()
    gradients = convert({k: p.grad for k, p in theirs.named_parameters()}, source="vit-pytorch-qk")
    named = dict(ours.named_parameters())
    assert set(gradients) == set(named)
    for key, expected in gradients.items():
        torch.testing.assert_close(named[key].grad, expected, rtol=0, atol=1e-4, msg=key)


def test_classifier_follows_the_features():
    model = small(num_classes=5)
    nn.init.normal_(model.classifier.weight)
    images = torch.randn(2, 3, 16, 16)
    features = model.features(images)
    assert features.shape == (2, 32)
    expected = features @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model(images), expected)
    tokens = model.tokens(images)
    assert tokens.shape == (2, 16, 32)
    torch.testing.assert_close(model.features_norm(tokens.mean(1)), features)


def test_any_size_the_patch_divides_has_the_positions_of_its_own_grid():
    # The weights made for 16×16 give what a model declared at 8×24 gives.
    square, wide = small(), small(image_size=(8, 24))
    wide.load_state_dict(square.state_dict())
    images = torch.randn(2, 3, 8, 24)
    assert torch.equal(square(images), wide(images))


def test_positions_by_hand():
    h, w, dim = 3, 5, 12
    table = sincos_2d(h, w, dim)
    assert table.dtype == torch.float32
    for i in range(h):
        for j in range(w):
            for t in range(dim // 4):
                omega = 10_000 ** (-t / (dim // 4 - 1))
                row = table[i * w + j]
                expected = [math.sin(j * omega), math.cos(j * omega)]
                expected += [math.sin(i * omega), math.cos(i * omega)]
                got = [row[t + part * dim // 4].item() for part in range(4)]
                assert got == pytest.approx(expected, abs=1e-6)


FORMULAS = {
    "unit": lambda x, gain, shift: x / x.norm() * math.sqrt(len(x)) * gain,
    "rms": lambda x, gain, shift: x / math.sqrt((x @ x).item() / len(x) + 1e-6) * gain,
    "layer": lambda x, gain, shift: (
        (x - x.mean()) / math.sqrt(((x - x.mean()) ** 2).mean().item() + 1e-6) * gain + shift
    ),
}


@pytest.mark.parametrize("form", FORMULAS)
def test_qk_norm_by_formula(form):
    norm = QKNorm(form, 2, 6, dtype=torch.float64)
    with torch.no_grad():
        norm.gamma.normal_()
        if norm.beta is not None:
            norm.beta.normal_()
    x = torch.randn(3, 2, 4, 6, dtype=torch.float64)
    out = norm(x)
    for b in range(3):
        for g in range(2):
            shift = norm.beta[g, 0] if norm.beta is not None else None
            for n in range(4):
                expected = FORMULAS[form](x[b, g, n], norm.gamma[g, 0], shift)
                torch.testing.assert_close(out[b, g, n], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("form", "bound"), [("unit", 1.0), ("rms", 4.0), ("layer", 4.0)])
def test_initial_logits_lie_in_the_stated_range(form, bound):
    attention = Attention(32, 2, 16, form)
    with torch.no_grad():
        attention.qkv.weight.mul_(100)
    q, k, _ = attention.queries_keys_values(torch.randn(4, 64, 32))
    logits = attention.scale * q @ k.transpose(-1, -2)
    assert logits.abs().max() <= bound * (1 + 1e-5)
    longest = (attention.scale * (q * q).sum(-1)).max()
    assert longest.item() == pytest.approx(bound, rel=1e-3)


def test_without_qk_norm_it_is_scaled_dot_product_attention():
    attention = Attention(32, 2, 16, None)
    x = torch.randn(2, 9, 32)
    q, k, v = attention.qkv(attention.norm(x)).view(2, 9, 3, 2, 16).permute(2, 0, 3, 1, 4)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    expected = attention.out(o.transpose(1, 2).reshape(2, 9, 32))
    torch.testing.assert_close(attention(x), expected, rtol=1e-5, atol=1e-6)


def test_zero_queries_give_no_nan_in_half_precision():
    for form in FORMULAS:
        out = QKNorm(form, 1, 4).half()(torch.zeros(1, 1, 2, 4, dtype=torch.float16))
        assert out.dtype == torch.float16
        assert torch.equal(out, torch.zeros_like(out))


def test_first_loss_is_that_of_a_guess():
    logits = small(num_classes=7)(torch.randn(4, 3, 16, 16))
    loss = nn.functional.cross_entropy(logits, torch.arange(4))
    assert loss.item() == pytest.approx(math.log(7), abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 30}, "dim=30 cannot hold 2-D sine-cosine positions.*multiple of 4"),
        ({"dim": 4}, r"dim=4 leaves one frequency.*divide by zero"),
        ({"image_size": 18}, "height 18 and width 18.*legal height is 16 or 20"),
        ({"image_size": (16, 3)}, "legal width is 4$"),
        ({"image_size": (16, 16, 3)}, r"image_size=\(16, 16, 3\): give a positive integer, or two"),
        ({"patch_size": 0}, "patch_size=0: give a positive integer"),
        ({"depth": True}, "depth=True: give a positive integer"),
        ({"num_classes": 0}, "num_classes=0: give a positive integer"),
        ({"qk_norm": "rsm"}, r"qk_norm='rsm' is unknown.*nearest: rms"),
    ],
)
def test_refused_constructions(changes, message):
    with pytest.raises(regard.InputError, match=message):
        small(**changes)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(1, 3, 16, 18), "nearest legal height is 16.*width is 16 or 20"),
        (torch.zeros(1, 3, 2, 16), "nearest legal height is 4,"),
        (torch.zeros(1, 1, 16, 16), "images have 1 channels; this model takes 3"),
        (torch.zeros(3, 16, 16), r"images have shape \(3, 16, 16\); give \(batch"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), "images have dtype torch.uint8"),
    ],
)
def test_refused_images(images, message):
    with pytest.raises(regard.InputError, match=message):
        small()(images)


def test_config_rebuilds_the_model():
    model = small(num_classes=3, image_size=(8, 12), qk_norm="layer")
    again = regard.SimpleViT(**model.config)
    again.load_state_dict(model.state_dict())
    assert again.config == model.config


@pytest.mark.parametrize("form", ["unit", None])
def test_compiles_without_a_graph_break(form):
    model = small(num_classes=4, qk_norm=form)
    images = torch.randn(2, 3, 16, 16)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images), rtol=0, atol=1e-5)


def test_create_knows_the_sizes():
    expected = {"ti": (192, 3, 12), "s": (384, 6, 12), "b": (768, 12, 12), "l": (1024, 16, 24)}
    for size, (dim, heads, depth) in expected.items():
        model = regard.create(f"simple-vit-{size}/16", num_classes=10, device="meta")
        config = model.config
        assert (config["dim"], config["heads"], config["depth"]) == (dim, heads, depth)
        assert config["mlp_dim"] == 4 * dim
        assert config["dim_head"] * heads == dim
        assert config["image_size"] == [224, 224]
    assert regard.create("simple-vit-ti/7", num_classes=None, device="meta").patch_size == (7, 7)
    model = regard.create("simple-vit-s/4", num_classes=2, image_size=32, channels=1, qk_norm=None)
    assert model(torch.zeros(1, 1, 32, 32)).shape == (1, 2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("simple-vit-x/16", {}, "there is no model 'simple-vit-x/16'; nearest: simple-vit"),
        ("simple-vit-s", {}, "number after the slash of a simple-vit is the patch size"),
        ("simple-vit-s/0", {}, "there is no model"),
        ("simple-vit-s/16", {"image_sise": 32}, "no option 'image_sise'; nearest: image_size"),
    ],
)
def test_create_refuses_with_the_nearest(name, options, message):
    with pytest.raises(regard.InputError, match=message):
        regard.create(name, num_classes=2, **options)
