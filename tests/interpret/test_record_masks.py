"""Queries that a mask bars from every key have what the module gives them."""

import math

import pytest
import torch
from torch import nn

from regard.interpret import attention_call as calls
from regard.interpret.record import record
from regard.interpret.relevance import class_relevance

KINDS = ("weights", "mean", "received", "entropy", "largest_logit")


class Masked(nn.Module):
    """scaled_dot_product_attention of q with itself, or the same written out."""

    def __init__(self, written=False):
        super().__init__()
        self.written = written

    def forward(self, q, mask):
        if self.written:
            return (q @ q.mT / math.sqrt(q.shape[-1]) + mask).softmax(-1) @ q
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def reference(q, mask, without):
    """Weights in float64; `without` for rows whose places are all -∞."""
    logits = q.double() @ q.double().mT / math.sqrt(q.shape[-1]) + mask.double()
    weights = logits.softmax(-1)
    return weights.masked_fill((logits == -math.inf).all(-1, keepdim=True), without), logits


@pytest.mark.parametrize("limit", [1, 40, 128, 1 << 20])
@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_rows_without_keys(written, boolean, limit, monkeypatch):
    monkeypatch.setattr(calls, "BLOCK_BYTES", limit)
    monkeypatch.setattr(calls, "LEAST_ROWS", 1)
    torch.manual_seed(0)
    q = torch.randn(2, 2, 4, 8)
    allowed = (torch.rand(2, 1, 4, 4) > 0.4) | torch.eye(4, dtype=torch.bool)
    allowed[0, :, 1] = False
    allowed[1, :, 3] = False
    additive = torch.zeros(2, 1, 4, 4).masked_fill(~allowed, -math.inf)
    mask = allowed if boolean and not written else additive
    weights, logits = reference(q, additive, math.nan if written else 0.0)
    model = Masked(written)
    with record(model, keep=KINDS) as seen:
        out = model(q, mask)
    found = seen["Masked"]
    same = {"atol": 1e-5, "rtol": 0, "equal_nan": True}
    torch.testing.assert_close(found.weights @ q, out, **same)  # the module's own result
    torch.testing.assert_close(found.weights.double(), weights, **same)
    torch.testing.assert_close(found.mean.double(), weights.mean(1), **same)
    torch.testing.assert_close(found.received.double(), weights.mean(2), **same)
    entropy = torch.special.entr(weights).sum(-1)
    torch.testing.assert_close(found.entropy.double(), entropy, **same)
    torch.testing.assert_close(found.largest_logit.double(), logits.amax((-1, -2)), **same)
    with record(model, queries=[3, 1], keep=("weights", "mean", "entropy")) as chosen:
        model(q, mask)
    rows = chosen["Masked"]
    torch.testing.assert_close(rows.weights.double(), weights[:, :, [3, 1]], **same)
    torch.testing.assert_close(rows.mean.double(), weights.mean(1)[:, [3, 1]], **same)
    torch.testing.assert_close(rows.entropy.double(), entropy, **same)


@pytest.mark.parametrize("kind", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_multihead_attention_has_nan_where_its_own_kernel_gives_nan(grad, need_weights, kind):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 4, 8)
    mask = torch.zeros((4, 4) if kind == "attn_mask" else (2, 4), dtype=torch.bool)
    mask[1] = True
    with torch.set_grad_enabled(grad), record(module, keep=KINDS) as seen:
        out = module(x, x, x, need_weights=need_weights, **{kind: mask})[0]
    found = seen["MultiheadAttention"]
    barred = torch.zeros(2, 4, dtype=torch.bool)
    barred[(slice(None), 1) if kind == "attn_mask" else 1] = True
    assert torch.equal(out.isnan().any(-1), barred & out.isnan().any())
    expected = math.nan if out.isnan().any() else 0.0
    own = module(x, x, x, average_attn_weights=False, **{kind: mask})[1].detach()  # NaN there
    by_head = barred[:, None].expand(2, 2, 4)
    weights = torch.where(by_head[..., None], torch.tensor(expected), own)
    torch.testing.assert_close(found.weights, weights, equal_nan=True)
    entropy = torch.special.entr(weights).sum(-1)
    torch.testing.assert_close(found.entropy, entropy, atol=1e-5, rtol=0, equal_nan=True)


def test_the_fast_path_of_an_encoder_layer_gives_nan_and_so_does_its_recording():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True
    with torch.no_grad(), record(layer) as seen:
        out = layer(torch.randn(2, 4, 8), src_mask=mask)
    assert out[:, 1].isnan().all()
    weights = seen["TransformerEncoderLayer.self_attn"].weights
    assert weights[:, :, 1].isnan().all()
    assert torch.equal(weights[:, :, [0, 2, 3]].sum(-1).round(), torch.ones(2, 2, 3))


def test_a_row_of_finite_masks_is_no_row_without_keys():
    q = torch.randn(1, 1, 3, 4)
    mask = torch.zeros(3, 3)
    mask[1] = torch.finfo(torch.float32).min
    model = Masked()
    with record(model, keep=("weights", "entropy")) as seen:
        out = model(q, mask)
    torch.testing.assert_close(seen["Masked"].weights @ q, out)
    assert seen["Masked"].entropy[0, 0, 1] == pytest.approx(math.log(3))


def leading_masks():
    """Queries of 3 and 5 dimensions, with masks that broadcast to them."""
    torch.manual_seed(0)
    q3, q5 = torch.randn(4, 5, 8), torch.randn(2, 3, 2, 5, 8)
    shapes3 = [(4, 5, 5), (1, 5, 5), (5, 5), (4, 1, 5), (1, 1, 5, 5)]
    shapes5 = [(2, 3, 2, 5, 5), (2, 1, 1, 5, 5), (1, 3, 2, 1, 5), (2, 5, 5), (3, 2, 5, 5), (5, 5)]
    shapes5.append((1, 1, 2, 5, 5))
    return [(q3, s) for s in shapes3] + [(q5, s) for s in shapes5]


@pytest.mark.parametrize(("q", "shape"), leading_masks(), ids=lambda x: str(tuple(x))[:20])
@pytest.mark.parametrize("boolean", [False, True])
def test_masks_of_queries_with_other_than_four_dimensions(boolean, q, shape):
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True
    additive = torch.zeros(shape).masked_fill(~mask, -math.inf)
    model = Masked()
    with record(model, keep=("weights", "entropy")) as seen:
        out = model(q, mask if boolean else additive)
    assert torch.equal(out, model(q, mask if boolean else additive))
    if len(shape) > q.ndim:
        additive = additive[0]
    weights, _ = reference(q, additive, 0.0)
    expected = weights.reshape(-1, 1 if q.ndim == 3 else 2, 5, 5)
    torch.testing.assert_close(seen["Masked"].weights.double(), expected, atol=1e-6, rtol=0)
    entropy = torch.special.entr(expected).sum(-1)
    torch.testing.assert_close(seen["Masked"].entropy.double(), entropy, atol=1e-5, rtol=0)


def test_relevance_is_finite_where_a_query_has_no_key():
    class Barred(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Conv2d(3, 8, 2, 2)
            self.head = nn.Linear(8, 3)

        def forward(self, images):
            x = self.embed(images).flatten(2).mT[:, None]
            mask = torch.ones(4, 4, dtype=torch.bool)
            mask[2] = False
            out = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            return self.head(out[:, 0].mean(1))

    maps = class_relevance(Barred(), torch.randn(2, 3, 4, 4), 1).maps
    assert maps.isfinite().all()
    assert float(maps.max()) > 0
