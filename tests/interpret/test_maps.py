"""Maps against loops, and against models whose attention is known."""

import math

import numpy as np
import pytest
import torch

from regard import _png as colour
from regard.data.preprocess import Preprocess
from regard.errors import InputError
from regard.interpret.attention_call import entropy
from regard.interpret.faithfulness import baselines, curves
from regard.interpret.maps import (
    attention_distance,
    attention_from,
    attention_received,
    cell_at,
    cell_in_picture,
    effective_keys,
    relevance,
    rollout,
)
from regard.interpret.record import record
from regard.interpret.relevance import class_relevance
from regard.interpret.tokens import Tokens
from regard.models.simple_vit import SimpleViT
from tests.reference.handmade import Handmade, left_neighbour, own_row, top_right

H, W = 3, 5


def recorded(rule, **options):
    model = Handmade(rule)
    with record(model, **options) as seen:
        model(torch.randn(2, 3, 12, 20))
    return seen


def random_weights(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(2).softmax(-1)


@pytest.mark.parametrize("rule", [left_neighbour, own_row, top_right])
def test_attention_from_every_place_of_a_known_model(rule):
    attention = recorded(rule)["blocks.1"]
    for row in range(H):
        for column in range(W):
            maps = attention_from(attention, (row, column))
            assert maps.shape == (2, 2, H, W)
            expected = torch.zeros(H, W)
            targets = rule(row, column, H, W)
            for r, c in targets:
                expected[r, c] = 1 / len(targets)
            torch.testing.assert_close(maps[1, 0], expected, atol=1e-6, rtol=0)


def test_attention_from_chosen_queries_only():
    attention = recorded(left_neighbour, queries=[(1, 2), (2, 0)])["blocks.0"]
    assert attention_from(attention, (1, 2))[0, 0, 1, 1] == pytest.approx(1)
    assert attention_from(attention, (2, 0))[0, 0, 2, 0] == pytest.approx(1)
    with pytest.raises(InputError, match=r"query \(0, 0\) of blocks.0 was not recorded"):
        attention_from(attention, (0, 0))
    with pytest.raises(InputError, match="what is received needs all"):
        attention_received(attention)


@pytest.mark.parametrize("keep", ["weights", "received"])
def test_attention_received(keep):
    maps = attention_received(recorded(top_right, keep=keep)["blocks.0"])
    expected = torch.zeros(H, W)
    expected[0, W - 1] = 1
    torch.testing.assert_close(maps[0, 0], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(maps[0, 1], torch.full((H, W), 1 / 15), atol=1e-6, rtol=0)


def test_rollout_against_loops():
    layers = [random_weights(2, 3, 4, 4, seed=i) for i in range(3)]
    expected = np.stack([np.eye(4)] * 2)
    for weights in layers:
        mixed = np.zeros((2, 4, 4))
        for b in range(2):
            for i in range(4):
                for j in range(4):
                    mean = sum(float(weights[b, g, i, j]) for g in range(3)) / 3
                    mixed[b, i, j] = 0.5 * mean + 0.5 * (i == j)
        expected = np.stack(
            [
                [[sum(mixed[b, i, k] * expected[b, k, j] for k in range(4)) for j in range(4)]
                 for i in range(4)]
                for b in range(2)
            ]
        )  # fmt: skip
    np.testing.assert_allclose(rollout(layers), expected, atol=1e-12)
    np.testing.assert_allclose(rollout([w.mean(1) for w in layers]), expected, atol=1e-12)
    np.testing.assert_allclose(rollout(layers, residual=1.0), np.stack([np.eye(4)] * 2))


def test_rollout_of_a_known_model_goes_to_the_left_step_by_step():
    """Without the residual, two layers of "left neighbour" look two places to the left."""
    seen = recorded(left_neighbour)
    layers = [attention.weights[:, :1] for attention in seen.layers()]
    reached = rollout(layers, residual=0.0)[0].view(H, W, H, W)
    assert reached[1, 4, 1, 2] == pytest.approx(1, abs=1e-5)
    assert reached[1, 1, 1, 0] == pytest.approx(1, abs=1e-5)


def test_products_over_unlike_layers_are_refused():
    with pytest.raises(InputError, match="as many, in every layer"):
        rollout([random_weights(1, 1, 4, 4), random_weights(1, 1, 9, 9)])
    with pytest.raises(InputError, match="as many, in every layer"):
        rollout([random_weights(1, 1, 4, 5)])
    with pytest.raises(InputError, match="no layers came"):
        rollout([])
    with pytest.raises(InputError, match="residual=2: give a number from 0 to 1"):
        rollout([random_weights(1, 1, 4, 4)], residual=2)


def relevance_loop(layers, gradients):
    """R (n, n) of one image, by loops."""
    g, n, _ = layers[0].shape
    reached = np.eye(n)
    for weights, gradient in zip(layers, gradients, strict=True):
        mean = np.zeros((n, n))
        for i in range(n):
            for j in range(n):
                for head in range(g):
                    mean[i, j] += max(0.0, weights[head, i, j] * gradient[head, i, j]) / g
        reached = reached + mean @ reached
    return reached


def test_relevance_against_loops():
    layers = [random_weights(2, 3, 4, 4, seed=i) for i in range(3)]
    gradients = [torch.randn(2, 3, 4, 4, dtype=torch.float64) for _ in range(3)]
    found = relevance(layers, gradients)
    for b in range(2):
        expected = relevance_loop([w[b].numpy() for w in layers], [g[b].numpy() for g in gradients])
        np.testing.assert_allclose(found[b], expected, atol=1e-12)


def explicit_vit(vit, images, readout):
    """The model's logits with each layer's weights as a leaf, for autograd to differentiate."""
    from regard.layers.patch_embed import sincos_2d

    x = vit.embed(images)
    x = x + sincos_2d(*vit.grid(images), x.shape[-1]).to(x.dtype)
    layers = []
    for block in vit.blocks:
        q, k, v = block.attention.queries_keys_values(x)
        weights = (block.attention.scale * q @ k.mT).softmax(-1)
        layers.append(weights)
        x = x + block.attention.out((weights @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(x)
    pooled = vit.norm(x).mean(1)
    return vit.classifier(vit.features_norm(pooled)), layers


def test_class_relevance_is_the_row_of_the_full_product():
    torch.manual_seed(0)
    vit = SimpleViT(
        image_size=(8, 12), patch_size=4, num_classes=3, dim=8, depth=3, heads=2, mlp_dim=8,
        dim_head=4, dtype=torch.float64,
    ).eval()  # fmt: skip
    torch.nn.init.normal_(vit.classifier.weight)
    images = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    found = class_relevance(vit, images, torch.tensor([2, 0]))
    logits, layers = explicit_vit(vit, images, "mean")
    torch.testing.assert_close(found.logits, logits.detach())
    gradients = torch.autograd.grad(logits[0, 2] + logits[1, 0], layers)
    for b in range(2):
        whole = relevance_loop(
            [w[b].detach().numpy() for w in layers], [g[b].numpy() for g in gradients]
        )
        expected = (whole - np.eye(6)).mean(0).reshape(2, 3)
        np.testing.assert_allclose(found.maps[b], expected, rtol=1e-5, atol=1e-9)
    assert class_relevance(vit, images).classes.tolist() == logits.argmax(1).tolist()
    with pytest.raises(InputError, match="classes=3: give an integer from 0 to 2"):
        class_relevance(vit, images, 3)
    with pytest.raises(InputError, match="the model has no class token"):
        class_relevance(vit, images, readout="class")


def test_class_relevance_of_a_known_model_is_at_the_corner_all_evidence_comes_from():
    images = torch.rand(1, 3, 12, 20) + 0.1
    maps = class_relevance(Handmade(top_right), images, 1).maps[0]
    assert divmod(int(maps.argmax()), W) == (0, W - 1)
    rest = maps.flatten()[torch.arange(15) != W - 1]
    assert float(rest.max()) < 1e-3 * float(maps.max())


def test_entropy_effective_keys_and_distance_by_hand():
    weights = torch.tensor([[[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]]])
    found = entropy(weights)[0, 0]
    np.testing.assert_allclose(found, [math.log(2), 0, math.log(3)], atol=1e-6)
    np.testing.assert_allclose(effective_keys(weights)[0, 0], [2, 1, 3], rtol=1e-6)
    # Places at x = 0, 8, 16: row means 4, 8, (16 + 8 + 0) / 3.
    distance = attention_distance(weights, Tokens(3, (1, 3)), (4, 8))
    assert float(distance) == pytest.approx((4 + 8 + 8) / 3, rel=1e-6)


def test_distance_against_loops_with_an_extra_token_on_a_rectangle():
    weights = random_weights(2, 3, 1 + 6, 1 + 6)
    tokens = Tokens(7, (2, 3), leading=1)
    found = attention_distance(weights, tokens, (4, 10))
    for b in range(2):
        for g in range(3):
            total = 0.0
            for i in range(6):
                over = mass = 0.0
                for j in range(6):
                    a = float(weights[b, g, 1 + i, 1 + j])
                    apart = math.hypot((i // 3 - j // 3) * 4, (i % 3 - j % 3) * 10)
                    over, mass = over + a * apart, mass + a
                total += over / mass
            assert float(found[b, g]) == pytest.approx(total / 6)
    with pytest.raises(InputError, match=r"\(…, 7, 7\) with all queries is needed"):
        attention_distance(weights[:, :, :2], tokens, (4, 10))


def test_distance_of_known_models():
    tokens = Tokens(15, (H, W))
    far = attention_distance(recorded(left_neighbour)["blocks.0"].weights, tokens, (4, 4))
    assert float(far[0, 0]) == pytest.approx(4 * 4 / 5, abs=1e-4)  # the first column stays
    assert float(far[0, 1]) == pytest.approx(0, abs=1e-4)


FITS = [
    ("stretch", (24, 80), (10.0, 60.0), (1, 3)),
    ("crop", (24, 80), (20.0, 59.9), (2, 4)),  # x from 20 to 60
    ("letterbox", (48, 40), (0.0, 0.0), (0, 1)),  # 10 of 20 columns, from column 5
]


@pytest.mark.parametrize(("fit", "original", "place", "cell"), FITS)
def test_places_go_through_the_preprocessing_and_back(fit, original, place, cell):
    preprocess = Preprocess((12, 20), fit)
    geometry = preprocess.geometry(*original)
    assert cell_at(place, geometry, (12, 20), (H, W)) == cell
    for row in range(H):
        for column in range(W):
            top, left, bottom, right = cell_in_picture((row, column), geometry, (12, 20), (H, W))
            middle = ((top + bottom) / 2, (left + right) / 2)
            assert cell_at(middle, geometry, (12, 20), (H, W)) == (row, column)


def test_a_marked_square_is_found_where_the_model_sees_it():
    """The pixels of a cell in the picture are those that the model's input has in that cell."""
    for fit, original in (("stretch", (48, 40)), ("crop", (48, 200)), ("letterbox", (96, 80))):
        preprocess = Preprocess((12, 20), fit)
        geometry = preprocess.geometry(*original)
        box = cell_in_picture((1, 2), geometry, (12, 20), (H, W))
        top, left, bottom, right = (round(edge) for edge in box)
        picture = torch.zeros(3, *original, dtype=torch.uint8)
        picture[:, top:bottom, left:right] = 255
        cells = torch.nn.functional.avg_pool2d(preprocess(picture), 4)[0]
        assert divmod(int(cells.argmax()), W) == (1, 2)
        assert cells[1, 2] > 0.7  # antialiasing blurs the edges


def test_a_place_that_was_cropped_away_is_refused():
    geometry = Preprocess((12, 20), "crop").geometry(24, 80)
    with pytest.raises(InputError, match=r"x=10, y=5 is outside what .* x from 20 to below 60"):
        cell_at((5.0, 10.0), geometry, (12, 20), (H, W))


def test_extra_tokens_are_left_out_of_maps():
    tokens = Tokens(8, (2, 3), leading=2)
    assert (tokens.extra, tokens.places()) == (2, slice(2, 8))
    assert tokens.index((1, 2), "a") == 7
    assert Tokens(8, (2, 3)).places() == slice(0, 6)  # registers at the end
    with pytest.raises(InputError, match="nothing says which grid 7 tokens form"):
        Tokens(7).need_grid()


class Corner(torch.nn.Module):
    """Class 1 by the brightness of the top left cell (4×4) alone."""

    def forward(self, images):
        logit = 8 * images[:, :, :4, :4].mean((1, 2, 3))
        return torch.stack([-logit, logit], 1)


def test_faithfulness_tells_a_true_map_from_the_baselines():
    images = torch.ones(2, 3, 12, 20)
    true = torch.zeros(2, H, W)
    true[:, 0, 0] = 1
    classes = torch.tensor([1, 1])
    found = curves(Corner(), images, true, classes, steps=15)
    assert found.deletion[0] == pytest.approx(1, abs=1e-4)
    assert found.deletion[1:].tolist() == pytest.approx([0.5] * 15)
    assert found.insertion[0] == 0.5
    assert found.insertion[1:].tolist() == pytest.approx([1] * 15, abs=1e-4)
    assert found.deletion_area == pytest.approx(0.5 + 0.5 / 30, abs=1e-3)
    for name, other in baselines(true).items():
        worse = curves(Corner(), images, other, classes, steps=15)
        assert worse.deletion_area > found.deletion_area + 0.05, name
        assert worse.insertion_area < found.insertion_area - 0.05, name
    with pytest.raises(InputError, match=r"maps \(2, 3, 5\) do not divide images"):
        curves(Corner(), torch.ones(2, 3, 12, 21), true, classes)


def oklab(rgb):
    """sRGB (…, 3) in 0..1 to OKLab, by Ottosson's forward matrices."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_lms = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    to_lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return np.cbrt(linear.clip(0, 1) @ to_lms.T) @ to_lab.T


# Severity 1 of Machado, Oliveira, Fernandes 2009, on linear RGB.
DICHROMATS = {
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def test_the_colour_scale_is_even_and_safe():
    rgb = colour.scale() / 255
    lab = oklab(rgb)
    far = np.linalg.norm(lab[8:] - lab[:-8], axis=1)  # over 8 levels: rounding to bytes averages
    assert far.max() / far.min() < 1.25
    assert (np.diff(lab[::4, 0]) > 0).all()
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    for name, matrix in DICHROMATS.items():
        seen = (linear @ np.array(matrix).T).clip(0, 1)
        lightness = np.where(seen <= 0.0031308, 12.92 * seen, 1.055 * seen ** (1 / 2.4) - 0.055)
        steps = np.diff(oklab(lightness)[::8, 0])
        assert (steps > 0.005).all(), name
