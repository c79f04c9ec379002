"""The choice of a kernel: the rule, what overrides it, and what `explain` says of it."""

import pytest
import torch

import regard
from regard import _device as hardware
from regard.errors import InputError
from regard.layers.attend import Problem, attention_kernel, choose, explain
from regard.layers.attend_kernels import blocked_forward, blocks


def problem(**changes):
    usual = {"device": "cpu", "dtype": torch.float32, "heads": 8, "n": 1024, "m": 1024}
    usual |= {"d": 64, "e": 64, "grad": False, "rounded": False, "bf16_products": False}
    return Problem(**usual | changes)


RULE = [
    ({}, "sdpa"),
    ({"grad": True}, "sdpa"),
    ({"n": 64, "m": 64}, "sdpa"),
    ({"n": 64, "m": 64, "grad": True}, "plain"),
    ({"n": 64, "m": 64, "grad": True, "heads": 10_000}, "sdpa"),
    ({"n": 196, "m": 196, "grad": True, "heads": 6}, "plain"),
    ({"n": 196, "m": 196, "grad": True, "heads": 48}, "sdpa"),
    ({"heads": 1, "d": 512, "e": 512}, "sdpa"),
    ({"heads": 1, "d": 512, "e": 512, "grad": True}, "plain"),
    ({"heads": 2, "d": 512, "e": 512, "grad": True}, "plain"),
    ({"heads": 3, "d": 512, "e": 512, "grad": True}, "sdpa"),
    ({"heads": 1, "grad": True}, "plain"),
    ({"heads": 2, "grad": True}, "sdpa"),
    ({"e": 32}, "blocked"),
    ({"n": 0}, "plain"),
    ({"heads": 0}, "plain"),
    ({"device": "cuda"}, "sdpa"),
    ({"device": "cuda", "d": 512, "e": 512}, "blocked"),
    ({"device": "mps"}, "sdpa"),
    ({"dtype": torch.bfloat16}, "sdpa"),
]


@pytest.mark.parametrize(("changes", "kernel"), RULE)
def test_the_rule(changes, kernel):
    assert choose(problem(**changes)).kernel == kernel


BF16_RULE = [
    ({}, "blocked"),
    ({"d": 32, "e": 32}, "sdpa"),
    ({"grad": True}, "sdpa"),
    ({"grad": True, "d": 512, "e": 512}, "blocked"),
    ({"grad": True, "n": 196, "m": 196}, "blocked"),
    ({"rounded": True}, "blocked"),
    ({"rounded": True, "grad": True}, "blocked"),
    ({"rounded": True, "grad": True, "n": 196, "m": 196}, "plain"),
]


@pytest.mark.parametrize(("changes", "kernel"), BF16_RULE)
def test_the_rule_with_bf16_instructions(changes, kernel):
    changes = {"dtype": torch.bfloat16, "bf16_products": True} | changes
    assert choose(problem(**changes)).kernel == kernel


def test_attention_kernel_forces_and_restores():
    q = torch.randn(1, 2, 20, 8)
    with attention_kernel("blocked"):
        assert explain(q, q, q).kernel == "blocked"
        with attention_kernel("plain"):
            assert explain(q, q, q).kernel == "plain"
            assert explain(q, q, q, kernel="sdpa").kernel == "sdpa"
        assert "attention_kernel('blocked') is in force" in explain(q, q, q).reason
        with attention_kernel("auto"):
            assert "in force" not in explain(q, q, q).reason
    assert "in force" not in explain(q, q, q).reason


def test_attention_kernel_allows_rounded_scores(monkeypatch):
    monkeypatch.setattr(hardware, "BF16_PRODUCTS", True)
    q = torch.randn(1, 2, 20, 8).bfloat16()
    with attention_kernel("blocked"):
        assert explain(q, q, q).score_dtype == torch.float32
    with attention_kernel("blocked", score_dtype=torch.bfloat16):
        assert explain(q, q, q).score_dtype == torch.bfloat16
    monkeypatch.setattr(hardware, "BF16_PRODUCTS", False)
    with attention_kernel("blocked", score_dtype=torch.bfloat16):
        assert explain(q, q, q).score_dtype == torch.float32


def test_refusals():
    with pytest.raises(InputError, match="kernel='fast' is unknown"), attention_kernel("fast"):
        pass
    with (
        pytest.raises(InputError, match="cache_bytes=0: give a positive"),
        attention_kernel("auto", cache_bytes=0),
    ):
        pass
    with pytest.raises(InputError, match="Linear made no call of attend"):
        explain(torch.nn.Linear(2, 2), torch.ones(2))


@pytest.mark.parametrize("budget", [1, 999, 4000, 1 << 20])
def test_blocks_fit_the_budget_and_cover_everything(budget):
    heads, n, m = 6, 50, 10
    step, rows = blocks(heads, n, m, 4, budget)
    assert 1 <= step <= heads
    assert 1 <= rows <= n
    assert step == 1 or rows == n
    assert step * rows * m * 4 <= max(budget, 4 * m)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, s, 4, generator=generator) for s in (n, m, m))
    out, _ = blocked_forward(q, k, v, 0.5, False, budget, False)
    expected = torch.softmax(q.double() @ k.double().transpose(1, 2) * 0.5, -1) @ v.double()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)


def test_explain_counts_operations_and_listens_to_modules():
    block = regard.PixelAttention(32, num_heads=2)
    said = explain(block, torch.randn(3, 32, 4, 4))
    assert len(said) == 1
    assert said[0].problem[2:7] == (6, 16, 16, 16, 16)
    assert said[0].problem.grad
    q = torch.randn(2, 3, 100, 64)
    one = explain(q, q, q)
    assert one.flops == 6 * 100 * 100 * (2 * 64 + 2 * 64)
    assert str(one).startswith(f"{one.kernel}: {one.reason}")
    assert explain(q, q, q, kernel="plain").peak_bytes >= 6 * 100 * 100 * 4
    with attention_kernel("blocked", cache_bytes=40_000):
        assert explain(q, q, q).peak_bytes < 200_000


def test_what_can_be_explained_is_asked_for():
    with pytest.raises(InputError, match="a str came, and 0 after it; give q, k and v"):
        explain("x")
    with (
        pytest.raises(InputError, match="cache_bytes='1': give a positive integer"),
        attention_kernel("auto", cache_bytes="1"),
    ):
        pass
