"""Where a NaN began, and losses that leap."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard
from regard.data.batches import Batch
from regard.training.nan_diagnosis import LossWatch, diagnose


def model():
    torch.manual_seed(0)
    return regard.create(
        "simple-vit-nano/4", num_classes=3, image_size=8, channels=1, dim=16, depth=2, mlp_dim=32
    )


def batch(images):
    b = len(images)
    labels = torch.arange(b) % 3
    return Batch(images, F.one_hot(labels, 3).float(), labels, torch.ones(b), torch.arange(b) + 10)


def found(net, images, loss=lambda logits, part: F.cross_entropy(logits, part.targets)):
    return diagnose(net, [batch(images)], lambda i, part: loss(net(part.images), part))


def test_the_module_whose_output_was_first_not_finite_is_named():
    net = model()
    net.blocks[1].mlp.up.register_forward_hook(lambda m, i, o: o * float("inf"))
    words = found(net, torch.randn(4, 1, 8, 8))
    assert words.startswith("the output of blocks.1.mlp.up (Linear) (the largest attention logit")


def test_the_largest_attention_logit_is_named_with_its_layer():
    net = model()
    with torch.no_grad():
        net.blocks[1].attention.q_norm.gamma.mul_(1e6)
    net.classifier.register_forward_hook(lambda m, i, o: o / 0)
    images = torch.randn(4, 1, 8, 8)
    words = found(net, images)
    tokens = []
    net.blocks[1].register_forward_pre_hook(lambda m, i: tokens.append(i[0]))
    net(images)
    with torch.no_grad():
        q, k, _ = net.blocks[1].attention.queries_keys_values(tokens[0])
    largest = max(
        float(q[i, g, n] @ k[i, g, m])
        for i in range(4) for g in range(2) for n in range(4) for m in range(4)
    )  # fmt: skip
    assert words.startswith("the output of classifier (Linear)")
    assert f"the largest attention logit was {largest:.3g}, in blocks.1.attention" in words


def test_the_largest_logit_of_pixel_attention_is_named_too():
    torch.manual_seed(0)
    net = regard.create(
        "pixel-resnet-nano", num_classes=3, image_size=16, channels=1, widths=(8, 8), depth=1
    )
    net.classifier.register_forward_hook(lambda m, i, o: o / 0)
    words = found(net, torch.randn(4, 1, 16, 16))
    assert "the largest attention logit was" in words
    assert ", in stages.1.attention" in words
    plain = nn.Linear(4, 3)
    plain.register_forward_hook(lambda m, i, o: o / 0)
    assert "no attention logit was seen before it" in found(plain, torch.ones(2, 4))


def test_weights_images_gradients_and_losses_are_told_apart():
    net = model()
    with torch.no_grad():
        net.blocks[0].attention.out.weight[0, 0] = float("nan")
    assert found(net, torch.randn(2, 1, 8, 8)) == "the weight blocks.0.attention.out.weight itself"
    images = torch.randn(3, 1, 8, 8)
    images[1, 0, 2, 2] = float("inf")
    assert found(model(), images) == "the training image at position 11"
    images = torch.randn(3, 1, 8, 8)
    words = found(model(), images, lambda logits, part: (logits * 0).sqrt().sum())
    assert words.startswith("the gradient at the input of")
    words = found(
        model(), images, lambda logits, part: logits.detach().sum() / 0 + 0 * logits.sum()
    )
    assert words.startswith("the loss (the largest attention logit was")
    assert found(model(), images) == ""


def test_hooks_are_gone_afterwards():
    net = model()
    found(net, torch.randn(2, 1, 8, 8))
    assert not any(m._forward_hooks or m._backward_hooks for m in net.modules())


def test_a_loss_that_leaps_is_noticed_once_and_noise_is_not():
    draw = random.Random(0)
    noisy = [2.0 * 0.99**s * draw.uniform(0.8, 1.25) for s in range(300)]
    watch = LossWatch()
    assert not any(watch.check(loss) for loss in noisy)
    assert watch.check(40.0)
    assert not watch.check(4000.0)


@pytest.mark.parametrize("loss", [3.0, 30.0])
def test_the_first_steps_only_teach(loss):
    watch = LossWatch()
    assert not any(watch.check(x) for x in [1.0, 1.0, loss])


def test_nested_outputs_are_seen():
    class Pair(nn.Module):
        def forward(self, x):
            return {"a": (x, [x / 0])}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(torch.nan_to_num(self.pair(x)["a"][1][0]))

    assert found(Net(), torch.ones(2, 4)).startswith("the output of pair (Pair)")
