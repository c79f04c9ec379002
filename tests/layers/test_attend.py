"""`attend` against loops in float64 and against torch's attention, and what it refuses."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from regard import _device as hardware
from regard.errors import InputError
from regard.layers.attend import attend, attention_kernel

KERNELS = ("auto", "plain", "sdpa", "blocked")


def loops(q, k, v, scale):
    """out_it = Σ_j p_ij v_jt for one head, number by number."""
    n, m, e = len(q), len(k), len(v[0])
    out = [[0.0] * e for _ in range(n)]
    for i in range(n):
        scores = [scale * sum(a * b for a, b in zip(q[i], k[j], strict=True)) for j in range(m)]
        largest = max(scores)
        weights = [math.exp(s - largest) for s in scores]
        for t in range(e):
            out[i][t] = sum(w * v[j][t] for j, w in enumerate(weights)) / sum(weights)
    return out


def exact(q, k, v, scale=None):
    """The same in float64 with torch, for sizes that loops do not reach."""
    q, k, v = (x.detach().double().requires_grad_(x.requires_grad) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return q, k, v, torch.softmax(q @ k.transpose(-1, -2) * scale, dim=-1) @ v


def random(*shapes, dtype=torch.float32, grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in made]


def relative(x, y):
    return ((x.double() - y).norm() / y.norm()).item()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agrees_with_the_loops(kernel, dtype):
    q, k, v = random((2, 5, 3), (2, 7, 3), (2, 7, 4), dtype=dtype)
    out = attend(q, k, v, scale=0.7, kernel=kernel)
    for head in range(2):
        lists = (x[head].double().tolist() for x in (q, k, v))
        expected = torch.tensor(loops(*lists, 0.7), dtype=torch.float64)
        bound = 1e-6 if dtype == torch.float32 else 1e-14
        assert (out[head] - expected).abs().max() <= bound * expected.abs().max()


SHAPES = [
    ((50, 16), (70, 16), (70, 24)),
    ((3, 50, 24), (1, 70, 24), (70, 8)),
    ((2, 1, 5, 16), (3, 300, 16), (1, 1, 300, 16)),
    ((2, 2, 2, 5, 8), (2, 300, 8), (2, 2, 1, 300, 8)),
    ((1, 1, 1), (1, 1, 1), (1, 1, 2)),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("budget", [64, 4096, 1 << 21])
def test_broadcasting_and_gradients(kernel, shapes, budget):
    q, k, v = random(*shapes, grad=True)
    with attention_kernel("auto", cache_bytes=budget):
        out = attend(q, k, v, kernel=kernel)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    *wide, expected = exact(q, k, v)
    assert out.shape == expected.shape
    for got, want in zip(
        (out, *grads), (expected, *torch.autograd.grad(expected.square().sum(), wide)), strict=True
    ):
        assert (got - want).abs().max() <= 2e-6 * max(1.0, want.abs().max())


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_query_gives_an_empty_result_with_gradients(kernel):
    q, k, v = random((3, 0, 8), (3, 5, 8), (3, 5, 6), grad=True)
    out = attend(q, k, v, kernel=kernel)
    assert out.shape == (3, 0, 6)
    out.sum().backward()
    assert torch.equal(k.grad, torch.zeros(3, 5, 8))
    empty = torch.zeros(0, 4, 5, 8)
    assert attend(empty, empty, empty, kernel=kernel).shape == (0, 4, 5, 8)


@pytest.mark.parametrize("kernel", KERNELS)
def test_strided_operands(kernel):
    packed = torch.randn(2, 20, 3, 4, 8)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    torch.testing.assert_close(attend(q, k, v, kernel=kernel), exact(q, k, v)[3].float())
    columns = torch.randn(2, 4, 8, 20).transpose(-1, -2)
    torch.testing.assert_close(
        attend(columns, k, v, kernel=kernel), exact(columns, k, v)[3].float()
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("std", [1, 3, 10])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_accurate_as_torch_sdpa(kernel, std, dtype):
    q, k, v, grad = random(*[(2, 3, 150, 32)] * 4, dtype=dtype)
    q = (q * std).detach()
    results = {}
    for name, function in {
        "ours": lambda *x: attend(*x, kernel=kernel),
        "sdpa": scaled_dot_product_attention,
    }.items():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*inputs)
        results[name] = (out, *torch.autograd.grad(out, inputs, grad))
    *wide, expected = exact(*(x.detach().requires_grad_() for x in (q, k, v)))
    truth = (expected, *torch.autograd.grad(expected, wide, grad.double()))
    for ours, sdpa, true in zip(results["ours"], results["sdpa"], truth, strict=True):
        assert ours.dtype == dtype
        assert relative(ours, true) <= 1.1 * relative(sdpa, true)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("std", [1, 10])
def test_float32_within_a_millionth(kernel, std):
    q, k, v = random(*[(2, 2, 300, 64)] * 3)
    expected = exact(q * std, k, v)[3]
    assert relative(attend(q * std, k, v, kernel=kernel), expected) <= 1e-6


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nan_is_passed_on_and_stays_in_its_row(dtype, grad):
    for m in (*range(1, 34), 64, 100):
        q, k, v = (torch.randn(1, 2, rows, 32, dtype=dtype) for rows in (5, m, m))
        q[0, 0, 2, 1] = torch.nan
        broken = attend(q.requires_grad_(grad), k, v).isnan()
        assert broken[0, 0, 2].all(), m
        assert broken.sum() == 32, m


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("score_dtype", [torch.float32, torch.float16])
def test_long_float16_queries_and_keys_give_no_nan(kernel, score_dtype):
    q, k, v = random(*[(1, 2, 40, 64)] * 3)
    q, k = (100 * torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    q, k, v = (x.half().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, scale=1.0, score_dtype=score_dtype, kernel=kernel)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (out, *grads))


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 60, 32), (1, 1, 300, 64)])
def test_the_form_for_cpus_with_bf16_instructions(monkeypatch, rounded, shape):
    # Here the products run in software; the arithmetic and its error are the same.
    monkeypatch.setattr(hardware, "BF16_PRODUCTS", True)
    q, k, v = random(*[shape] * 3, dtype=torch.bfloat16, grad=True)
    score = torch.bfloat16 if rounded else torch.float32
    before = torch.backends.mkldnn.matmul.fp32_precision
    *wide, expected = exact(q, k, v)
    grad = random(shape, dtype=torch.bfloat16, seed=1)[0]
    truth = (expected, *torch.autograd.grad(expected, wide, grad.double()))
    theirs = scaled_dot_product_attention(q, k, v)
    sdpa = (theirs, *torch.autograd.grad(theirs, (q, k, v), grad))
    for kernel in ("blocked", "plain", "auto"):
        with attention_kernel(kernel, cache_bytes=20_000):
            out = attend(q, k, v, score_dtype=score)
            ours = (out, *torch.autograd.grad(out, (q, k, v), grad))
        for a, b, c in zip(ours, sdpa, truth, strict=True):
            assert relative(a, c) <= (4 if rounded else 1.2) * relative(b, c)
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_the_same_bits_again():
    q, k, v = random(*[(2, 2, 70, 16)] * 3)
    for kernel in KERNELS:
        assert torch.equal(attend(q, k, v, kernel=kernel), attend(q, k, v, kernel=kernel))


ZERO = torch.zeros
REFUSED = [
    ((ZERO(3), ZERO(2, 3), ZERO(2, 3)), {}, r"q is shape \(3,\); give a tensor"),
    (([[1.0]], ZERO(2, 3), ZERO(2, 3)), {}, "q is a list; give a tensor"),
    ((ZERO(2, 3), ZERO(2, 4), ZERO(2, 3)), {}, "q has width 3 and k width 4"),
    ((ZERO(2, 3), ZERO(4, 3), ZERO(2, 3)), {}, "k has 4 tokens and v 2"),
    ((ZERO(2, 3), ZERO(0, 3), ZERO(0, 3)), {}, "k has 0 tokens and v 0; .* at least 1"),
    ((ZERO(2, 0), ZERO(2, 0), ZERO(2, 3)), {}, "give the same, at least 1"),
    ((ZERO(2, 2, 3), ZERO(3, 2, 3), ZERO(3, 2, 3)), {}, "do not broadcast"),
    ((ZERO(2, 3), ZERO(2, 3).double(), ZERO(2, 3)), {}, "dtypes torch.float32, torch.float64"),
    ((ZERO(2, 3).long(),) * 3, {}, "give one of float16, bfloat16, float32 and float64"),
    ((ZERO(2, 3).to(torch.float8_e4m3fn),) * 3, {}, "give one of float16, bfloat16"),
    ((ZERO(2, 3).to_sparse(), ZERO(2, 3), ZERO(2, 3)), {}, "q has layout torch.sparse_coo"),
    ((ZERO(2, 3), ZERO(2, 3, device="meta"), ZERO(2, 3)), {}, "k is on meta and q on cpu"),
    ((ZERO(2, 3),) * 3, {"kernel": "flush"}, "kernel='flush' is unknown; .*plain, sdpa, blocked"),
    ((ZERO(2, 3),) * 3, {"score_dtype": torch.int32}, "score_dtype=torch.int32"),
    ((ZERO(2, 3),) * 3, {"score_dtype": "float32"}, "score_dtype='float32'"),
    ((ZERO(2, 3),) * 3, {"score_dtype": torch.float8_e4m3fn}, "score_dtype=torch.float8_e4m3fn"),
    ((ZERO(2, 3),) * 3, {"score_dtype": [torch.float32]}, r"score_dtype=\[torch.float32\]"),
    ((ZERO(2, 3),) * 3, {"kernel": ["plain"]}, r"kernel=\['plain'\] is unknown"),
    *(
        ((ZERO(2, 3),) * 3, {"scale": scale}, "scale=.*: give a finite number, or None")
        for scale in ("x", torch.ones(3), True, math.nan, math.inf, 10**400)
    ),
]


@pytest.mark.parametrize(("operands", "options", "message"), REFUSED)
def test_refusals(operands, options, message):
    with pytest.raises(InputError, match=message):
        attend(*operands, **options)


@pytest.mark.parametrize("kernel", ["auto", *KERNELS])
def test_a_scale_is_any_real_number(kernel):
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    wanted = attend(q, k, v, scale=0.5, kernel=kernel)
    for scale in (Fraction(1, 2), np.float32(0.5)):
        assert torch.equal(attend(q, k, v, scale=scale, kernel=kernel), wanted)


def test_autocast_casts_no_integers():
    q = torch.zeros(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(q, q, q).dtype == torch.bfloat16
        with pytest.raises(InputError, match=r"dtypes torch\.bfloat16, torch\.int64"):
            attend(q, q.long(), q)
        with pytest.raises(InputError, match="k is a NoneType"):
            attend(q, None, q)
