"""SimpleViT's options: drop path, patch dropout, a convolutional stem, checkpointing."""

import json
import math

import pytest
import torch
from torch import nn

import regard
from regard.layers.conv import ConvStem, halvings
from regard.layers.patch_embed import keep_some
from regard.layers.transformer import Block, drop_path
from regard.training.optimizers import block_matrices

SMALL = {"image_size": 16, "patch_size": 4, "num_classes": 3, "dim": 16, "depth": 4, "heads": 2}
SMALL |= {"mlp_dim": 32, "dim_head": 8}


def small(**changes):
    torch.manual_seed(0)
    model = regard.SimpleViT(**{**SMALL, **changes})
    nn.init.normal_(model.classifier.weight)
    return model


def test_drop_path_keeps_or_drops_whole_samples_and_its_expectation():
    branch = torch.rand(20_000, 2, 3) + 1
    torch.manual_seed(0)
    out = drop_path(branch, 0.3)
    factor = out / branch
    per_sample = factor.flatten(1)
    torch.testing.assert_close(per_sample.amin(1), per_sample.amax(1))
    zero = per_sample[:, 0] == 0
    assert torch.allclose(per_sample[~zero, 0], torch.tensor(1 / 0.7))
    assert zero.float().mean().item() == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / 20_000))
    assert factor.mean().item() == pytest.approx(1, abs=4 * math.sqrt(0.3 / 0.7 / 20_000))


def test_drop_path_by_block_grows_with_depth_and_rests_in_eval():
    model = small(drop_path=0.4)
    assert [block.drop_path for block in model.blocks] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    images = torch.randn(8, 3, 16, 16)
    plain = small()
    assert torch.equal(model.eval()(images), plain(images))
    assert not torch.equal(model.train()(images), plain(images))


def test_a_block_by_hand_with_its_masks_known():
    block = Block(16, 2, 8, 32, drop_path=0.5).train()
    x = torch.randn(6, 5, 16)
    torch.manual_seed(3)
    out = block(x)
    torch.manual_seed(3)
    masks = [(torch.rand(6, 1, 1) >= 0.5).float() * 2 for _ in range(2)]
    first = x + masks[0] * block.attention(x)
    torch.testing.assert_close(out, first + masks[1] * block.mlp(first))


def test_kept_tokens_are_the_images_own_each_once():
    tokens = torch.arange(5 * 12.0).view(5, 12, 1)
    torch.manual_seed(0)
    kept = keep_some(tokens, 0.25)
    assert kept.shape == (5, 9, 1)
    choices = set()
    for i in range(5):
        values = kept[i, :, 0].tolist()
        assert len(set(values)) == 9
        assert set(values) <= set(tokens[i, :, 0].tolist())
        choices.add(frozenset(value - 12 * i for value in values))
    assert len(choices) > 1, "every image lost the same tokens"
    assert keep_some(tokens, 0.99).shape == (5, 1, 1)


def test_patch_dropout_in_training_only():
    model = small(patch_dropout=0.5)
    images = torch.randn(4, 3, 16, 16)
    assert model.train().tokens(images).shape == (4, 8, 16)
    assert torch.equal(model.eval()(images), small()(images))


@pytest.mark.parametrize("option", [{"drop_path": 0.5}, {"patch_dropout": 0.5}], ids=str)
def test_randomness_is_torchs_generator_alone(option):
    model, images = small(**option).train(), torch.randn(8, 3, 16, 16)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(images))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_checkpointing_changes_memory_and_no_number():
    images = torch.randn(4, 3, 16, 16)
    kept, gradients = [], []
    for switch in (False, True):
        model = small(activation_checkpointing=switch, drop_path=0.5).train()
        sizes: list[int] = []

        def pack(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(images).square().sum()
        kept.append(sum(sizes))
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert kept[1] < kept[0] / 3
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("patch", "stride", "pools", "rest"),
    [
        ((16, 16), (4, 4), [(2, 2)] * 2, (1, 1)),
        ((4, 4), (1, 1), [(2, 2)] * 2, (1, 1)),
        ((2, 2), (1, 1), [(2, 2)], (1, 1)),
        ((12, 2), (1, 1), [(2, 2), (2, 1)], (3, 1)),
        ((2, 16), (2, 4), [(1, 2), (1, 2)], (1, 1)),
        ((7, 7), (1, 1), [(1, 1)], (7, 7)),
    ],
)
def test_the_strides_of_a_stem_multiply_to_the_patch(patch, stride, pools, rest):
    assert halvings(patch) == (stride, pools, rest)
    size = (2 * patch[0], 3 * patch[1])
    assert ConvStem(1, patch, 32)(torch.randn(2, 1, *size)).shape == (2, 6, 32)


def normed_gelu(x):
    """GELU of each channel of (c, h, w), normed over this one image."""
    mean = x.mean((1, 2), keepdim=True)
    x = (x - mean) / ((x - mean).square().mean((1, 2), keepdim=True) + 1e-5).sqrt()
    return gelu(x)


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def convolved(x, conv):
    """A 3×3 convolution of (c, h, w), padded by one, by loops over places."""
    kernel = conv.weight.view(-1, 3, 3, conv.in_channels).permute(0, 3, 1, 2)
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    out = torch.zeros(len(kernel), *x.shape[1:], dtype=x.dtype)
    for i in range(x.shape[1]):
        for j in range(x.shape[2]):
            out[:, i, j] = (kernel * padded[:, i : i + 3, j : j + 3]).sum((1, 2, 3))
    return out


def largest_of_twos(x):
    """The largest of each 2×2 window of (c, h, w)."""
    return torch.stack([x[:, i::2, j::2] for i in range(2) for j in range(2)]).amax(0)


def test_a_stem_by_hand():
    torch.manual_seed(0)
    stem = ConvStem(2, (2, 2), 16, dtype=torch.float64)
    images = torch.randn(1, 2, 4, 6, dtype=torch.float64)
    padded = torch.cat([images[0], images[0, :, -1:]], dim=1)
    padded = torch.cat([padded, padded[:, :, -1:]], dim=2)
    x = torch.zeros(16, 4, 6, dtype=torch.float64)
    for i in range(4):
        for j in range(6):
            x[:, i, j] = (stem.whitening.kernel * padded[:, i : i + 2, j : j + 2]).sum((1, 2, 3))
    first, second = stem.stages[0].convs
    x = normed_gelu(largest_of_twos(convolved(gelu(x), first)))
    x = x + normed_gelu(convolved(x, second))
    tokens = x.flatten(1).T @ stem.project.weight.flatten(1).T
    torch.testing.assert_close(stem(images)[0], nn.functional.layer_norm(tokens, (16,)))


def test_muon_takes_the_convolutions_of_a_stem():
    model = small(stem="conv")
    taken = [name for name in block_matrices(model) if name.startswith("embed")]
    assert taken == [f"embed.stages.{i}.convs.{j}.weight" for i in range(2) for j in range(2)]


def test_a_stem_takes_statistics_of_images():
    torch.manual_seed(0)
    model = small(stem="conv", channels=1, image_size=8).eval()
    assert model.takes_statistics
    assert not small().takes_statistics
    images = 3 + torch.randn(500, 1, 8, 8)
    model.initialise_from(images)
    white = model.embed.whitening
    patches = nn.functional.unfold(images, 2).transpose(1, 2).flatten(0, 1)
    out = patches @ white.kernel[: white.components].flatten(1).T
    moment = out.T @ out / len(out)
    torch.testing.assert_close(moment, torch.eye(white.components), atol=0.01, rtol=0)
    before = [norm.running_mean.clone() for norm in model.embed.stages[0].norms]
    model.calibrate(images)
    conv, norm = model.embed.stages[0].convs[0], model.embed.stages[0].norms[0]
    mean = torch.zeros(len(norm.weight))
    for part in images.tensor_split(2):
        x = model.embed.whitening(nn.functional.pad(part, (0, 1, 0, 1), mode="replicate"))
        mean += nn.functional.max_pool2d(conv(x), 2).mean((0, 2, 3)) / 2
    torch.testing.assert_close(norm.running_mean, mean)
    assert not torch.equal(norm.running_mean, before[0])
    assert not model.training
    assert norm.momentum == 0.1
    taken = norm.running_mean.clone()
    for few in (images[:0], images[:1], images[:4] * math.nan, images[:4] / 0):
        with pytest.raises(regard.InputError, match="to take statistics from"):
            model.calibrate(few)
        assert torch.equal(norm.running_mean, taken)
    kernel = white.kernel.clone()
    for bad in (images[:0], images[:4] * math.nan):
        with pytest.raises(regard.InputError, match="give finite pixels"):
            model.initialise_from(bad)
        assert torch.equal(white.kernel, kernel)
    with pytest.raises(regard.InputError, match="a batch of 1 in training; batch norm needs 2"):
        model.train()(images[:1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_stem_of_any_dtype_takes_images_of_any_other(dtype):
    torch.manual_seed(0)
    model = small(stem="conv", dtype=dtype)
    kernel = model.embed.whitening.kernel.double().flatten(1)
    half = kernel[: len(kernel) // 2]
    torch.testing.assert_close(half @ half.T, torch.eye(len(half)).double(), atol=0.02, rtol=0)
    images = torch.randn(4, 3, 8, 8)
    for given in (images, images.to(dtype)):
        assert model(given).dtype == given.dtype
        assert model(given).isfinite().all()


def test_a_stem_is_whitened_by_images_smaller_than_its_patches():
    model = small(stem="conv", image_size=(1, 4), patch_size=(1, 2))
    images = torch.randn(50, 3, 1, 4)
    model.initialise_from(images)
    kernel = model.embed.whitening.kernel.clone()
    assert kernel.shape[-2:] == (2, 2)
    model.initialise_from(images.repeat(1, 1, 2, 1))  # the row that forward repeats
    assert torch.equal(kernel, model.embed.whitening.kernel)
    assert model(images).isfinite().all()


def test_a_stem_in_the_model_takes_any_size_and_trains():
    model = small(stem="conv", channels=1)
    assert isinstance(model.embed, ConvStem)
    images = torch.randn(2, 1, 8, 20)
    model(images).sum().backward()
    assert model.tokens(images).shape == (2, 10, 16)
    assert all(p.grad.abs().sum() > 0 for p in model.embed.parameters())
    with pytest.raises(regard.InputError, match="nearest legal height is 8 or 12"):
        model(torch.zeros(1, 1, 10, 8))


def test_options_are_in_the_config():
    options = {"stem": "conv", "drop_path": 0.1, "patch_dropout": 0.2}
    options["activation_checkpointing"] = True
    model = small(**options)
    config = json.loads(json.dumps(model.config))
    assert options.items() <= config.items()
    again = regard.SimpleViT(**config)
    again.load_state_dict(model.state_dict())
    named = regard.create("simple-vit-nano/4", num_classes=2, **options)
    assert options.items() <= named.config.items()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop_path": 1}, "drop_path=1: give a number of at least 0 and below 1"),
        ({"drop_path": True}, "drop_path=True: give a number"),
        ({"patch_dropout": -0.1}, "patch_dropout=-0.1: give a number"),
        ({"stem": "convolution"}, "stem='convolution': give 'patch' or 'conv'"),
    ],
)
def test_refused_options(changes, message):
    with pytest.raises(regard.InputError, match=message):
        small(**changes)
