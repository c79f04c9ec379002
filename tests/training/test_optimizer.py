"""Which parameter gets which rule, the schedule, and Muon beside torch's."""

import math

import pytest
import torch
from torch import nn

import regard
from regard.training import optimizers as muon
from regard.training.optimizers import block_matrices, build_optimizers, set_rate
from regard.training.schedule import rate


def tiny():
    torch.manual_seed(0)
    return regard.create(
        "simple-vit-nano/4", num_classes=3, image_size=8, dim=16, depth=1, mlp_dim=32
    )


def test_matrices_decay_and_gains_and_biases_do_not():
    model = tiny()
    (adamw,) = build_optimizers(model, "adamw", 1e-3, 0.3)
    names = {id(p): n for n, p in model.named_parameters()}
    decayed = {names[id(p)] for g in adamw.param_groups if g["weight_decay"] for p in g["params"]}
    assert decayed == {
        "embed.project.weight",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.out.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
        "classifier.weight",
    }
    assert sum(len(g["params"]) for g in adamw.param_groups) == len(names)


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest():
    model = tiny()
    first, second = build_optimizers(model, "muon", 1e-3, 0.1)
    mine = {id(p) for g in first.param_groups for p in g["params"]}
    assert mine == {id(p) for p in block_matrices(model).values()}
    rest = {id(p) for g in second.param_groups for p in g["params"]}
    assert mine | rest == {id(p) for p in model.parameters()}
    assert not mine & rest
    set_rate((first, second), 0.25)
    assert {g["lr"] for o in (first, second) for g in o.param_groups} == {0.25}


def test_muon_sgd_gives_each_parameter_of_a_pixel_resnet_its_rule():
    net = regard.create("pixel-resnet-nano", num_classes=3, image_size=12, widths=(8, 16))
    held, descent, adamw = found = build_optimizers(net, "muon-sgd", 0.02, 0.2)
    names = {id(p): n for n, p in net.named_parameters()}
    told = [names[id(p)] for o in found for g in o.param_groups for p in g["params"]]
    gains = {n for n, p in net.named_parameters() if not p.requires_grad}
    assert gains == {f"stages.{i}.norms.{j}.weight" for i in (0, 1) for j in (0, 1)}
    assert sorted(told) == sorted(set(names.values()) - gains)

    def rule(name):
        ((optimizer, group),) = (
            (o, g)
            for o in found
            for g in o.param_groups
            for p in g["params"]
            if names[id(p)] == name
        )
        return optimizer, group

    set_rate(found, 0.01)  # half of the source's
    for name, optimizer, lr, lost in (
        ("stages.0.convs.0.weight", held, 0.06, 0),
        ("stages.1.attention.out_weight", held, 0.0025, 0.002),
        ("stages.1.norms.1.bias", descent, 53, 0.002),
        ("stem.bias", descent, 53, 0.002),
        ("classifier.weight", descent, 670 / 256 / 16, 0.002),
        ("classifier.bias", descent, 0.01, 0.002),
        ("stages.1.attention.norm_weight", adamw, 0.001, 0),
    ):
        which, group = rule(name)
        assert which is optimizer, name
        assert group["lr"] == pytest.approx(lr)
        assert group["lr"] * group["weight_decay"] == pytest.approx(lost)
    assert rule("stages.0.convs.0.weight")[1]["hold"]
    assert not rule("stages.1.attention.out_weight")[1]["hold"]
    headless = regard.PixelResNet(image_size=12, num_classes=None, widths=(8,), attention=False)
    assert len(build_optimizers(headless, "muon-sgd", 0.02, 0.2)) == 2


def test_held_matrices_keep_their_length_and_turn_by_the_rate(monkeypatch):
    monkeypatch.setattr(muon, "product_dtype", lambda dtype, device: torch.float64)
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    before = weight.detach().clone()
    optimizer = muon.Muon([weight], 0.1, 0.5, momentum=0.6, newton_schulz_steps=3, hold=True)
    weight.grad = torch.randn(4, 6, dtype=torch.float64)
    turned = muon.orthogonalise(weight.grad[None].clone(), 3)[0]
    optimizer.step()  # its momentum is 0.4 g, the update 0.64 g, whose length is divided out
    expected = before * (2 / before.square().sum().sqrt()) - 0.1 * turned
    torch.testing.assert_close(weight.detach(), expected)
    moved = (weight - before * (2 / before.norm())).norm().item()
    assert 0.1 * 2 * 0.6 < moved < 0.1 * 2 * 1.3  # each of four singular values is near 1


@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (8, 8)])
def test_muon_follows_torchs(shape, monkeypatch):
    monkeypatch.setattr(muon, "product_dtype", lambda dtype, device: dtype)
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for _ in range(2)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"lr": 0.02, "weight_decay": 0.1}
    mine = muon.Muon(ours, **settings)
    other = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(shape)
            b.grad = a.grad.clone()
        mine.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        # the products are bfloat16, so orthogonal matrices agree to about 2^-7
        assert torch.allclose(a, b, atol=5 * 0.02 * 0.2 * math.sqrt(max(shape)) * 2**-6)


def test_muon_updates_are_nearly_orthogonal():
    torch.manual_seed(0)
    turned = muon.orthogonalise(torch.randn(3, 10, 24), 5)
    values = torch.linalg.svdvals(turned)
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_the_schedule_rises_in_a_line_and_falls_as_a_cosine_or_a_line():
    assert [rate(s, 10, 0.2) for s in (0, 1)] == [0.5, 1.0]
    expected = [0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    assert [rate(s, 10, 0.2) for s in range(2, 10)] == pytest.approx(expected)
    assert rate(0, 10, 0.0) == 1.0
    assert rate(9, 10, 1.0) == 1.0
    falling = [rate(s, 10, 0.2, "linear") for s in range(10)]
    assert falling == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
