"""Which parameter gets which rule, the schedule, and Muon beside torch's."""

import math

import pytest
import torch
from torch import nn

import regard
from regard.runs import muon
from regard.runs.optimizer import block_matrices, build_optimizers, set_rate
from regard.runs.schedule import rate


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


def test_the_schedule_rises_in_a_line_and_falls_as_a_cosine():
    assert [rate(s, 10, 0.2) for s in (0, 1)] == [0.5, 1.0]
    expected = [0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    assert [rate(s, 10, 0.2) for s in range(2, 10)] == pytest.approx(expected)
    assert rate(0, 10, 0.0) == 1.0
    assert rate(9, 10, 1.0) == 1.0
