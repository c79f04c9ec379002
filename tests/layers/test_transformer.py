"""When a transformer block lets its scores be rounded."""

import pytest
import torch

import regard
from regard import _device as hardware
from regard.layers.attend import explain
from regard.layers.qk_norm import QKNorm, largest_logit
from regard.layers.transformer import SMALL_LOGIT, Attention


def attention(form="unit", gain=1.0):
    torch.manual_seed(0)
    module = Attention(64, 2, 32, form)
    with torch.no_grad():
        for parameter in module.q_norm.parameters() if form else ():
            parameter.mul_(gain)
    return module.eval()


TOKENS = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_the_bound_is_reached_and_never_passed():
    torch.manual_seed(0)
    q_norm, k_norm = QKNorm("unit", 3, 8), QKNorm("unit", 3, 8)
    with torch.no_grad():
        q_norm.gamma.normal_()
        k_norm.gamma.normal_()
    bound = largest_logit(q_norm, k_norm)
    x = torch.randn(3, 4000, 8)
    logits = (q_norm(x) * k_norm(x)).sum(dim=-1)
    # one channel alone gives the product of its gains
    alone = torch.eye(8).expand(3, 8, 8)
    reached = (q_norm(alone) * k_norm(alone)).sum(dim=-1).abs().max().detach()
    assert logits.abs().max() <= bound
    assert float(reached) == pytest.approx(bound, rel=1e-5)
    assert largest_logit(QKNorm("rms", 3, 8), k_norm) == torch.inf
    assert largest_logit(torch.nn.Identity(), torch.nn.Identity()) == torch.inf


@pytest.mark.parametrize(
    ("form", "gain", "instructions", "score"),
    [
        ("unit", 1.0, True, torch.bfloat16),
        ("unit", 1.9 * 1.0, True, torch.bfloat16),
        ("unit", 2.1, True, torch.float32),
        ("rms", 1.0, True, torch.float32),
        (None, 1.0, True, torch.float32),
        ("unit", 1.0, False, torch.float32),
    ],
)
def test_scores_are_rounded_only_where_small_and_faster(
    monkeypatch, form, gain, instructions, score
):
    monkeypatch.setattr(hardware, "BF16_PRODUCTS", instructions)
    module = attention(form, gain).bfloat16()
    with torch.no_grad():
        said = explain(module, TOKENS)[0]
    assert said.score_dtype == score
    assert said.problem.rounded == (score == torch.bfloat16)
    assert ("rounded scores are allowed" in said.reason) == said.problem.rounded
    # wider operands have nothing to round
    assert explain(module.float(), TOKENS.float())[0].score_dtype == torch.float32


def test_rounding_small_logits_costs_no_accuracy(monkeypatch):
    monkeypatch.setattr(hardware, "BF16_PRODUCTS", True)
    torch.manual_seed(2)
    # queries equal to keys: logits over all of [-2, 2]
    x = torch.randn(1, 4, 200, 3).bfloat16()
    x = (x.double() / x.double().norm(dim=-1, keepdim=True) * SMALL_LOGIT**0.5).bfloat16()
    v = torch.randn(1, 4, 200, 3).bfloat16()
    exact = torch.softmax(x.double() @ x.double().transpose(2, 3), dim=-1) @ v.double()
    wide, rounded = (
        (regard.attend(x, x, v, scale=1.0, score_dtype=dtype).double() - exact).norm()
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert rounded <= 1.5 * wide
