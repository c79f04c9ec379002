"""record gives the weights that each attention used, and changes nothing."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from regard.errors import InputError
from regard.interpret import attention_call as calls
from regard.interpret.health import attention_health
from regard.interpret.record import record
from regard.interpret.relevance import class_relevance
from regard.layers.attend import attend
from regard.layers.pixel_attention import PixelAttention
from regard.models.registry import create
from regard.models.simple_vit import SimpleViT
from tests.reference.handmade import Handmade, known_weights, left_neighbour, own_row, top_right


def softmax_loop(q, k, scale):
    """Weights (n, m) in float64, one row at a time."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    out = np.empty((len(q), len(k)))
    for i in range(len(q)):
        scores = np.array([scale * float(np.dot(q[i], k[j])) for j in range(len(k))])
        row = np.exp(scores - scores.max())
        out[i] = row / row.sum()
    return out


class Projected(nn.Module):
    """Self-attention (b, n, c) whose core is written in one of the ways people write it."""

    def __init__(self, how, dim=8, heads=2):
        super().__init__()
        torch.manual_seed(3)
        self.how, self.heads = how, heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.drop = nn.Dropout(0.5)
        self.soft = nn.Softmax(dim=-1)

    def parts(self, x):
        b, n, _ = x.shape
        return self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x):
        q, k, v = self.parts(x)
        scale = 0.7
        if self.how == "attend":
            out = attend(q, k, v, scale=scale)
        elif self.how == "sdpa":
            out = nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        elif self.how == "softmax module":
            out = self.drop(self.soft(q @ k.mT * scale)) @ v
        elif self.how == "einsum":
            weights = torch.einsum("bhid,bhjd->bhij", q * scale, k).softmax(-1)
            out = torch.einsum("bhij,bhjd->bhid", weights, v)
        elif self.how == "channels first":
            weights = torch.softmax(q @ k.mT * scale, dim=-1).type(v.dtype)
            out = torch.einsum("bhts,bhcs->bhct", weights, v.mT).mT
        elif self.how == "merged heads":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            scores = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.mT, alpha=scale)
            out = torch.bmm(scores.softmax(dim=-1), v).unflatten(0, (len(x), -1))
        else:  # transposed: values (…, c, m) times weightsᵀ
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            weights = nn.functional.softmax(torch.bmm(q, k.mT) * scale, dim=2).permute(0, 2, 1)
            out = torch.bmm(v.mT, weights).mT.unflatten(0, (len(x), -1))
        return out.transpose(1, 2).flatten(2)


WAYS = (
    "attend",
    "sdpa",
    "softmax module",
    "einsum",
    "channels first",
    "merged heads",
    "transposed",
)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_weights_are_those_used_however_attention_is_written(how, training):
    model = nn.Sequential(Projected(how)).train(training)
    x = torch.randn(3, 5, 8)
    with torch.no_grad(), record(model) as seen:
        model(x)
    assert list(seen) == ["0"]
    assert seen["0"].heads == 2
    q, k, _ = model[0].parts(x)
    for image in range(3):
        for head in range(2):
            expected = softmax_loop(q[image, head].detach(), k[image, head].detach(), 0.7)
            np.testing.assert_allclose(seen["0"].weights[image, head], expected, atol=1e-6)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_outputs_and_gradients_keep_their_bits(how, grad):
    model = Projected(how)
    x = torch.randn(2, 5, 8, requires_grad=grad)

    def run():
        torch.manual_seed(0)
        out = model(x)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])] if grad \
            else [out]  # fmt: skip

    plain = run()
    with record(model, keep=("weights", "received", "entropy", "largest_logit")):
        recorded = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


def multihead(**options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, **options)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention_gives_its_own_weights(batch_first, grad):
    module = multihead(batch_first=batch_first).eval()
    x = torch.randn(3, 5, 8) if batch_first else torch.randn(5, 3, 8)
    mask = torch.rand(5, 5) > 0.8
    mask.fill_diagonal_(False)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 4] = True
    masks = {"attn_mask": mask, "key_padding_mask": padding}
    with torch.set_grad_enabled(grad):
        plain = module(x, x, x, need_weights=False, **masks)[0]
        with record(module) as seen:
            out = module(x, x, x, need_weights=False, **masks)[0]
    assert torch.equal(plain, out)
    with torch.enable_grad():  # the slow path, which returns weights by head
        own = module(x, x, x, average_attn_weights=False, **masks)[1]
    torch.testing.assert_close(seen["MultiheadAttention"].weights, own.detach())


def test_the_fast_path_of_an_encoder_is_kept_and_read():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 6, 8)
    with torch.no_grad():
        plain = model(x)
        with record(model) as fast:
            assert torch.equal(model(x), plain)
    with record(model) as slow:
        model(x)  # gradients are needed, so each layer calls its own attention
    assert list(fast) == list(slow) == ["layers.0.self_attn", "layers.1.self_attn"]
    for name in fast:
        torch.testing.assert_close(fast[name].weights, slow[name].weights, atol=1e-6, rtol=1e-5)


class Classifier(nn.Module):
    """Patches, one attention with its residual, mean, logits."""

    def __init__(self, attention):
        super().__init__()
        torch.manual_seed(1)
        self.patch_size = 2
        self.embed = nn.Conv2d(3, 8, 2, 2)
        self.attention = attention
        self.head = nn.Linear(8, 3)

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose(1, 2)
        if isinstance(self.attention, nn.MultiheadAttention):
            return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))
        return self.head((x + self.attention(x)).mean(1))


class Written(nn.Module):
    """What nn.MultiheadAttention computes, written out."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        packed = nn.functional.linear(x, self.module.in_proj_weight, self.module.in_proj_bias)
        q, k, v = (t.unflatten(2, (2, 4)).transpose(1, 2) for t in packed.chunk(3, dim=2))
        out = (q @ k.mT / 2).softmax(-1) @ v
        return self.module.out_proj(out.transpose(1, 2).flatten(2))


def test_relevance_through_multihead_attention_is_that_of_the_written_out_form():
    module = multihead(batch_first=True).eval()
    images = torch.randn(2, 3, 4, 6)
    found = class_relevance(Classifier(module), images, 1)
    written = class_relevance(Classifier(Written(module)), images, 1)
    assert float(written.maps.max()) > 0
    torch.testing.assert_close(found.logits, written.logits)
    torch.testing.assert_close(found.maps, written.maps)


def test_nothing_stays_on_the_model():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), Projected("sdpa"))
    before = {n: sorted(m.__dict__) for n, m in model.named_modules()}
    with pytest.raises(AssertionError, match="embedding dimension of 8"), record(model):
        model(torch.randn(1, 3, 7))
    assert {n: sorted(m.__dict__) for n, m in model.named_modules()} == before
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    copy.deepcopy(model)(torch.randn(1, 3, 8))


class Masked(nn.Module):
    """scaled_dot_product_attention with whatever options."""

    def forward(self, q, **options):
        return nn.functional.scaled_dot_product_attention(q, q, q, **options)


@pytest.mark.parametrize("limit", [1, 40, 128, 1 << 20])  # a row of a head, of all, an image, all
def test_masks_and_causal_calls(limit, monkeypatch):
    monkeypatch.setattr(calls, "BLOCK_BYTES", limit)
    monkeypatch.setattr(calls, "LEAST_ROWS", 1)
    torch.manual_seed(0)
    q = torch.randn(2, 2, 4, 8)
    allowed = (torch.rand(2, 1, 4, 4) > 0.4) | torch.eye(4, dtype=torch.bool)
    additive = torch.randn(4, 4)
    lower = torch.ones(4, 4, dtype=torch.bool).tril()
    logits = q.double() @ q.double().mT / math.sqrt(8)
    cases = (
        ({"attn_mask": allowed}, logits.masked_fill(~allowed, -math.inf)),
        ({"attn_mask": additive}, logits + additive),
        ({"is_causal": True}, logits.masked_fill(~lower, -math.inf)),
    )
    for options, masked in cases:
        model = Masked()
        with record(model, keep=("weights", "entropy", "largest_logit")) as seen:
            out = model(q, **options)
        found = seen["Masked"]
        torch.testing.assert_close(found.weights.double(), masked.softmax(-1), atol=1e-6, rtol=0)
        torch.testing.assert_close(found.weights @ q, out)
        entropy = torch.special.entr(masked.softmax(-1)).sum(-1)
        torch.testing.assert_close(found.entropy.double(), entropy, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.largest_logit.double(), masked.amax((-1, -2)))
        with record(model, queries=[3, 1]) as chosen:
            model(q, **options)
        rows = chosen["Masked"].weights.double()
        torch.testing.assert_close(rows, masked.softmax(-1)[:, :, [3, 1]], atol=1e-6, rtol=0)


def test_a_model_that_was_not_called_is_no_empty_result():
    model = Projected("sdpa")
    with (
        pytest.raises(InputError, match="Projected was not called inside the with block"),
        record(model),
    ):
        pass


def test_a_model_without_attention_is_no_empty_result():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    with pytest.raises(InputError, match="it ran no attention"), record(model):
        model(torch.randn(2, 4))


def test_attention_that_cannot_be_read_is_named():
    class LinearAttention(nn.Module):
        def forward(self, x):
            return x.softmax(-1) * x.mean(1, keepdim=True)

    model = nn.Sequential(LinearAttention())
    with pytest.raises(InputError, match=r"in Sequential: 0 computes no scaled_dot"), record(model):
        model(torch.randn(2, 5, 4))
    both = nn.Sequential(LinearAttention(), Projected("sdpa"))
    with record(both) as seen:
        both(torch.randn(2, 5, 8))
    assert (list(seen), seen.unread) == (["1"], ("0",))


def test_compiled_and_windowed_models_are_refused_by_name():
    model = nn.Sequential(Projected("sdpa"))
    with (
        pytest.raises(InputError, match="OptimizedModule is compiled"),
        record(torch.compile(model)),
    ):
        pass
    model[0].compile()
    with pytest.raises(InputError, match=r"0 \(Projected\) is compiled"), record(model):
        pass

    class WindowAttention(nn.Module):
        pass

    swin = nn.Sequential(WindowAttention())
    with pytest.raises(InputError, match=r"0 \(WindowAttention\) attends within"), record(swin):
        pass


def test_unknown_windows_are_told_by_the_batch():
    class Windows(nn.Module):
        def forward(self, images):  # b 4 4 4 -> (b 4 windows) 1 4 4
            x = images.reshape(len(images) * 4, 1, 4, 4)
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model = Windows()
    with pytest.raises(InputError, match="Windows attends within windows"), record(model):
        model(torch.randn(2, 4, 4, 4))


def test_layers_by_name_pattern_and_position():
    model = nn.Sequential(*(Projected("sdpa") for _ in range(4)))
    x = torch.randn(1, 5, 8)

    def names(layers):
        with record(model, layers=layers) as seen:
            model(x)
        return list(seen)

    assert names(["1", "3"]) == ["1", "3"]
    assert names("[12]") == ["1", "2"]
    assert names(-1) == ["3"]
    assert names([0, -2]) == ["0", "2"]
    with pytest.raises(InputError, match=r"Sequential has no layer '7' \(nearest"):
        names("7")
    with pytest.raises(InputError, match="4 attentions ran: give -4 to 3"):
        names(4)
    with pytest.raises(InputError, match=r"layer '0\.qkv' computed no attention that can be read"):
        names("0.qkv")
    with pytest.raises(InputError, match="layers is empty"):
        names([])


def test_a_module_that_runs_twice_is_recorded_twice():
    model = Projected("sdpa")
    first, second = torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    with record(model) as seen:
        model(first)
        model(second)
    with record(model) as alone:
        model(second)
    assert list(seen) == ["Projected", "Projected#2"]
    assert torch.equal(seen["Projected#2"].weights, alone["Projected"].weights)


def test_a_checkpointed_block_is_recorded_once():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Projected("attend")

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    model = Checkpointed()
    with record(model) as seen:
        model(torch.randn(1, 5, 8, requires_grad=True)).sum().backward()
    assert list(seen) == ["block"]


def test_views_that_a_model_adds_to_its_batch_are_recorded_behind_the_pictures():
    torch.manual_seed(0)
    model = create("pixel-resnet-nano", num_classes=3, test_flips=True).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    images = torch.randn(2, 3, 32, 32)
    with record(model) as seen:
        model(images)
    with record(model) as alone:
        model.features(images)
    for name, attention in alone.items():
        assert seen[name].keys == attention.keys
        assert len(seen[name].weights) == 4
        torch.testing.assert_close(seen[name].weights[:2], attention.weights)


def test_relevance_is_of_the_pictures_where_a_model_adds_views():
    class Mirrored(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, images):
            both = self.inner(torch.cat([images, images.flip(3)]))
            return both.unflatten(0, (2, -1)).mean(0)

    model = Classifier(multihead(batch_first=True).eval())
    images = torch.randn(2, 3, 4, 6)
    alone, mirrored = (class_relevance(m, images, 1) for m in (model, Mirrored(model)))
    assert float(alone.maps.max()) > 0
    torch.testing.assert_close(mirrored.maps, alone.maps / 2)  # half of the logit is theirs


@pytest.mark.parametrize("rule", [left_neighbour, own_row, top_right])
def test_hand_made_attention_on_a_rectangle(rule):
    model = Handmade(rule)
    with record(model) as seen:
        model(torch.randn(2, 3, 12, 20))
    assert [a.queries.grid for a in seen.layers()] == [(3, 5), (3, 5)]
    for attention in seen.layers():
        known = known_weights(rule, 3, 5)
        torch.testing.assert_close(attention.weights[1, 0], known, atol=1e-6, rtol=0)


def test_chosen_queries_are_rows_of_all_weights():
    model = Handmade(left_neighbour)
    x = torch.randn(2, 3, 12, 20)
    with record(model, queries=[(1, 2), 0], keep=("weights", "mean", "received")) as some:
        model(x)
    with record(model, keep=("weights", "mean", "received")) as every:
        model(x)
    one, all_ = some["blocks.0"], every["blocks.0"]
    assert one.rows == (7, 0)
    torch.testing.assert_close(one.weights, all_.weights[:, :, [7, 0]], rtol=1e-5, atol=0)
    torch.testing.assert_close(one.mean, all_.mean[:, [7, 0]])
    assert torch.equal(one.received, all_.received)
    assert one.weights[0, 0, 0].argmax() == 6
    outside = r"query \(3, 0\) is outside the 3×5 grid of blocks.0"
    with pytest.raises(InputError, match=outside), record(model, queries=[(3, 0)]):
        model(x)
    none = "query 15 is none of the 15 tokens"
    with pytest.raises(InputError, match=none), record(model, queries=[15]):
        model(x)


@pytest.mark.parametrize("limit", [1, 200, 2000, 1 << 20])
def test_reductions_in_blocks_of_any_size_equal_those_of_all_weights(limit, monkeypatch):
    monkeypatch.setattr(calls, "BLOCK_BYTES", limit)
    monkeypatch.setattr(calls, "LEAST_ROWS", 1)
    kinds = ("weights", "mean", "received", "entropy", "largest_logit")
    for how in ("sdpa", "einsum"):
        model, x = Projected(how), 3 * torch.randn(3, 7, 8)
        with record(model, keep=kinds) as seen:
            model(x)
        found = seen["Projected"]
        q, k, _ = (t.detach() for t in model.parts(x))
        logits = [[0.7 * (q[b, g] @ k[b, g].T).double() for g in range(2)] for b in range(3)]
        for b in range(3):
            mean = np.zeros((7, 7))
            for g in range(2):
                weights = softmax_loop(q[b, g], k[b, g], 0.7)
                mean += weights / 2
                np.testing.assert_allclose(found.weights[b, g], weights, atol=2e-6)
                np.testing.assert_allclose(found.received[b, g], weights.mean(0), atol=2e-6)
                by_hand = [-sum(p * math.log(p) for p in row if p > 0) for row in weights]
                np.testing.assert_allclose(found.entropy[b, g], by_hand, atol=2e-5)
                assert found.largest_logit[b, g] == pytest.approx(
                    float(logits[b][g].max()), abs=1e-5
                )
            np.testing.assert_allclose(found.mean[b], mean, atol=2e-6)


def test_only_the_first_images():
    model, x = Projected("sdpa"), torch.randn(4, 5, 8)
    with record(model, images=2) as some:
        model(x)
    with record(model) as every:
        model(x)
    assert torch.equal(some["Projected"].weights, every["Projected"].weights[:2])


def test_half_precision_weights_are_float32_softmaxes_of_the_half_operands():
    model = Projected("sdpa").to(torch.bfloat16)
    x = torch.randn(2, 5, 8, dtype=torch.bfloat16)
    with record(model) as seen:
        model(x)
    q, k, _ = model.parts(x)
    weights = seen["Projected"].weights
    assert weights.dtype == torch.float32
    expected = softmax_loop(q[0, 0].detach().float(), k[0, 0].detach().float(), 0.7)
    np.testing.assert_allclose(weights[0, 0], expected, atol=1e-6)


@pytest.mark.parametrize("how", ["attend", "sdpa", "einsum"])
def test_under_autocast_the_cast_operands_are_recorded(how):
    model = Projected(how)
    x = 3 * torch.randn(2, 5, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        with record(model) as seen:
            assert torch.equal(model(x), plain)
        q, k, _ = model.parts(x)
    assert q.dtype == torch.bfloat16
    expected = softmax_loop(q[1, 0].float(), k[1, 0].float(), 0.7)
    # A softmax that the model makes itself is of scores it has rounded.
    tolerance = 0.02 if how == "einsum" else 1e-6
    np.testing.assert_allclose(seen["Projected"].weights[1, 0], expected, atol=tolerance)


def test_unknown_kinds_and_kinds_not_kept_are_refused():
    model = Projected("sdpa")
    unknown = r"keep='entropie' is unknown \(nearest: entropy\)"
    with pytest.raises(InputError, match=unknown), record(model, keep="entropie"):
        pass
    with record(model, keep="entropy") as seen:
        model(torch.randn(1, 5, 8))
    with pytest.raises(InputError, match=r"without 'weights' \(kept: entropy\)"):
        seen["Projected"].need("weights")
    with pytest.raises(InputError, match="no attention 'Project' was recorded"):
        seen["Project"]


def test_our_own_modules_are_read():
    torch.manual_seed(0)
    vit = SimpleViT(
        image_size=(8, 12), patch_size=4, num_classes=3, dim=8, depth=2, heads=2, mlp_dim=8,
        dim_head=4,
    )  # fmt: skip
    images = torch.randn(2, 3, 8, 12)
    with record(vit) as seen:
        vit(images)
    assert list(seen) == ["blocks.0.attention", "blocks.1.attention"]
    attention = vit.blocks[0].attention
    tokens = vit.embed(images)
    from regard.layers.patch_embed import sincos_2d

    q, k, _ = attention.queries_keys_values(tokens + sincos_2d(2, 3, 8))
    expected = softmax_loop(q[1, 1].detach(), k[1, 1].detach(), 1.0)
    np.testing.assert_allclose(seen["blocks.0.attention"].weights[1, 1], expected, atol=1e-6)
    assert seen["blocks.0.attention"].queries.grid == (2, 3)

    block = PixelAttention(8, num_heads=2, num_groups=4)
    with record(block) as seen:
        block(torch.randn(2, 8, 3, 5))
    assert seen["PixelAttention"].keys.grid == (3, 5)
    assert seen["PixelAttention"].heads == 2


def test_health_by_layer():
    torch.manual_seed(0)
    vit = SimpleViT(
        image_size=8, patch_size=2, num_classes=3, dim=8, depth=2, heads=2, mlp_dim=8, dim_head=4
    )
    with torch.no_grad():
        vit.blocks[1].attention.q_norm.gamma.mul_(3)
    images = torch.randn(4, 3, 8, 8)
    with attention_health(vit, images=2) as health:
        vit(images).sum().backward()
    with record(vit, keep=("weights", "largest_logit")) as seen:
        vit(images[:2])
    assert list(health) == ["blocks.0.attention", "blocks.1.attention"]
    for name, numbers in health.items():
        weights = seen[name].weights.double()
        assert numbers["entropy"] == pytest.approx(
            float(-(weights * weights.log()).sum(-1).mean()), abs=1e-5
        )
        assert numbers["largest_logit"] == float(seen[name].largest_logit.max())
    assert health["blocks.0.attention"]["q_gain"] == pytest.approx(1)
    assert health["blocks.1.attention"]["q_gain"] == pytest.approx(3)
    assert health["blocks.1.attention"]["k_gain"] == pytest.approx(1)


def test_a_notebook_shows_a_picture():
    model = Handmade(left_neighbour)
    with record(model) as seen:
        model(torch.randn(1, 3, 12, 20))
    assert seen._repr_png_().startswith(b"\x89PNG")
    assert "data:image/png;base64," in seen._repr_html_()
    with record(model, keep="largest_logit") as seen:
        model(torch.randn(1, 3, 12, 20))
    assert seen._repr_png_() is None
    assert "largest_logit (1, 2)" in seen._repr_html_()


def test_odd_requests_are_refused():
    model = create("simple-vit-nano/4", num_classes=2, image_size=8)
    for odd in (0, -1, 1.5, "x"):
        with (
            pytest.raises(InputError, match=r"images=.*give a positive integer"),
            record(model, images=odd),
        ):
            model(torch.zeros(2, 3, 8, 8))
    odd_options = [{"queries": odd} for odd in ([], "x", [1.5], 5, [(0, 0, 0)], [[0, 1]])]
    odd_options += [{"keep": None}, {"keep": 3}, {"layers": 1.5}]
    for options in odd_options:
        name = next(iter(options))
        with pytest.raises(InputError, match=name), record(model, **options):
            model(torch.zeros(2, 3, 8, 8))
    with pytest.raises(InputError, match="a str came; give the model"), record("model"):
        pass
    with pytest.raises(InputError, match="the model is None; give a name"):
        create(None, num_classes=2)
