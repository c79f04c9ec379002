"""Which grid is shown, which is not known, and heads merged into the batch."""

import pytest
import torch
from torch import nn

from regard.errors import InputError
from regard.interpret.record import record
from regard.interpret.relevance import class_relevance
from regard.interpret.tokens import Tokens, with_grid
from regard.layers.attend import attend
from regard.models.simple_vit import SimpleViT


def vit(**options):
    sizes = {"image_size": 32, "patch_size": 4, "num_classes": 3, "dim": 16, "depth": 1}
    sizes |= {"heads": 2, "mlp_dim": 16, "dim_head": 8}
    return SimpleViT(**sizes, **options)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.72, 0.75])  # 0.75 leaves 16 tokens, as 4×4
def test_tokens_that_patch_dropout_left_form_no_grid(share):
    model = vit(patch_dropout=share).train()
    with record(model) as seen:
        model(torch.randn(2, 3, 32, 32))
    tokens = seen["blocks.0.attention"].keys
    assert tokens.grid is None
    assert tokens.count < 64
    with record(model.eval()) as seen:
        model(torch.randn(2, 3, 32, 32))
    assert seen["blocks.0.attention"].keys == Tokens(64, (8, 8))


class Foreign(nn.Module):
    """A transformer that says nothing of its patches; `keep` of its tokens are left."""

    def __init__(self, patches, keep=None, extra=0, dim=8):
        super().__init__()
        self.patches, self.keep, self.extra = patches, keep, extra
        self.layer = nn.TransformerEncoderLayer(dim, 2, 8, batch_first=True)

    def forward(self, images):
        x = self.patches(images)
        x = x.flatten(2).mT if x.ndim == 4 else x
        x = x[:, torch.randperm(x.shape[1])[: self.keep]] if self.keep else x
        return self.layer(torch.cat([x.new_zeros(len(x), self.extra, x.shape[2]), x], 1)).mean(1)


class Unfolded(nn.Module):
    def forward(self, images):
        return nn.functional.unfold(images, 4, stride=4).mT[..., :8]


@pytest.mark.parametrize("patches", [Unfolded(), nn.Conv2d(3, 8, 4, 4)])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_a_foreign_model_that_leaves_tokens_out_in_training_has_no_known_grid(patches, extra):
    images = torch.randn(2, 3, 32, 32)

    def tokens(keep):
        model = Foreign(patches, keep, extra).train()
        with record(model) as seen:
            model(images)
        return seen["layer.self_attn"].keys

    assert tokens(None) == Tokens(64 + extra, (8, 8), extra)
    for keep in (16, 32, 48):
        assert tokens(keep) == Tokens(keep + extra)


def test_many_tokens_beside_a_grid_are_extra_only_where_the_model_says_so():
    plain, said = nn.Module(), nn.Module()
    said.num_prefix_tokens = 17
    assert with_grid(16 + 16, (4, 4), plain) == Tokens(32, (4, 4), 16)
    assert with_grid(16 + 17, (4, 4), plain) == Tokens(33)
    assert with_grid(16 + 17, (4, 4), said) == Tokens(33, (4, 4), 17)


def test_a_grid_given_outright_may_leave_as_many_extra_tokens_as_places():
    model = Foreign(nn.Conv2d(3, 8, 8, 8), extra=12).eval()
    with record(model, grid=(4, 4)) as seen:
        model(torch.randn(2, 3, 32, 32))
    assert seen["layer.self_attn"].keys == Tokens(28, (4, 4), 12)


def test_stages_that_halve_the_tokens_have_their_grids():
    class Stages(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
            self.second = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)

        def forward(self, images):
            x = nn.functional.unfold(images, 4, stride=4).mT[..., :8]
            x = self.first(x).unflatten(1, (4, 2, 4, 2)).mean((2, 4)).flatten(1, 2)
            return self.second(x).mean(1)

    model = Stages().eval()
    with record(model) as seen:
        model(torch.randn(2, 3, 32, 32))
    grids = [attention.keys for attention in seen.layers()]
    assert grids == [Tokens(64, (8, 8)), Tokens(16, (4, 4))]


def test_a_grid_that_no_attention_is_over_is_refused():
    model = vit()
    images = torch.randn(1, 3, 32, 32)
    message = r"grid=\(2, 3\) has 6 places, and attention is over 64 tokens; give a grid of as many"
    with pytest.raises(InputError, match=message), record(model, grid=(2, 3)):
        model(images)
    with pytest.raises(InputError, match=message):
        class_relevance(model, images, grid=(2, 3))
    with record(model, grid=(4, 16)) as seen:
        model(images)
    assert seen["blocks.0.attention"].keys == Tokens(64, (4, 16))


class Merged(nn.Module):
    """Attention over n patches, heads merged into the batch."""

    def __init__(self, how, heads=4, patch=4):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.heads = how, heads
        self.embed = nn.Conv2d(3, 16, patch, patch)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 3)

    def parts(self, images):
        qkv = self.qkv(self.embed(images).flatten(2).mT)
        heads = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in qkv.chunk(3, 2))
        return [t.flatten(0, 1) for t in heads]  # (b g) n d

    def forward(self, images):
        q, k, v = self.parts(images)
        if self.how == "sdpa":
            out = nn.functional.scaled_dot_product_attention(q, k, v)
        elif self.how == "masked":
            mask = torch.zeros(len(q), 1, k.shape[1])
            mask[0, 0, 1] = -torch.inf  # of the first image's first head alone
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        elif self.how == "attend":
            out = attend(q, k, v)
        else:
            out = torch.bmm((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1), v)
        out = out.unflatten(0, (len(images), -1)).transpose(1, 2).flatten(2)
        return self.head(out.mean(1))


@pytest.mark.parametrize("how", ["sdpa", "masked", "attend", "bmm"])
def test_heads_merged_into_the_batch_are_taken_apart(how):
    model, images = Merged(how), torch.randn(2, 3, 12, 20)
    with record(model, keep=("weights", "entropy", "received")) as seen:
        out = model(images)
    assert torch.equal(out, model(images))
    found = seen["Merged"]
    assert found.keys == Tokens(15, (3, 5))
    q, k, _ = (t.detach().double() for t in model.parts(images))
    logits = (q @ k.mT / 2).unflatten(0, (2, 4))
    if how == "masked":
        logits[0, 0, :, 1] = -torch.inf
    weights = logits.softmax(-1)
    torch.testing.assert_close(found.weights.double(), weights, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.received.double(), weights.mean(2), atol=1e-6, rtol=0)
    entropy = torch.special.entr(weights).sum(-1)
    torch.testing.assert_close(found.entropy.double(), entropy, atol=1e-5, rtol=0)
    with record(model, images=1) as one:
        model(images)
    torch.testing.assert_close(one["Merged"].weights, found.weights[:1])
    if how in ("sdpa", "attend"):
        written = Merged("bmm")
        torch.testing.assert_close(
            class_relevance(model, images, 1).maps, class_relevance(written, images, 1).maps
        )


@pytest.mark.parametrize("core", [nn.functional.scaled_dot_product_attention, attend])
@pytest.mark.parametrize("width", [8, 16])  # a window has 16 tokens
def test_windows_merged_into_the_batch_are_no_heads(core, width):
    class Windows(nn.Module):
        def forward(self, x):  # b (w n) c -> (b w) n c
            windows = x.unflatten(1, (4, -1)).flatten(0, 1)
            return core(windows, windows, windows).unflatten(0, (len(x), -1)).flatten(1, 2)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Conv2d(3, width, 4, 4)
            self.project = nn.Linear(width, width)
            self.windows = Windows()

        def forward(self, images):
            return self.windows(self.project(self.embed(images).flatten(2).mT))

    model = Model()
    with pytest.raises(InputError, match="windows attends within windows"), record(model):
        model(torch.randn(2, 3, 32, 32))


def test_views_merged_into_the_batch_are_no_heads():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Conv2d(3, 8, 4, 4)
            self.attention = nn.Linear(8, 24)

        def forward(self, images):
            x = self.embed(images).flatten(2).mT
            q, k, v = self.attention(torch.cat([x, x.flip(1)])).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    model = Views()
    with pytest.raises(InputError, match="Views attends within windows"), record(model):
        model(torch.randn(2, 3, 32, 32))
