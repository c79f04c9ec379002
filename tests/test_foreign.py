"""What is known of other libraries' attention: their own results from the description alone."""

import math
import re

import pytest
import torch
from torch import nn

from regard.foreign import Left, Spec, merge, project, recognise
from tests.reference import peers

C, HEADS = 64, 4


def diffusers_attention(**options):
    module = pytest.importorskip("diffusers.models.attention_processor")
    return module.Attention(C, heads=HEADS, dim_head=C // HEADS, bias=True, **options)


def vit_pytorch(name):
    return pytest.importorskip(f"vit_pytorch.{name}").Attention(C, heads=HEADS, dim_head=8)


def timm_attention(**options):
    return pytest.importorskip("timm.layers").Attention(C, HEADS, **options)


def monai_blocks():
    return pytest.importorskip("monai.networks.blocks")


MAP = (2, C, 3, 5)
TOKENS = (2, 7, C)
NORMED = {"norm_num_groups": 32, "residual_connection": True}
CASES = {
    "diffusers map": (lambda: diffusers_attention(**NORMED), MAP),
    "diffusers tokens": (lambda: diffusers_attention(), TOKENS),
    "diffusers map without norm": (lambda: diffusers_attention(), MAP),
    "diffusers normed tokens": (lambda: diffusers_attention(**NORMED), TOKENS),
    "diffusers rescaled": (lambda: diffusers_attention(**NORMED, rescale_output_factor=1.5), MAP),
    "diffusers unscaled": (lambda: diffusers_attention(**NORMED, scale_qk=False), MAP),
    "diffusers upcast": (
        lambda: diffusers_attention(**NORMED, upcast_attention=True, upcast_softmax=True),
        MAP,
    ),
    "diffusers qk norm": (lambda: diffusers_attention(qk_norm="layer_norm"), TOKENS),
    "timm": (timm_attention, TOKENS),
    "timm qk norm": (
        lambda: timm_attention(
            qk_norm=True, scale_norm=True, qkv_bias=True, norm_layer=nn.LayerNorm
        ),
        TOKENS,
    ),
    "monai map": (lambda: monai_blocks().SpatialAttentionBlock(2, C, C // HEADS), MAP),
    "monai combined": (
        lambda: monai_blocks().SpatialAttentionBlock(2, C, 16, use_combined_linear=True),
        MAP,
    ),
    "monai volume": (lambda: monai_blocks().SpatialAttentionBlock(3, C, 16), (2, C, 2, 3, 2)),
    "monai tokens": (lambda: monai_blocks().SABlock(C, HEADS), TOKENS),
    "monai without output": (lambda: monai_blocks().SABlock(C, HEADS, include_fc=False), TOKENS),
    "latent-diffusion": (lambda: peers.AttnBlock(C), MAP),
    "guided-diffusion": (lambda: peers.AttentionBlock(C, HEADS, True), MAP),
    "guided-diffusion legacy": (lambda: peers.AttentionBlock(C, HEADS, False), MAP),
    "guided-diffusion volume": (lambda: peers.AttentionBlock(C, HEADS, True), (2, C, 2, 3, 2)),
    "vit-pytorch vit": (lambda: vit_pytorch("vit"), TOKENS),
    "vit-pytorch simple_vit": (lambda: vit_pytorch("simple_vit"), TOKENS),
    "vit-pytorch qk norm": (lambda: vit_pytorch("simple_vit_with_qk_norm"), TOKENS),
}


@pytest.mark.parametrize("case", CASES)
def test_the_description_alone_gives_the_modules_result(case):
    make, shape = CASES[case]
    torch.manual_seed(0)
    module = peers.randomised(make()).eval()
    x = torch.randn(shape, dtype=torch.float64)
    spec = recognise(module)
    assert isinstance(spec, Spec)
    assert spec.library.split()[0].lower() == case.split()[0]
    q, k, v = project(module, spec, x)
    weights = torch.softmax(spec.scale * q @ k.transpose(-1, -2), dim=-1)
    expected = module(x)
    assert q.shape[:3] == (2, spec.num_heads, math.prod(x.shape[2:]) if x.ndim > 3 else 7)
    atol = 2e-5 if "guided" in case else 1e-9  # guided-diffusion takes its softmax in float32
    torch.testing.assert_close(merge(module, spec, weights @ v, x), expected, rtol=0, atol=atol)


def with_processor():
    from diffusers.models.attention_processor import SlicedAttnProcessor

    module = diffusers_attention(**NORMED)
    module.set_processor(SlicedAttnProcessor(2))
    return module


LEFT = {
    "cross-attention": lambda: diffusers_attention(cross_attention_dim=32),
    "its processor is SlicedAttnProcessor": with_processor,
    "it has spatial_norm": lambda: diffusers_attention(spatial_norm_dim=8),
    r"several queries share a key \(kv_heads\)": lambda: diffusers_attention(kv_heads=2),
    "it has added_kv_proj_dim": lambda: diffusers_attention(added_kv_proj_dim=16),
    "its processor leaves its QK norm out": lambda: diffusers_attention(
        qk_norm="layer_norm", scale_qk=False
    ),
    "it is causal or keeps its weights": lambda: monai_blocks().SABlock(C, HEADS, save_attn=True),
    "it has relative positions": lambda: monai_blocks().SABlock(
        C, HEADS, rel_pos_embedding="decomposed", input_size=(2, 2)
    ),
    "it casts queries and keys": lambda: monai_blocks().SpatialAttentionBlock(
        2, C, attention_dtype=torch.float32
    ),
    "its output is gated": lambda: timm_attention(gated=True),
    r"MultiheadAttention is not known": lambda: nn.MultiheadAttention(C, HEADS),
    "vit_pytorch.deepvit.Attention is not known": lambda: vit_pytorch("deepvit"),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_not_described_says_why(reason):
    what = recognise(LEFT[reason]())
    assert isinstance(what, Left)
    assert re.search(reason, what.reason), what.reason


class OtherOrder(peers.QKVAttention):
    """A third order of heads."""


def test_an_unknown_order_of_heads_is_not_guessed():
    block = peers.AttentionBlock(C, HEADS, True)
    block.attention = OtherOrder(HEADS)
    assert recognise(block) == Left(
        "its order of heads is not known, or it attends to more than its input"
    )


class WithContext(peers.AttnBlock):
    """Structure of a known block with a parameter of its own."""

    def __init__(self):
        super().__init__(C)
        self.gamma = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.Sequential(), nn.GroupNorm(1, 2)])
def test_what_is_no_attention_is_none(module):
    assert recognise(module) is None


def test_a_parameter_of_its_own_makes_it_another_block():
    assert not isinstance(recognise(WithContext()), Spec)
